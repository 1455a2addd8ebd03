"""Ops written by hand, with values for their arguments as the drawn ones have them."""

from dataclasses import dataclass, field
from typing import Any

from attncc.dsl.ir import Kind, Lifetime
from tests.drawn.source import Arg

ROLES = {
    "g": "gate", "f": "gate", "beta": "coef", "a": "alpha", "s": "state", "doc": "label",
    "slopes": "coef", "cap": "cap", "w": "width",
}  # fmt: skip


@dataclass(frozen=True)
class Known:
    """Looks like a :class:`tests.drawn.source.Drawn`."""

    op: Any
    sizes: tuple[tuple[str, int], ...]
    roles: tuple[tuple[str, str], ...] = ()
    tags: frozenset[str] = field(default_factory=frozenset)

    @property
    def scan(self) -> bool:
        return self.op.declaration.scan is not None

    @property
    def args(self) -> tuple[Arg, ...]:
        roles = {**ROLES, **dict(self.roles)}
        if self.scan:
            roles |= {n: "unit" for n in ("q", "k", "b", "r") if n not in dict(self.roles)}
        found = []
        for t in self.op.declaration.tensors:
            if t.kind is Kind.BOOL:
                continue  # a flag stays off
            kept = t.lifetime in (Lifetime.CACHE, Lifetime.MEMORY, Lifetime.STATE)
            lifetime = "param" if t.scalar else t.lifetime.name.title() if kept else "Activation"
            role = roles.get(t.name, "value")
            found.append(Arg(t.name, str(t.pattern), role, lifetime, t.default))
        return tuple(found)

    def __repr__(self) -> str:
        return self.op.declaration.name
