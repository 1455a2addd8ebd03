"""Writing a call's new rows into its caches."""

from __future__ import annotations

from itertools import pairwise

import torch

from attncc.dsl.axes import PAGE, PAGES, Pattern, history_dim
from attncc.dsl.errors import CacheError
from attncc.dsl.interp import unpack
from attncc.runtime.cache_checks import pages
from attncc.runtime.call import Call
from attncc.runtime.eager.named import view
from attncc.runtime.gathered import token_counts


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
        for name, rows in call.new_rows.items():
            _append_paged(call, name, rows)
        return
    for name in call.new_rows:
        _check_room(call, name, lengths, spans)
    for name, rows in call.new_rows.items():
        _append(call, name, rows, lengths, spans)


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


def _append(
    call: Call, name: str, rows: torch.Tensor, lengths: list[int], spans: list[tuple[int, int]]
) -> None:
    pattern, cache = call.patterns[name], call.tensors[name]
    along = _grows(pattern)
    batch = pattern.dim_of("B") if "B" in pattern.axes else None
    if batch is None:  # one history for all sequences
        cache.narrow(along, lengths[0], spans[0][1]).copy_(rows)
        return
    inner = along - (batch < along)  # where the history axis stands once B is gone
    for b, (length, (start, count)) in enumerate(zip(lengths, spans, strict=True)):
        own = rows.narrow(inner, start, count) if call.packed else rows.select(batch, b)
        cache.select(batch, b).narrow(inner, length, count).copy_(own)


def _append_paged(call: Call, name: str, rows: torch.Tensor) -> None:
    """Write the rows of all sequences through the block table."""
    assert call.lengths is not None and call.block_table is not None
    held = view(call.tensors[name], call.patterns[name], call.sizes)
    rest = tuple(a for a in held.axes if a not in (PAGES, PAGE))
    counts = token_counts(call)
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=call.device), counts)
    first = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
    t = torch.arange(len(sequence), device=call.device) - first
    place = call.lengths[sequence].long() + t
    page = call.block_table[sequence, place // call.sizes[PAGE]].long()
    pattern = call.program.tensor(name).pattern
    names = {"S": "T"}
    new = Pattern(tuple(tuple(names.get(a, a) for a in dim) for dim in pattern.dims))
    fresh = unpack(rows, new.without("B") if call.packed else new, call.sizes)
    lead = ("T",) if call.packed else ("B", "T")
    values = fresh.aligned((*lead, *rest)).flatten(0, len(lead) - 1)
    at = (page, place % call.sizes[PAGE])
    held.aligned((PAGES, PAGE, *rest)).index_put_(at, values.to(held.data.dtype))
