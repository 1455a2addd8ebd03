"""Everything an op keeps for a fixed set of sequences, allocated at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import torch

from attncc.dsl.errors import CacheError
from attncc.dsl.ir import Lifetime
from attncc.dsl.ledger.model import Phase, in_training, phase_of
from attncc.runtime.caches import Cache, DenseCache, PagedCache, Storage
from attncc.runtime.owners.kept import FIXED, INDEX, Stored, declared, kept, pools
from attncc.runtime.pools import StatePool


@dataclass(frozen=True, slots=True)
class Allocation:
    """Everything an op keeps for a fixed set of sequences: ``op(q, k, v, **it.arguments)``.

    Attributes:
        cache: its histories, or None.
        states: a pool for each state and window, in which sequence b has slot b; all zero.
    """

    cache: Cache | None
    states: Mapping[str, StatePool]

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of a call."""
        given = {} if self.cache is None else {"cache": self.cache}
        return {**given, **self.states}


class _Common(TypedDict):
    """What the allocation of either cache takes."""

    sizes: Mapping[str, int]
    capacity: int
    dtype: Storage | Mapping[str, Storage]
    device: torch.device | str


def allocate(
    op: Any,
    *,
    sizes: Mapping[str, int],
    capacity: int = 0,
    page: int | None = None,
    layouts: Mapping[str, str] | None = None,
    dtype: Storage | Mapping[str, Storage] = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    phase: str = "decode",
) -> Allocation:
    """Allocate every cache, state and window of an op, empty, for ``B`` sequences.

    A sequence grows without moving within its capacity. Where sequences come and go, take a
    :class:`PageOwner` and a :class:`StateOwner`.

    Args:
        op: the op (or its declaration).
        sizes: sizes of ``B`` and of every axis of what it keeps but S.
        capacity: tokens that each sequence has room for.
        page: rows of a page; None for dense caches.
        layouts: of pages, as :class:`PagedCache` has them.
        dtype: storage of histories and windows, of all or by name.
        state_dtype: of states that ``dtype`` does not name.
        device: where it lives.
        phase: what it is for: ``prefill`` or ``decode``.

    Raises:
        CacheInTrainingError: it is for ``train``, where nothing outlives a step.
        CacheError: the op keeps nothing, a size or a storage is missing, or a layout or a block
            does not fit.
        ArgumentError: a state without a memory axis B of its own.
        DtypeError: no call takes what is kept of that dtype.
        RefusedError: a history lies in blocks.
    """
    declaration, stored = declared(op), Stored(dtype, state_dtype)
    if phase_of(phase) is Phase.TRAIN:
        raise in_training(declaration.name, "phase")
    tensors = kept(declaration)
    if "B" not in sizes:
        raise CacheError(
            "a size is missing", op=declaration.name, axis="B", expected="an entry in sizes="
        )
    cache: Cache | None = None
    if any(t.lifetime is Lifetime.CACHE for t in tensors):
        common = _Common(sizes=sizes, capacity=capacity, dtype=dtype, device=device)
        if page is None:
            cache = DenseCache.allocate(declaration, **common)
        else:
            cache = PagedCache.allocate(declaration, page=page, layouts=layouts, **common)
    states: dict[str, StatePool] = {}
    if any(t.lifetime in FIXED for t in tensors):
        slots = torch.arange(sizes["B"], dtype=INDEX, device=device)
        found = pools(declaration, sizes=sizes, slots=sizes["B"], stored=stored, device=device)
        states = {name: StatePool(pool, slots) for name, pool in found.items()}
    return Allocation(cache, states)
