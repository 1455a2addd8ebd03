"""A call with its pages and pools as plain tensors: what the reference and the torch lowering take.

Both read the same stored pages and slots as the kernels. The host reads lengths and tables here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attncc.dsl.axes import PAGE, PAGES
from attncc.dsl.interp import Named, unpack
from attncc.runtime.call import Call


def gathered(call: Call, *, appended: bool) -> Call:
    """The call with a dense cache in place of pages, and given states in place of pools.

    Args:
        call: any call.
        appended: this call's new rows are in the pages already; the result has none left to append.
    """
    return _without_pools(_without_pages(call, appended))


def _without_pages(call: Call, appended: bool) -> Call:
    if call.block_table is None or call.lengths is None:
        return call
    used = call.lengths.long()
    if appended:
        used = used + token_counts(call)
    most = int(used.max()) if used.numel() else 0
    page = call.sizes[PAGE]
    table = call.block_table[:, : -(-most // page)].long().clamp(0, max(call.sizes[PAGES] - 1, 0))
    tensors, patterns = dict(call.tensors), dict(call.patterns)
    for name in call.new_rows:
        pattern = call.program.tensor(name).pattern
        held = unpack(call.tensors[name], call.patterns[name], call.sizes)
        rest = tuple(a for a in held.axes if a not in (PAGES, PAGE))
        rows = held.aligned((PAGES, PAGE, *rest))[table].flatten(1, 2)[:, :most]
        data = Named(rows, ("B", "S", *rest)).aligned(pattern.axes)
        sizes = {**call.sizes, "S": most}
        shape = [_product(sizes, dim) for dim in pattern.dims]
        tensors[name], patterns[name] = data.reshape(shape), pattern
    return replace(
        call, tensors=tensors, patterns=patterns, sizes={**call.sizes, "S": most},
        new_rows={} if appended else call.new_rows, block_table=None,
    )  # fmt: skip


def _product(sizes: dict[str, int], dim: tuple[str, ...]) -> int:
    n = 1
    for axis in dim:
        n *= sizes[axis]
    return n


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
