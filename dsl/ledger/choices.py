"""What a declaration leaves open and bytes depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attncc.dsl.layers import Dtype


@dataclass(frozen=True, slots=True)
class Scaled:
    """Quantised storage of a history.

    Attributes:
        dtype: of the elements.
        block: elements of the innermost axis with one scale; None for one scale a row.
        scale: dtype of the scales.
    """

    dtype: Dtype = Dtype.E4M3
    block: int | None = None
    scale: Dtype = Dtype.FP32


Storage = Dtype | Scaled


@dataclass(frozen=True, slots=True)
class Choices:
    """What a declaration leaves open and bytes depend on.

    Attributes:
        dtype: of activations, parameters, histories and windows that nothing else says it of.
        state_dtype: of states.
        storage: of histories, windows and states by name.
        given: an op's optional inputs that are present; those of a usual call when None.
        page: rows of a page; None for dense histories.
        keep: by history, the most rows that are kept: older ones are dropped.
        optimizer: bytes that the optimizer keeps for each element of a parameter (12: an fp32 copy
            and Adam's two moments).
        recompute: activation checkpointing: of each layer only what comes into it is saved, the
            rest is made again, for one layer at a time, in its backward.
        comm: bytes of communication buffers by node; the sharding plan knows them, one rank has
            none.
        workspace: bytes that a plan's kernels leave each other, by node (or the op's own name).
        margin: part of everything else that the allocator may lose to fragments, beside rounding.
    """

    dtype: Dtype = Dtype.BF16
    state_dtype: Dtype = Dtype.FP32
    storage: Mapping[str, Storage] = field(default_factory=dict)
    given: frozenset[str] | None = None
    page: int | None = None
    keep: Mapping[str, int] = field(default_factory=dict)
    optimizer: int = 12
    recompute: bool = False
    comm: Mapping[str, int] = field(default_factory=dict)
    workspace: Mapping[str, int] = field(default_factory=dict)
    margin: float = 0.0
