"""Calls made up from a declaration, to find the kernels that such calls need; none is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import torch

from attncc.codegen.specialise import runtime_axes
from attncc.dsl.axes import Pattern
from attncc.dsl.build import Declaration
from attncc.dsl.errors import ArgumentError, UnknownSizeError
from attncc.dsl.ir import Kind, Lifetime, Tensor
from attncc.runtime.bind import bind, window_axes
from attncc.runtime.caches import DenseCache, PagedCache
from attncc.runtime.call import Call
from attncc.runtime.pools import StatePool

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32}
_HELD = (Lifetime.STATE, Lifetime.WINDOW)


class Trait(Enum):
    """What a call may have beside its tensors."""

    PACKED = "packed"
    CACHE = "cache"
    PAGED = "paged"
    POOL = "pool"
    LSE = "lse"


@dataclass(frozen=True, slots=True)
class Sample:
    """A kind of call.

    Attributes:
        sizes: sizes of the axes that kernels compile in; batch, lengths and the outer head axis
            have usual values, which only steer the choice between plans.
        phase: ``prefill`` or ``decode``.
        dtype: of every tensor but states (fp32).
        dtypes: dtypes of single tensors by name.
        traits: packed sequences, a cache, a pool, the lse.
        page: rows of a page.
        given: optional inputs that are present and flags that are on; those of a usual call
            (:attr:`attncc.dsl.ir.Tensor.usual`) when None.
    """

    sizes: Mapping[str, int]
    phase: str = "prefill"
    dtype: str = "bf16"
    dtypes: Mapping[str, str] = field(default_factory=dict)
    traits: frozenset[Trait] = frozenset()
    page: int = 16
    given: frozenset[str] | None = None


def sample_call(declaration: Declaration, sample: Sample) -> Call:
    """A bound call of that kind, on the CPU; its tensors hold nothing.

    Raises:
        UnknownSizeError: an axis that kernels compile in has no size.
        CallError: the traits do not fit the op.
    """
    sizes = _sizes(declaration, sample)
    named = [t for t in declaration.tensors if sample.given is None or t.name in sample.given]
    cached = bool(sample.traits & {Trait.CACHE, Trait.PAGED})
    values: dict[str, Any] = {}
    for t in named:
        if t.scalar:
            if (value := _number(t, sample)) is not None:
                values[t.name] = value
            continue
        pattern = t.pattern
        if cached and t.lifetime is Lifetime.CACHE:
            pattern = Pattern(tuple(tuple("T" if a == "S" else a for a in d) for d in pattern.dims))
        full = dict(sizes)
        if (axis := window_axes(declaration.trace()).get(t.name)) is not None:
            full[axis] -= 1  # the body sees one row more than is kept
        values[t.name] = _tensor(t, pattern, full, sample)
    call, _ = bind(declaration, (), values | _options(declaration, sizes, sample))
    return call


def _number(t: Tensor, sample: Sample) -> bool | float | None:
    """A host number's value; None leaves it out."""
    if sample.given is None and not t.usual:
        return None
    if t.kind is Kind.BOOL:
        return True
    return t.default if isinstance(t.default, (int, float)) else 1


def _sizes(declaration: Declaration, sample: Sample) -> dict[str, int]:
    program = declaration.trace(sample.given)
    usual = dict.fromkeys(runtime_axes(program), 8)
    tokens = 1 if sample.phase == "decode" else 4096
    usual |= {"B": 8, "S": 4096, "T": tokens}
    sizes = {**usual, **sample.sizes}
    axes = {a for t in declaration.tensors for a in t.pattern.axes}
    unknown = sorted(axes - sizes.keys())
    if unknown:
        raise UnknownSizeError(
            "a size that kernels compile in is missing",
            op=declaration.name,
            axis=" ".join(unknown),
            help="give it, for instance " + " ".join(f"{a}=128" for a in unknown),
        )
    if extra := sorted(sample.sizes.keys() - axes - {"B", "T", "S"}):
        raise ArgumentError(
            "the op has no such axis",
            op=declaration.name,
            expected=" ".join(sorted(axes)),
            found=" ".join(extra),
        )
    return sizes


def _tensor(
    t: Tensor, pattern: Pattern, sizes: Mapping[str, int], sample: Sample
) -> torch.Tensor | StatePool:
    held = t.lifetime in _HELD
    dtype = DTYPES[sample.dtypes.get(t.name, "fp32" if held else sample.dtype)]
    full = dict(sizes)
    if Trait.PACKED in sample.traits and {"T", "S"} & set(pattern.axes):
        pattern = pattern.without("B")
        full |= {"T": sizes["B"] * sizes["T"], "S": sizes["B"] * sizes["S"]}
        if sample.phase == "prefill":
            full["S"] = full["T"]
    # Nothing touches the memory, so it is never there.
    made = torch.empty([prod(full[a] for a in dim) for dim in pattern.dims], dtype=dtype)
    if held and Trait.POOL in sample.traits:
        return StatePool(made, torch.arange(sizes["B"], dtype=torch.int32))
    return made


def _options(
    declaration: Declaration, sizes: Mapping[str, int], sample: Sample
) -> dict[str, object]:
    found: dict[str, object] = {}
    dtype = DTYPES[sample.dtype]
    rest = {a: n for a, n in sizes.items() if a != "S"}
    if Trait.CACHE in sample.traits:
        found["cache"] = DenseCache.allocate(
            declaration, sizes=rest, capacity=sizes["S"], dtype=dtype
        )
    elif Trait.PAGED in sample.traits:
        found["cache"] = PagedCache.allocate(
            declaration, sizes=rest, capacity=sizes["S"], page=sample.page, dtype=dtype
        )
    if Trait.PACKED in sample.traits:
        steps = torch.arange(sizes["B"] + 1, dtype=torch.int32)
        found["cu_seqlens"] = steps * sizes["T"]
        if "cache" not in found and sample.phase == "decode":
            held = {a for t in declaration.tensors for a in t.pattern.axes}
            if "S" in held:
                found["cu_seqlens_k"] = steps * sizes["S"]
    if Trait.LSE in sample.traits:
        found["return_lse"] = True
    return found
