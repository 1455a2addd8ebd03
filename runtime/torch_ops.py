"""Each op and phase as a custom op of ``torch.library``, so that torch.compile sees one node.

An op has one custom op for each :class:`Structure` of its calls, defined when it is first needed:
by ``Op.register``, or while a call is traced (``torch_trace``). Schemas mark what a call writes
(caches, lengths, pools, given outputs), results come from fake kernels by patterns alone, and the
kernels are the op's own eager calls.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from attncc.dsl.build import Declaration
from attncc.dsl.errors import ArgumentError, RefusedError
from attncc.dsl.text import program_text
from attncc.runtime import torch_schema
from attncc.runtime.merge import Partial
from attncc.runtime.torch_fake import fake_results
from attncc.runtime.torch_schema import CacheKind, Structure

if TYPE_CHECKING:
    from attncc.runtime.api import Op

NAMESPACE = "attncc"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_LOCK = threading.Lock()
_DEFINED: dict[tuple[int, Structure], Definition] = {}
_NAMES: set[str] = set()


def _after_fork() -> None:
    global _LOCK
    _LOCK = threading.Lock()  # a thread that held it does not exist in the child


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, slots=True)
class Definition:
    """A custom op.

    Attributes:
        op: whose calls it runs.
        structure: which of them.
        overload: ``torch.ops.attncc.<name>.default``.
    """

    op: Op
    structure: Structure
    overload: torch._ops.OpOverload


def define(op: Op, structure: Structure) -> Definition:
    """The custom op of a structure, defined now if it is not yet.

    Raises:
        ArgumentError, CacheError, RefusedError: no call of the op has this structure.
    """
    with _LOCK:
        key = (id(op), structure)  # a definition keeps its op, so that no id comes twice
        if key not in _DEFINED:
            torch_schema.check(op.declaration, structure)
            _DEFINED[key] = _define(op, structure)
        return _DEFINED[key]


def register(op: Op, phase: str, **structure: Any) -> torch._ops.OpOverload:
    """See :meth:`attncc.runtime.api.Op.register`."""
    return define(op, _structure(op.declaration, phase, structure)).overload


def _structure(decl: Declaration, phase: str, given: dict[str, Any]) -> Structure:
    """The structure that a traced call of this kind has: names in its order, each once."""
    known = [f.name for f in dataclass_fields(Structure)][1:]
    for name in given:
        if name not in known:
            raise ArgumentError(
                "not a part of a call's structure",
                op=decl.name, argument=name, expected=" ".join(known),
            )  # fmt: skip
    cache = given.get("cache", CacheKind.NONE)
    kinds = {kind.value: kind for kind in CacheKind}
    if cache not in kinds and not isinstance(cache, CacheKind):
        raise ArgumentError(
            "no such cache",
            op=decl.name, argument="cache", expected=" ".join(kinds), found=cache,
        )  # fmt: skip
    order = [*(t.name for t in decl.tensors), *(name for name, _ in decl.outputs)]
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, bool) or name == "cache":
            fields[name] = value
            continue
        names = (value,) if isinstance(value, str) else tuple(value)
        if len(set(names)) < len(names):
            raise ArgumentError("a name twice", op=decl.name, argument=name, found=" ".join(names))
        ranks = {n: i for i, n in enumerate(sorted(names) if name == "sizes" else order)}
        fields[name] = tuple(sorted(names, key=lambda n: ranks.get(n, len(ranks))))
    return Structure(phase, **{**fields, "cache": kinds.get(cache, cache)})


def _define(op: Op, structure: Structure) -> Definition:
    decl = op.declaration
    name = _name(decl, structure)
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    text = name + torch_schema.schema(decl, structure)
    _LIBRARY.define(text, tags=tags)  # type: ignore[no-untyped-call]
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    definition = Definition(op, structure, overload)

    run = _runner(op, structure)

    def kernel(*flat: Any) -> Any:
        return _packed_results(run(flat))

    def fake(*flat: Any) -> Any:
        return _packed_results(fake_results(decl, structure, flat))

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, key)  # type: ignore[no-untyped-call]
    autograd = _autograd(definition)
    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return definition


def _name(decl: Declaration, structure: Structure) -> str:
    """Readable, and another one for another declaration, in every process alike.

    Graphs are kept on disk by the names of their nodes, so the name says what the op computes. Two
    declarations of one text have an ordinal.
    """
    base = f"{decl.name}_{structure.label}_{fingerprint(decl)}"
    name, n = torch_schema.identifier(base), 1
    while name in _NAMES:
        n += 1
        name = f"{torch_schema.identifier(base)}_{n}"
    _NAMES.add(name)
    return name


def fingerprint(decl: Declaration) -> str:
    """Eight hex digits of the signature and of the traced programs."""
    optional = frozenset(t.name for t in decl.tensors if t.optional)
    presences = [optional, *(optional - {name} for name in sorted(optional)), frozenset()]
    parts = [repr((t.name, str(t.pattern), t.lifetime, t.kind, t.default)) for t in decl.tensors]
    parts += [program_text(decl.trace(given)) for given in dict.fromkeys(presences)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


# --- kernels


def _packed_results(found: list[torch.Tensor]) -> Any:
    """Results as a schema has them: nothing, a tensor or a tuple."""
    if not found:
        return None
    return found[0] if len(found) == 1 else tuple(found)


def _runner(op: Op, structure: Structure) -> Callable[[tuple[Any, ...]], list[torch.Tensor]]:
    """Runs the op's eager call on flat arguments; gives the results that had no tensor to go to.

    What is known of the structure is worked out here, once, and not on every call.
    """
    decl, phase = op.declaration, structure.phase
    width = len(torch_schema.arguments(decl, structure))
    given, options = torch_schema.unflatten(decl, structure, range(width))
    every = {**given, **options}
    flags = {name: value for name, value in every.items() if value is True}
    places = {name: value for name, value in every.items() if type(value) is int}
    rest = every.keys() - flags.keys() - places.keys()
    built = {name: _builder(every[name]) for name in rest}
    names = torch_schema.result_names(decl, structure)
    kept = [i for i, name in enumerate(names) if name not in structure.out]

    def run(flat: tuple[Any, ...]) -> list[torch.Tensor]:
        full = (*flat, *(None,) * (width - len(flat)))  # the dispatcher leaves defaults out
        kwargs = {name: full[i] for name, i in places.items() if full[i] is not None}
        for name, build in built.items():
            kwargs[name] = build(full)
        result = op.run_eager(phase, (), {**kwargs, **flags})
        if isinstance(result, Partial):
            result = (result.u, result.m)
        found = (result,) if isinstance(result, torch.Tensor) else result
        return [found[i] for i in kept]

    return run


def _builder(value: Any) -> Callable[[tuple[Any, ...]], Any]:
    """Builds an argument from a flat list, as one whose leaves are places in that list."""
    if type(value) is int:
        return itemgetter(value)
    if isinstance(value, dict):
        parts = {name: _builder(part) for name, part in value.items()}
        return lambda flat: {
            name: found for name, build in parts.items() if (found := build(flat)) is not None
        }
    kind, fields = type(value), [_builder(getattr(value, f.name)) for f in dataclass_fields(value)]
    return lambda flat: kind(*[build(flat) for build in fields])


def _autograd(definition: Definition) -> Callable[..., Any]:
    """The kernel above the others: it runs them, and refuses to go backward."""
    overload, name = definition.overload, definition.op.declaration.name
    written = [i for i, a in enumerate(overload._schema.arguments) if a.is_write]

    def refuse() -> RefusedError:
        return RefusedError(
            "there is no backward yet", op=name, argument=str(overload),
            help="call it under torch.no_grad() or torch.inference_mode()",
        )  # fmt: skip

    def below(keyset: Any, *flat: Any) -> Any:
        if written:  # a generated kernel writes without telling autograd
            torch.autograd.graph.increment_version([flat[i] for i in written])
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *flat)

    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *flat: Any) -> Any:
            return below(keyset, *flat)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise refuse()

    def kernel(keyset: Any, *flat: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*flat)):
            return below(keyset, *flat)
        if written:  # what it writes would lose its gradient in silence
            raise refuse()
        return NoBackward.apply(keyset, *flat)  # type: ignore[no-untyped-call]

    return kernel
