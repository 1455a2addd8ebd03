"""The caches and pools of a call: their shapes, dtypes and (where looking is free) their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from attncc.dsl.axes import PAGE, PAGES, Pattern
from attncc.dsl.errors import (
    ArgumentError,
    CacheError,
    CacheInTrainingError,
    OverlapError,
    RefusedError,
)
from attncc.dsl.ir import Lifetime, Tensor
from attncc.runtime import cache_checks, checks
from attncc.runtime.caches import Cache, PagedCache
from attncc.runtime.pools import StatePool

INT32 = (torch.int32,)
TABLE = Pattern((("B",), ("i",)))


def histories(op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a cache object holds.

    Raises:
        CacheError: there are none.
        RefusedError: one lies in blocks such as ``(Sb C)``, which no length cuts.
    """
    found = [t for t in tensors if t.lifetime is Lifetime.CACHE]
    if not found:
        raise CacheError("the op has no Cache argument", op=op, argument="cache")
    for t in found:
        whole(op, t)
    return found


def no_gradients(op: str, tensors: Iterable[torch.Tensor]) -> None:
    """A cache has no place in autograd: what is appended would not pass gradients on.

    Raises:
        CacheInTrainingError: gradients are on and an argument wants one.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise CacheInTrainingError(
            "a cache in training", op=op, argument="cache", expected="no gradients",
            found="an argument that requires grad",
            help="train on whole histories, without cache=; for inference use torch.no_grad()",
        )  # fmt: skip


def whole(op: str, t: Tensor) -> None:
    """A history that lies along S.

    Raises:
        RefusedError: it lies in blocks, which a call can only be given whole.
    """
    if t.lifetime is Lifetime.CACHE and "S" not in t.pattern.axes:
        raise RefusedError(
            "a history in blocks is passed whole: neither a cache object nor packed sequences",
            op=op, argument=t.name, expected="an axis S", found=f"[{t.pattern}]", loc=t.loc,
        )  # fmt: skip


def add_sizes(op: str, tensors: Sequence[Tensor], cache: Cache, sizes: checks.Sizes) -> None:
    """Note the extents of a cache's tensors.

    Raises:
        CacheError: a history is missing, or its layout has other axes.
        RankError, StrideError: a tensor does not fit its pattern.
    """
    for t in histories(op, tensors):
        if t.name not in cache.tensors:
            raise CacheError("the cache lacks a history", op=op, argument=t.name)
        held, pattern = cache.tensors[t.name], cache.pattern(op, t)
        checks.rank(op, f"cache.{t.name}", held, pattern)
        checks.dense(op, f"cache.{t.name}", held)
        sizes.add(f"cache.{t.name}", held.shape, pattern)


def capacity(cache: Cache, sizes: checks.Sizes) -> None:
    """S of a paged call is what a row of the block table has room for.

    Raises:
        RankError: the block table is not a table.
    """
    if isinstance(cache, PagedCache):
        checks.rank(sizes.op, "cache.block_table", cache.block_table, TABLE)
        sizes.found["S"] = sizes.found.get(PAGE, 0) * cache.block_table.shape[1]
        sizes.by["S"] = "cache.block_table"


def check_cache(
    op: str, cache: Cache, sizes: Mapping[str, int], dtypes: Mapping[str, tuple[torch.dtype, ...]],
    device: torch.device, new: torch.Tensor | int,
) -> None:  # fmt: skip
    """Everything else about a cache.

    Args:
        op: name of the op.
        cache: the cache; its shapes have been settled.
        sizes: every axis.
        dtypes: what each history may be stored as.
        device: where it must live.
        new: tokens that each sequence brings, one number or one a sequence.

    Raises:
        CacheError: lengths or table of the wrong shape or dtype, or no room.
        StrideError: lengths, or a row of the table, that do not lie side by side.
        PageError: where values are looked at: see :func:`cache_checks.pages`.
    """
    for name, allowed in dtypes.items():
        checks.device(op, f"cache.{name}", cache.tensors[name], device)
        checks.dtype(op, f"cache.{name}", cache.tensors[name], allowed)
    batch = sizes["B"]
    _whole_numbers(op, "lengths", cache.lengths, (batch,), "one int32 a sequence", device)
    checks.dense(op, "cache.lengths", cache.lengths)
    if isinstance(cache, PagedCache):
        table = cache.block_table
        shape = (batch, table.shape[1])
        _whole_numbers(op, "block_table", table, shape, "a row a sequence", device)
        checks.dense(op, "cache.block_table", table)
    if not checks.looks(cache.lengths):
        return
    held: list[int] = cache.lengths.tolist()
    cache_checks.lengths(op, held)
    each = [new] * batch if isinstance(new, int) else new.tolist()
    if isinstance(cache, PagedCache):
        table_rows = cache.block_table.tolist()
        cache_checks.pages(op, table_rows, held, each, sizes[PAGE], sizes[PAGES])
    else:
        cache_checks.room(op, held, each, sizes["S"])


def _whole_numbers(
    op: str, name: str, value: torch.Tensor, shape: tuple[int, ...], what: str, device: torch.device
) -> None:
    checks.device(op, f"cache.{name}", value, device)
    if value.dtype != torch.int32 or value.shape != shape:
        raise CacheError(
            f"{name} must be {what}",
            op=op, argument=f"cache.{name}", expected=f"int32 {list(shape)}",
            found=f"{value.dtype} {tuple(value.shape)}",
        )  # fmt: skip


# --- pools


def add_pool(
    op: str, name: str, pool: StatePool, pattern: Pattern, scan: str, sizes: checks.Sizes,
    *, packed: bool,
) -> Pattern:  # fmt: skip
    """Note the number of sequences (and tokens) that a pool's slots say; the rest of its pattern.

    Raises:
        ArgumentError: a state without an axis B of its own.
        DtypeError, RankError, StrideError: slots that are not int32 ``[B]`` (or ``[B, T]``).
    """
    if ("B",) not in pattern.dims:
        raise ArgumentError(
            "a pool needs B as a memory axis of its own", op=op, argument=name, found=f"[{pattern}]"
        )
    given = {"slots": (pool.slots, Pattern((("B",),)))}
    if pool.out_slots is not None:
        tokens = ((scan,),) if pool.each_token else ()
        given["out_slots"] = (pool.out_slots, Pattern((("B",), *tokens)))
    for label, (value, axes) in given.items():
        checks.rank(op, f"{name}.{label}", value, axes)
        checks.dense(op, f"{name}.{label}", value)
        checks.device(op, f"{name}.{label}", value, pool.pool.device)
        checks.dtype(op, f"{name}.{label}", value, INT32)
        counted = axes.without(scan) if packed else axes  # packed: as wide as the longest sequence
        sizes.add(f"{name}.{label}", value.shape[: counted.rank], counted)
    return pattern.without("B")


def check_pools(
    op: str, pools: Mapping[str, StatePool], patterns: Mapping[str, Pattern],
    inputs: Mapping[str, torch.Tensor], tokens: torch.Tensor | int, batch: int,
) -> None:  # fmt: skip
    """No pool lies on another argument, and its slots are in order.

    Raises:
        OverlapError: a pool shares memory with an input, or two states share a pool.
        SlotError: where values are looked at: see :func:`cache_checks.slots`.
    """
    others = {n: t for n, t in inputs.items() if n not in pools}
    starts: dict[int, str] = {}
    for name, pool in pools.items():
        checks.overlap(op, name, pool.pool, others)
        first = starts.setdefault(pool.pool.data_ptr(), name)
        if first != name and pool.pool.numel():
            raise OverlapError(
                "two states share a pool",
                op=op, argument=name, expected="separate memory", found=f"overlap with {first}",
            )  # fmt: skip
        if checks.looks(pool.slots):
            each = [tokens] * batch if isinstance(tokens, int) else tokens.tolist()
            cache_checks.slots(op, name, pool, patterns[name], each)
