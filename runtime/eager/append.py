"""Writing a call's new rows into its caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from attncc.dsl.axes import PAGE, PAGES, Pattern, history_dim, scales_of
from attncc.dsl.errors import CacheError
from attncc.dsl.interp import unpack
from attncc.runtime.cache_checks import pages
from attncc.runtime.call import Call
from attncc.runtime.eager.named import view
from attncc.runtime.gathered import new_pattern, token_counts
from attncc.runtime.quantised import quantise


def starts(call: Call) -> list[tuple[int, int]]:
    """First token and number of tokens of each sequence, read by the host."""
    if call.cu_seqlens is None:
        return [(0, call.sizes.get("T", 0))] * call.sizes["B"]
    cu = call.cu_seqlens.tolist()
    return [(lo, hi - lo) for lo, hi in pairwise(cu)]


def append(call: Call) -> None:
    """Write each sequence's new rows after the ones its caches hold.

    ``lengths`` stays as it is: it counts the rows before this call's.

    Raises:
        CacheError, PageError: a cache has no room; nothing is written.
    """
    if call.lengths is None or not call.new_rows:
        return
    lengths: list[int] = call.lengths.tolist()
    spans = starts(call)
    if call.block_table is not None:
        table = call.block_table.tolist()
        tokens = [count for _, count in spans]
        pages(call.program.name, table, lengths, tokens, call.sizes[PAGE], call.sizes[PAGES])
        for stored in _stored(call):
            _append_paged(call, stored)
        return
    for name in call.new_rows:
        _check_room(call, name, lengths, spans)
    for stored in _stored(call):
        _append(call, stored, lengths, spans)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Something to write behind what a cache holds: a history's rows, or their scales.

    Attributes:
        cache: the tensor that is written.
        pattern: its memory axes.
        rows: this call's rows.
        new: their memory axes.
        sizes: every axis.
    """

    cache: torch.Tensor
    pattern: Pattern
    rows: torch.Tensor
    new: Pattern
    sizes: dict[str, int]


def _stored(call: Call) -> Iterator[_Stored]:
    """What is written, as it is stored; e4m3 by its bytes, which every torch can index."""
    for name, rows in call.new_rows.items():
        cache, pattern = call.tensors[name], call.patterns[name]
        new, sizes = new_pattern(call, name), dict(call.sizes)
        if name not in call.scales:
            yield _Stored(cache, pattern, rows, new, sizes)
            continue
        own = call.scales[name]
        data, scales = quantise(rows, new, own.axis, own.block, own.tensor.dtype, sizes)
        held, codes = cache.view(torch.uint8), data.view(torch.uint8)
        yield _Stored(held, pattern, codes, new, sizes)
        wide = own.sizes(sizes)
        yield _Stored(own.tensor, own.pattern, scales, scales_of(new, own.axis), wide)


def _grows(pattern: Pattern) -> int:
    """The memory axis of a cache that grows."""
    dim = history_dim(pattern)
    assert dim is not None
    return pattern.dims.index(dim)


def _check_room(call: Call, name: str, lengths: list[int], spans: list[tuple[int, int]]) -> None:
    room = call.tensors[name].shape[_grows(call.patterns[name])]
    need = max((n + t for n, (_, t) in zip(lengths, spans, strict=True)), default=0)
    if need > room:
        raise CacheError(
            "no room for the new tokens",
            op=call.program.name, argument=name, axis="S", expected=f"at most {room}", found=need,
        )  # fmt: skip


def _append(call: Call, stored: _Stored, lengths: list[int], spans: list[tuple[int, int]]) -> None:
    pattern, cache, rows = stored.pattern, stored.cache, stored.rows
    along = _grows(pattern)
    batch = pattern.dim_of("B") if "B" in pattern.axes else None
    if batch is None:  # one history for all sequences
        cache.narrow(along, lengths[0], spans[0][1]).copy_(rows)
        return
    inner = along - (batch < along)  # where the history axis stands once B is gone
    for b, (length, (start, count)) in enumerate(zip(lengths, spans, strict=True)):
        own = rows.narrow(inner, start, count) if call.packed else rows.select(batch, b)
        cache.select(batch, b).narrow(inner, length, count).copy_(own)


def _append_paged(call: Call, stored: _Stored) -> None:
    """Write the rows of all sequences through the block table."""
    assert call.lengths is not None and call.block_table is not None
    held = view(stored.cache, stored.pattern, stored.sizes)
    rest = tuple(a for a in held.axes if a not in (PAGES, PAGE))
    counts = token_counts(call)
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=call.device), counts)
    first = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
    t = torch.arange(len(sequence), device=call.device) - first
    place = call.lengths[sequence].long() + t
    page = call.block_table[sequence, place // call.sizes[PAGE]].long()
    fresh = unpack(stored.rows, stored.new, stored.sizes)
    lead = ("T",) if call.packed else ("B", "T")
    values = fresh.aligned((*lead, *rest)).flatten(0, len(lead) - 1)
    at = (page, place % call.sizes[PAGE])
    held.aligned((PAGES, PAGE, *rest)).index_put_(at, values.to(held.data.dtype))
