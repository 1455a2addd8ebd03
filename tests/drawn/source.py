"""A drawn declaration: source text in a real file, so that errors can point into it.

Choices are made with a ``random.Random``: hypothesis has one that it can shrink, and a plain one
with a seed draws the same declaration on every machine.
"""

import atexit
import hashlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any


@dataclass(frozen=True)
class Arg:
    """One argument: how it is declared, and what its values are like (``role``)."""

    name: str
    pattern: str
    role: str
    lifetime: str = "Activation"
    default: float | None = None

    @property
    def declared(self) -> str:
        default = "" if self.default is None else f", default={self.default:g}"
        if self.lifetime == "param":
            whole = ", integer=True" if self.role == "width" else ""
            return f"{self.name}=ac.param({default[2:]}{whole})"
        return f'{self.name}=ac.{self.lifetime}("{self.pattern}"{default})'


@dataclass(frozen=True, repr=False)
class Drawn:
    """One declaration, the sizes its axes have in calls, and what is special about it."""

    args: tuple[Arg, ...]
    out: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    scan: bool
    sizes: tuple[tuple[str, int], ...]
    tags: frozenset[str] = field(default_factory=frozenset)

    @property
    def source(self) -> str:
        layouts = ", ".join(f'"{n}": "{p}"' for n, p in self.out)
        out = f'out="{self.out[0][1]}"' if len(self.out) == 1 else f"out={{{layouts}}}"
        scan = 'scan="T", ' if self.scan else ""
        head = ["import attncc as ac", "", "", f"@ac.op({scan}{out})"]
        signature = ["def drawn(", *(f"    {a.declared}," for a in self.args), "):"]
        return "\n".join([*head, *signature, *(f"    {x}" for x in self.lines), ""])

    @property
    def op(self) -> Any:
        return build(self.source)[0]

    @property
    def path(self) -> Path:
        return build(self.source)[1]

    def __repr__(self) -> str:
        sizes = " ".join(f"{a}={n}" for a, n in self.sizes)
        return f"\n{self.source}# {sizes}; {' '.join(sorted(self.tags))}\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@lru_cache(maxsize=1)
def folder() -> Path:
    """Where this process keeps its declarations until it ends."""
    path = Path(tempfile.mkdtemp(prefix="attncc-drawn-")).resolve()
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def load(source: str, path: Path) -> Any:
    """Run a declaration's file anew."""
    space: dict[str, Any] = {"__name__": path.stem}
    exec(compile(source, str(path), "exec"), space)
    return space["drawn"]


@lru_cache(maxsize=256)
def build(source: str) -> tuple[Any, Path]:
    """The op of a source text, and its file."""
    path = folder() / f"drawn_{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
    path.write_text(source, encoding="utf-8")
    return load(source, path), path


class Body:
    """A declaration while it is drawn: arguments appear when an expression asks for one."""

    def __init__(self, r: Random) -> None:
        self.r = r
        self.args: list[Arg] = []
        self.lines: list[str] = []
        self.sizes: dict[str, int] = {}
        self.tags: set[str] = set()

    def finish(self, held: Sequence[str], *outputs: tuple[str, str, str]) -> Drawn:
        """The declaration: states by name, outputs as (name, pattern, expression).

        Arguments that no line uses fall away.
        """
        self.lines.append(f"return {', '.join([*held, *(x for _, _, x in outputs)])}")
        words = set(re.findall(r"\w+", "\n".join(self.lines)))
        args = tuple(a for a in self.args if a.name in words)
        axes = {axis for a in args for axis in re.findall(r"\w+", a.pattern)}
        sizes = tuple((a, n) for a, n in self.sizes.items() if a in axes)
        out = tuple((n, p) for n, p, _ in outputs)
        return Drawn(args, out, tuple(self.lines), bool(held), sizes, frozenset(self.tags))

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred draws; false is the simpler choice."""
        return self.r.randint(0, 99) >= 100 - percent

    def pick(self, choices: Sequence[str]) -> str:
        return self.r.choice(choices)

    def arg(
        self, stem: str, pattern: str, role: str, lifetime: str = "Activation",
        default: float | None = None,
    ) -> str:  # fmt: skip
        """A new argument."""
        taken = sum(a.name.rstrip("0123456789") == stem for a in self.args)
        name = f"{stem}{taken or ''}"
        self.args.append(Arg(name, " ".join(pattern.split()), role, lifetime, default))
        return name

    def some(self, stem: str, pattern: str, role: str, **more: Any) -> str:
        """An argument of this kind: one that is there already, or a new one."""
        pattern = " ".join(pattern.split())
        kind = (pattern, role, more.get("lifetime", "Activation"))
        old = [a.name for a in self.args if (a.pattern, a.role, a.lifetime) == kind]
        if old and self.chance(60):
            return self.pick(old)
        return self.arg(stem, pattern, role, **more)

    def let(self, stem: str, expression: str) -> str:
        """A line that names a value."""
        taken = sum(line.split(" = ")[0].rstrip("0123456789") == stem for line in self.lines)
        name = f"{stem}{taken or ''}"
        self.lines.append(f"{name} = {expression}")
        return name
