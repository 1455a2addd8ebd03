"""Writing a call's new rows into its caches."""

from __future__ import annotations

from itertools import pairwise

import torch

from attncc.dsl.axes import Pattern, history_dim
from attncc.dsl.errors import CacheError
from attncc.runtime.call import Call


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
        CacheError: a cache has no room; nothing is written.
    """
    if call.lengths is None or not call.new_rows:
        return
    lengths: list[int] = call.lengths.tolist()
    spans = starts(call)
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
