"""A call with its pages and pools as plain tensors: what the reference and the torch lowering take.

Both read the same stored pages and slots as the kernels. The host reads lengths and tables here.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from attncc.dsl.axes import PAGE, PAGES, Pattern, scales_of
from attncc.dsl.interp import Named, unpack
from attncc.runtime.call import Call
from attncc.runtime.quantised import dequantise, quantise


def gathered(call: Call, *, appended: bool, dtype: torch.dtype = torch.float32) -> Call:
    """The call with a dense cache in place of pages, numbers in place of e4m3, states of pools.

    Args:
        call: any call.
        appended: this call's new rows are in the pages (or the quantised cache) already; the result
            has none left to append.
        dtype: of the numbers that e4m3 and scales mean; new rows become what will be stored.
    """
    return _without_pools(_without_scales(_without_pages(call, appended), appended, dtype))


def _without_pages(call: Call, appended: bool) -> Call:
    if call.block_table is None or call.lengths is None:
        return call
    used = call.lengths.long()
    if appended:
        used = used + token_counts(call)
    most = int(used.max()) if used.numel() else 0
    page = call.sizes[PAGE]
    table = call.block_table[:, : -(-most // page)].long().clamp(0, max(call.sizes[PAGES] - 1, 0))
    tensors, patterns, scales = dict(call.tensors), dict(call.patterns), dict(call.scales)

    def rows(data: torch.Tensor, paged: Pattern, pattern: Pattern, sizes: dict[str, int]) -> Any:
        held = unpack(data, paged, sizes)
        rest = tuple(a for a in held.axes if a not in (PAGES, PAGE))
        found = held.aligned((PAGES, PAGE, *rest))[table].flatten(1, 2)[:, :most]
        named = Named(found, ("B", "S", *rest)).aligned(pattern.axes)
        return named.reshape([prod(({**sizes, "S": most})[a] for a in d) for d in pattern.dims])

    for name in call.new_rows:
        pattern = call.program.tensor(name).pattern
        data, sizes = call.tensors[name], dict(call.sizes)
        if name in scales:
            own, inner = scales[name], scales_of(pattern, scales[name].axis)
            held = rows(own.tensor, own.pattern, inner, own.sizes(sizes))
            scales[name] = replace(own, tensor=held, pattern=inner)
            data = data.view(torch.uint8)  # not every torch indexes e4m3
        found = rows(data, call.patterns[name], pattern, sizes)
        tensors[name], patterns[name] = found.view(call.tensors[name].dtype), pattern
    return replace(
        call, tensors=tensors, patterns=patterns, sizes={**call.sizes, "S": most}, scales=scales,
        new_rows={} if appended else call.new_rows, block_table=None,
    )  # fmt: skip


def _without_scales(call: Call, appended: bool, dtype: torch.dtype) -> Call:
    """The numbers that stored bits mean; new rows that are still to come are rounded as stored."""
    if not call.scales:
        return call
    tensors, new = dict(call.tensors), dict(call.new_rows)
    for name, own in call.scales.items():
        pattern = call.patterns[name]
        tensors[name] = dequantise(tensors[name], pattern, own, call.sizes, dtype)
        if name in new:
            pattern = new_pattern(call, name)
            data, scales = quantise(
                new[name], pattern, own.axis, own.block, own.tensor.dtype, call.sizes
            )
            fresh = replace(own, tensor=scales, pattern=scales_of(pattern, own.axis))
            new[name] = dequantise(data, pattern, fresh, call.sizes, dtype)
    return replace(call, tensors=tensors, new_rows={} if appended else new, scales={})


def new_pattern(call: Call, name: str) -> Pattern:
    """Memory axes of a call's own rows of a history: T in place of S."""
    pattern = call.program.tensor(name).pattern
    names = {"S": "T"}
    new = Pattern(tuple(tuple(names.get(a, a) for a in dim) for dim in pattern.dims))
    return new.without("B") if call.packed else new


def _without_pools(call: Call) -> Call:
    if not call.pools:
        return call
    states = {n: pool.read(call.patterns[n]) for n, pool in call.pools.items()}
    finals = {n: torch.empty_like(t) for n, t in states.items()}
    return replace(
        call, tensors={**call.tensors, **states}, final_states={**call.final_states, **finals},
        pools={},
    )  # fmt: skip


def token_counts(call: Call) -> torch.Tensor:
    """Tokens of each sequence, int64 ``[B]``."""
    if call.cu_seqlens is None:
        return torch.full((call.sizes["B"],), call.sizes.get("T", 0), device=call.device)
    return (call.cu_seqlens[1:] - call.cu_seqlens[:-1]).long()


def each_token(call: Call) -> dict[str, torch.Tensor]:
    """For states with an out-slot a token: where to put them, ``[B, T, ...]``, still empty."""
    found = {}
    for name, pool in call.pools.items():
        if pool.each_token:
            shape = pool.read(call.patterns[name]).movedim(call.patterns[name].dim_of("B"), 0).shape
            tokens = pool.written.shape[1]
            found[name] = pool.pool.new_empty((shape[0], tokens, *shape[1:]))
    return found


def write_pools(
    call: Call, finals: dict[str, torch.Tensor], tokens: dict[str, torch.Tensor]
) -> None:
    """Put states into their slots.

    Args:
        call: the call with its pools.
        finals: final states ``[B, ...]`` in their patterns.
        tokens: states after every token ``[B, T, ...]``, B and T first.
    """
    counts = token_counts(call)
    for name, pool in call.pools.items():
        pattern = call.patterns[name]
        if name not in tokens:
            pool.write(pattern, pool.written, finals[name])
            continue
        t = torch.arange(pool.written.shape[1], device=call.device)
        slots = torch.where(t < counts[:, None], pool.written, -1).flatten()
        states = tokens[name].flatten(0, 1).movedim(0, pattern.dim_of("B"))
        pool.write(pattern, slots, states)
