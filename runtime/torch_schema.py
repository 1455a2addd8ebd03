"""The schema of a custom op: what a call's structure makes of an op's signature.

A custom op's arguments are one flat list: the signature in its order (a pool is its tensor, its
slots and its out-slots), the cache's tensors, the sizes, the tensors to write, the options. This
module is the one place that knows the order: it writes the schema, flattens a call and puts a flat
list together again. :func:`flatten` is traced by Dynamo and therefore plain Python.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attncc.dsl.build import Declaration
from attncc.dsl.errors import ArgumentError
from attncc.dsl.ir import Kind, Lifetime, Tensor
from attncc.runtime.arguments import Options
from attncc.runtime.bind_caches import histories
from attncc.runtime.caches import Cache, DenseCache, PagedCache
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import QuantisedTensor

HELD = (Lifetime.STATE, Lifetime.WINDOW)


class CacheKind(enum.Enum):
    """Where a call's histories live."""

    NONE = "none"
    DENSE = "dense"
    PAGED = "paged"


@dataclass(frozen=True, slots=True)
class Structure:
    """What of a call decides its schema: never a size, a dtype or a value.

    Attributes:
        phase: ``prefill`` or ``decode``.
        cache: where the histories live.
        pools: states that are given as a pool.
        out: results that are written into tensors of the caller, in the order of the results.
        sizes: axes in ``sizes=``.
        quantised: histories that are given whole as a :class:`QuantisedTensor`.
        scales: histories of the cache that have scales.
        return_lse: whether the lse comes back.
        return_partial: whether a partial comes back.
    """

    phase: str
    cache: CacheKind = CacheKind.NONE
    pools: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    quantised: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    return_lse: bool = False
    return_partial: bool = False

    @property
    def label(self) -> str:
        """A readable name of the structure, for instance ``decode_paged_lse``."""
        parts = [self.phase]
        if self.cache is not CacheKind.NONE:
            parts.append(self.cache.value)
        named = {
            "scaled": self.scales, "quantised": self.quantised, "pool": self.pools,
            "out": self.out, "size": self.sizes,
        }  # fmt: skip
        parts += ["_".join((word, *names)) for word, names in named.items() if names]
        parts += ["lse"] * self.return_lse + ["partial"] * self.return_partial
        return "_".join(parts)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a schema."""

    name: str
    type: str
    written: bool = False

    @property
    def optional(self) -> bool:
        """Whether None may stand for it."""
        return self.type.endswith("?")


def check(decl: Declaration, structure: Structure) -> None:
    """A structure that calls of the op can have.

    Raises:
        ArgumentError: an unknown phase, a pool that is no state, an output the op does not have.
        CacheError: a cache for an op without histories.
        RefusedError: the op's histories lie in blocks.
    """
    held = _names(decl, *HELD)
    _among(decl, "phase", [structure.phase], ["prefill", "decode"])
    past = (Lifetime.CACHE, Lifetime.MEMORY)
    _among(decl, "pools", structure.pools, held)
    _among(decl, "quantised", structure.quantised, _names(decl, *past))
    _among(decl, "scales", structure.scales, _names(decl, Lifetime.CACHE))
    _among(decl, "out", structure.out, [*held, *(name for name, _ in decl.outputs)])
    pooled = [name for name in structure.out if name in structure.pools]
    if pooled:
        raise ArgumentError(
            "a state in a pool does not come back", op=decl.name, argument=f"out[{pooled[0]}]"
        )
    if structure.cache is not CacheKind.NONE:
        histories(decl.name, decl.tensors)


def _names(decl: Declaration, *lifetimes: Lifetime) -> list[str]:
    return [t.name for t in decl.tensors if t.lifetime in lifetimes]


def _among(decl: Declaration, what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ArgumentError(
                "not a structure of the op's calls",
                op=decl.name, argument=what, expected=" ".join(known) or "none", found=name,
            )  # fmt: skip


def result_names(decl: Declaration, structure: Structure) -> tuple[str, ...]:
    """Names of everything a call of this structure returns, in order."""
    held = [name for name in _names(decl, *HELD) if name not in structure.pools]
    lse = ["lse"] if structure.return_lse or structure.return_partial else []
    return (*held, *(name for name, _ in decl.outputs), *lse)


def new_names(decl: Declaration, structure: Structure) -> tuple[str, ...]:
    """Names of the results that the custom op itself returns: those the caller gave no tensor."""
    return tuple(n for n in result_names(decl, structure) if n not in structure.out)


def arguments(decl: Declaration, structure: Structure) -> tuple[Argument, ...]:
    """The schema's arguments, in order, each with a name of its own."""
    found: list[Argument] = []
    for t in decl.tensors:
        found += _of_signature(t, structure)
    if structure.cache is not CacheKind.NONE:
        held = _names(decl, Lifetime.CACHE)
        for n in held:
            found.append(Argument(f"cache_{n}", "Tensor", written=True))
            found += [Argument(f"scales_{n}", "Tensor", written=True)] * (n in structure.scales)
        if structure.cache is CacheKind.PAGED:
            found.append(Argument("block_table", "Tensor"))
            found += [Argument(f"layout_{n}", "str?") for n in held]
        found.append(Argument("lengths", "Tensor", written=True))
    found += [Argument(f"size_{axis}", "SymInt") for axis in structure.sizes]
    found += [Argument(f"out_{name}", "Tensor", written=True) for name in structure.out]
    found += [Argument("cu_seqlens", "Tensor?"), Argument("cu_seqlens_k", "Tensor?")]
    found.append(Argument("backend", "str?"))
    return tuple(_unique(found))


def _of_signature(t: Tensor, structure: Structure) -> list[Argument]:
    if t.name in structure.quantised:
        return [Argument(t.name, "Tensor"), Argument(f"{t.name}_scales", "Tensor")]
    if t.name in structure.pools:
        slots = [Argument(f"{t.name}_slots", "Tensor"), Argument(f"{t.name}_out_slots", "Tensor?")]
        return [Argument(t.name, "Tensor", written=True), *slots]
    kind = "Tensor"
    if t.scalar:
        kind = {Kind.INT: "SymInt", Kind.BOOL: "bool"}.get(t.kind, "float")
    return [Argument(t.name, f"{kind}?" if t.optional else kind)]


def _unique(found: list[Argument]) -> list[Argument]:
    """ASCII names (a schema has no others), no two alike: an op may well have a ``cache_k``."""
    taken: set[str] = set()
    result = []
    for a in found:
        name = identifier(a.name)
        while name in taken:
            name += "_"
        taken.add(name)
        result.append(Argument(name, a.type, a.written))
    return result


def identifier(name: str) -> str:
    """A Python identifier in ASCII."""
    return "".join(c if c.isascii() else f"u{ord(c):x}" for c in name)


def schema(decl: Declaration, structure: Structure) -> str:
    """The schema without the op's name: ``(Tensor q, ..., Tensor(a!) cache_k) -> Tensor``."""
    found = arguments(decl, structure)
    last = max((i for i, a in enumerate(found) if not a.optional), default=-1)
    parts = []
    for i, a in enumerate(found):
        kind = a.type.replace("Tensor", f"Tensor(a{i}!)") if a.written else a.type
        parts.append(f"{kind} {a.name}" + ("=None" if i > last else ""))
    results = ", ".join(["Tensor"] * len(new_names(decl, structure)))
    return f"({', '.join(parts)}) -> {results if results == 'Tensor' else f'({results})'}"


# --- flat lists


def flatten(
    decl: Declaration, phase: str, given: dict[str, Any], options: Options
) -> tuple[tuple[Any, ...], list[Any]]:
    """A call as its structure (the fields of a :class:`Structure`, as constants) and a flat list.

    Args:
        decl: the declaration.
        phase: ``prefill`` or ``decode``.
        given: the arguments by name, absent ones left out.
        options: the options; a cache has every history of the op.

    Raises:
        ArgumentError: ``out`` is neither a tensor nor a mapping.
    """
    flat: list[Any] = []
    pools: list[str] = []
    quantised: list[str] = []
    for t in decl.tensors:
        value = given.get(t.name)
        if isinstance(value, StatePool):
            pools.append(t.name)
            flat += [value.pool, value.slots, value.out_slots]
        elif isinstance(value, QuantisedTensor):
            quantised.append(t.name)
            flat += [value.data, value.scales]
        else:
            flat.append(value)
    kind, scales = _flatten_cache(decl, options.cache, flat)
    axes = sorted(options.sizes)
    flat += [options.sizes[axis] for axis in axes]
    out = by_name(decl, options.out)
    held = _names(decl, *HELD)
    order = [n for n in [*held, *(name for name, _ in decl.outputs)] if n in out]
    order += [n for n in out if n not in order]  # unknown ones, for the check to name
    flat += [out[name] for name in order]
    flat += [options.cu_seqlens, options.cu_seqlens_k, options.backend]
    names = (tuple(pools), tuple(order), tuple(axes), tuple(quantised), tuple(scales))
    flags = (bool(options.return_lse), bool(options.return_partial))
    return (phase, kind, *names, *flags), flat


def by_name(decl: Declaration, out: Any) -> dict[str, Any]:
    """``out=`` by result name; a single tensor is the first output's.

    Raises:
        ArgumentError: neither a tensor nor a mapping.
    """
    if out is None:
        return {}
    if isinstance(out, torch.Tensor):
        return {decl.outputs[0][0]: out}
    if not isinstance(out, Mapping):
        raise ArgumentError(
            "out= is a tensor or a mapping by name",
            op=decl.name, argument="out", found=type(out).__name__,
        )  # fmt: skip
    return {name: tensor for name, tensor in out.items() if tensor is not None}


def _flatten_cache(decl: Declaration, cache: Any, flat: list[Any]) -> tuple[str, list[str]]:
    if cache is None:
        return "none", []
    held = _names(decl, Lifetime.CACHE)
    scales = [name for name in held if name in cache.scales]
    for name in held:
        flat.append(cache.tensors[name])
        if name in scales:
            flat.append(cache.scales[name])
    if isinstance(cache, PagedCache):
        flat.append(cache.block_table)
        flat += [cache.layouts.get(name) for name in held]
    flat.append(cache.lengths)
    return "paged" if isinstance(cache, PagedCache) else "dense", scales


def unflatten(
    decl: Declaration, structure: Structure, flat: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A flat list as the op's arguments by name, and as keywords those options that are set.

    The dispatcher leaves trailing defaults out of the list, all of them None.
    """
    rest = itertools.chain(flat, itertools.repeat(None))
    given: dict[str, Any] = {}
    for t in decl.tensors:
        value = next(rest)
        if t.name in structure.pools:
            value = StatePool(value, next(rest), next(rest))
        elif t.name in structure.quantised:
            value = QuantisedTensor(value, next(rest))
        if value is not None:
            given[t.name] = value
    options: dict[str, Any] = {"cache": _unflatten_cache(decl, structure, rest)}
    options["sizes"] = {axis: next(rest) for axis in structure.sizes} or None
    options["out"] = {name: next(rest) for name in structure.out} or None
    options |= {name: next(rest) for name in ("cu_seqlens", "cu_seqlens_k", "backend")}
    options |= {n: getattr(structure, n) or None for n in ("return_lse", "return_partial")}
    return given, {name: value for name, value in options.items() if value is not None}


def _unflatten_cache(decl: Declaration, structure: Structure, rest: Iterator[Any]) -> Cache | None:
    if structure.cache is CacheKind.NONE:
        return None
    held = _names(decl, Lifetime.CACHE)
    tensors, scales = {}, {}
    for name in held:
        tensors[name] = next(rest)
        if name in structure.scales:
            scales[name] = next(rest)
    if structure.cache is CacheKind.DENSE:
        return DenseCache(tensors, next(rest), scales)
    table = next(rest)
    named = {name: next(rest) for name in held}
    layouts = {name: text for name, text in named.items() if text is not None}
    return PagedCache(tensors, table, next(rest), layouts, scales)
