"""A call inside a graph that Dynamo (or torch.export) traces: one node, whatever the op launches.

Imported on first use, inside the trace: it imports Dynamo, and ``import attncc`` must not. What is
traced is plain Python that takes a call apart. What a trace cannot do (define the custom op, raise
this package's errors) is done by functions that the trace runs as they are: they take and give
constants only, so that a trace may keep their answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attncc.dsl.build import Declaration
from attncc.dsl.errors import CacheError
from attncc.runtime import torch_schema
from attncc.runtime.arguments import arguments, read_options
from attncc.runtime.bind_caches import histories
from attncc.runtime.caches import DenseCache, PagedCache
from attncc.runtime.merge import Partial
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import QuantisedTensor
from attncc.runtime.registry import find
from attncc.runtime.torch_ops import define
from attncc.runtime.torch_schema import CacheKind, Structure

if TYPE_CHECKING:
    from attncc.runtime.api import Op


def call(op: Op, phase: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an op's custom op.

    Args:
        op: the op.
        phase: ``prefill`` or ``decode``.
        args: positional arguments, in the signature's order.
        kwargs: keyword arguments and options.

    Returns:
        What the eager call returns.

    Raises:
        CallError: as the eager call, where names, ranks or Python types are wrong (Dynamo wraps
            it); what depends on sizes and values is found when the graph runs.
    """
    decl = op.declaration
    kinds = [_kind(a) for a in args]
    _check(op.token, tuple(kinds), tuple([(name, _kind(kwargs[name])) for name in kwargs]))
    rest = dict(kwargs)
    options = read_options(decl.name, rest)
    given = arguments(decl, args, rest)
    fields, flat = torch_schema.flatten(decl, phase, given, options)
    name, names, kind = _prepare(op.token, fields)
    found = getattr(torch.ops.attncc, name).default(*flat)
    new = [found] if isinstance(found, torch.Tensor) else list(found or ())
    out = torch_schema.by_name(decl, options.out)
    results = [out[name] if name in out else new.pop(0) for name in names]
    if options.return_partial:
        return Partial.of(results[0], results[1])
    return results[0] if len(names) == 1 else getattr(Results, kind)(*results)


class Results:
    """The named tuples that traced calls return, as attributes: what a trace can look up."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _prepare(token: str, fields: tuple[Any, ...]) -> tuple[str, tuple[str, ...], str]:
    """The custom op's name, the results' names, and that of their tuple in :class:`Results`."""
    op = find(token)
    structure = Structure(fields[0], CacheKind(fields[1]), *fields[2:])
    name = define(op, structure).overload._schema.name.partition("::")[2]
    names = torch_schema.result_names(op.declaration, structure)
    kind = "_".join((token, *names))
    setattr(Results, kind, op.result_kind(names))
    return name, names, kind


# --- errors: the checks of an eager call, made on stand-ins


_WORDS: tuple[tuple[str, type], ...] = (
    ("tensor", torch.Tensor), ("pool", StatePool), ("quantised", QuantisedTensor),
    ("mapping", Mapping), ("bool", bool), ("int", int), ("float", float),
)  # fmt: skip


class _NoTensor:
    """Stands for a tensor where its type is all that is looked at; making it is no torch call."""

    __class__ = torch.Tensor  # type: ignore[assignment]


def _kind(value: Any) -> str:
    """What the checks look at, in a word."""
    if isinstance(value, (DenseCache, PagedCache)):
        return " ".join(["dense" if isinstance(value, DenseCache) else "paged", *value.tensors])
    for word, cls in _WORDS:
        if isinstance(value, cls):
            return word
    return "none" if value is None else type(value).__name__


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check(token: str, args: tuple[str, ...], kwargs: tuple[tuple[str, str], ...]) -> bool:
    """Raise what the eager call would raise about names and types."""
    decl = find(token).declaration
    rest = {name: _stand_in(kind) for name, kind in kwargs}
    options = read_options(decl.name, rest)
    arguments(decl, tuple(_stand_in(kind) for kind in args), rest)
    torch_schema.by_name(decl, options.out)
    if options.cache is not None:
        _check_cache(decl, options.cache)
    return True


def _check_cache(decl: Declaration, cache: DenseCache | PagedCache) -> None:
    for t in histories(decl.name, decl.tensors):
        if t.name not in cache.tensors:
            raise CacheError("the cache lacks a history", op=decl.name, argument=t.name)


def _stand_in(kind: str) -> Any:
    word, *names = kind.split(" ")
    tensor: Any = _NoTensor()
    tensors = dict.fromkeys(names, tensor)
    known: dict[str, Any] = {
        "tensor": tensor, "pool": StatePool(tensor, tensor), "bool": True, "int": 0, "float": 0.0,
        "quantised": QuantisedTensor(tensor, tensor), "mapping": {}, "none": None,
        "dense": DenseCache(tensors, tensor), "paged": PagedCache(tensors, tensor, tensor),
    }  # fmt: skip
    return known[word] if word in known else type(word, (), {})()
