"""Decode steps through pages, beside the same step with a dense cache: both append a row."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.case import Case, Inputs, Work, nan_like


def _cache(inputs: Inputs, page: int | None) -> object:
    """All rows but the last, which the step appends; pages lie in no order."""
    from attncc import DenseCache, PagedCache

    k, v = inputs["k"], inputs["v"]
    B, T = k.shape[:2]
    lengths = torch.full((B,), T - 1, dtype=torch.int32, device=k.device)
    if page is None:
        return DenseCache({"k": k.clone(), "v": v.clone()}, lengths)
    count = B * T // page
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(k.device)
    held = {n: torch.empty(count, page, *x.shape[2:], dtype=x.dtype, device=x.device)
            for n, x in (("k", k), ("v", v))}  # fmt: skip
    for name, x in (("k", k), ("v", v)):
        held[name][order] = x.reshape(count, page, *x.shape[2:])
    return PagedCache(held, order.int().view(B, T // page), lengths)


def _step(inputs: Inputs, backend: str, page: int | None) -> Work:
    from attncc import ops

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    cache = _cache(inputs, page)
    new = [x[:, -1:].contiguous() for x in (k, v)]
    before = cache.lengths.clone()
    out = nan_like(*q.shape, dtype=q.dtype, device=q.device)

    def fn() -> dict[str, torch.Tensor]:
        cache.lengths.copy_(before)  # in the graph: every replay is the same step
        return {"o": ops.attention.decode(q, *new, cache=cache, out=out, backend=backend)}

    return Work(fn, {"o": out})


def case(plain: Case, page: int) -> Case:
    """A decode case through pages of ``page`` rows; the step appends the last token."""
    return replace(
        plain,
        name=f"{plain.name}, pages of {page}",
        ours=lambda inputs, backend: _step(inputs, backend, page),
        peers={
            "attncc dense cache": lambda inputs: _step(inputs, "auto", None),
            "flashinfer": plain.peers["flashinfer"],
        },
    )
