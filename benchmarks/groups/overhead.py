"""Host time of a repeated call on problems so small that the device waits for the host."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.case import Case, Inputs, Work, nan_like
from benchmarks.groups import attend, decode, gdn_decode, prefill
from benchmarks.peers import pytorch

HELD = 128
CAPACITY = 4096


def _tiny(case: Case, name: str, *peers: str) -> Case:
    kept = {p: case.peers[p] for p in peers}
    return replace(case, group="overhead", name=name, timing="host", peers=kept)


def _with_cache(inputs: Inputs, backend: str) -> Work:
    """Decode that appends; the lengths go back before each series of calls."""
    from attncc import DenseCache, ops

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    B, S, Hk, D = k.shape
    cache = DenseCache.allocate(
        ops.attention,
        sizes={"B": B, "Hkv": Hk, "D": D, "E": D},
        capacity=CAPACITY,
        dtype=k.dtype,
        device=k.device,
    )
    for name, x in (("k", k), ("v", v)):
        cache.tensors[name][:, :S].copy_(x)
    new_k, new_v = k[:, -1:].contiguous(), v[:, -1:].contiguous()
    out = nan_like(*q.shape, dtype=q.dtype, device=q.device)

    def fn() -> dict[str, torch.Tensor]:
        o = ops.attention.decode(q, new_k, new_v, cache, out=out, backend=backend)
        return {"o": o}

    def reset() -> None:
        cache.lengths.fill_(S - 1)

    return Work(fn, {"o": out}, reset)


def cases() -> list[Case]:
    """Attention (prefill, decode, decode with a cache) and the gated delta rule's step."""
    step = decode.case(1, HELD, 8, 2, 64)
    flash = {"sdpa-flash": pytorch.sdpa("FLASH_ATTENTION", causal=False)}
    return [
        _tiny(prefill.case(1, HELD, 8, 2, 64), "attention prefill", "sdpa-cudnn", "sdpa-flash"),
        _tiny(step, "attention decode", "sdpa-cudnn", "sdpa-flash", "flashinfer"),
        replace(
            _tiny(step, "attention decode cache"), ours=_with_cache, peers=flash, parts=attend.parts
        ),
        _tiny(gdn_decode.case(1, 2, 4), "gated_delta_rule decode", "fla", "flashinfer"),
    ]
