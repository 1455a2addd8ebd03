"""What calls cost the host: repeated ones on problems so small that the device waits for it,
prepared ones beside ``kernel[grid]``, and the first one of a process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import first_call
from benchmarks.case import Case, Inputs, Outputs, Work, nan_like
from benchmarks.groups import attend, decode, gdn_decode, prefill, recur
from benchmarks.peers import plain, pytorch

Call = Callable[[Inputs, str], tuple[Any, dict[str, Any], Outputs]]
"""Makes an op, the arguments of a decode call and the outputs among them."""

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


def _decode_call(inputs: Inputs, backend: str) -> tuple[Any, dict[str, Any], Outputs]:
    from attncc import ops

    q = inputs["q"]
    out = {"o": nan_like(*q.shape, dtype=q.dtype, device=q.device)}
    args = {n: inputs[n] for n in ("q", "k", "v")}
    return ops.attention, {**args, "out": out, "backend": backend}, out


def _prepared(case: Case, name: str, call: Call) -> Case:
    """A call that is prepared and given its outputs, beside its kernels as ``kernel[grid]``."""

    def ours(inputs: Inputs, backend: str) -> Work:
        return recur.prepared(*call(inputs, backend))

    def peer(inputs: Inputs) -> Work:
        op, arguments, out = call(inputs, "triton")
        return plain.launched(op, "decode", arguments, out)

    return replace(
        case, group="overhead", name=name, timing="host", ours=ours, peers={"kernel[grid]": peer}
    )


def _first(case: Case, name: str, field: str, *peers: str, warm: bool) -> Case:
    """A time of new processes, the median of three, beside one of a process of each peer's own."""

    def ours(inputs: Inputs, backend: str) -> Work:
        return first_call.work(inputs, "attncc", field, backend, warm=warm, times=3)

    def theirs(peer: str) -> Callable[[Inputs], Work]:
        return lambda inputs: first_call.work(inputs, peer, field, warm=warm)

    return replace(
        case, group="overhead", name=name, timing="process", ours=ours,
        peers={peer: theirs(peer) for peer in peers},
    )  # fmt: skip


def cases() -> list[Case]:
    """Attention (prefill, decode, decode with a cache) and the gated delta rule's step; the same
    two prepared; a process' imports (torch's among ours), its first call with stored kernels and
    without: the longest.
    """
    step = decode.case(1, HELD, 8, 2, 64)
    flash = {"sdpa-flash": pytorch.sdpa("FLASH_ATTENTION", causal=False)}
    return [
        _tiny(prefill.case(1, HELD, 8, 2, 64), "attention prefill", "sdpa-cudnn", "sdpa-flash"),
        _tiny(step, "attention decode", "sdpa-cudnn", "sdpa-flash", "flashinfer"),
        replace(
            _tiny(step, "attention decode cache"), ours=_with_cache, peers=flash, parts=attend.parts
        ),
        _tiny(gdn_decode.case(1, 2, 4), "gated_delta_rule decode", "fla", "flashinfer"),
        _prepared(step, "decode_prepared", _decode_call),
        _prepared(gdn_decode.case(1, 2, 4), "gdn_step_prepared", recur.step_call),
        _first(step, "import", "import_ms", "torch", warm=True),
        _first(step, "warm_first_call", "first_ms", "torch", "flex", warm=True),
        _first(step, "cold_first_call", "first_ms", "torch", "flex", warm=False),
    ]
