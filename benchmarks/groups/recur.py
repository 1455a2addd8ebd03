"""What the gated-delta-rule groups share: inputs, our call, the oracle's parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import oracles
from benchmarks.case import Inputs, Outputs, Part, Work, generator, nan_like

BF16 = torch.bfloat16
NAMES = ("q", "k", "v", "g", "beta")


def inputs_of(
    B: int, T: int, Hq: int, Hv: int, K: int, V: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Unit q and k [B, T, Hq, K], v [B, T, Hv, V], bf16; g and beta fp32, made from bf16 a and b.

    g = -softplus(a) and beta = sigmoid(b), as a model computes them, so that a peer which does so
    itself does the same work.
    """
    rng = generator(device)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    q, k = (F.normalize(draw(B, T, Hq, K), dim=-1).to(BF16) for _ in range(2))
    v = draw(B, T, Hv, V).to(BF16)
    a = -(draw(B, T, Hv) + 3).to(BF16)
    b = torch.rand(B, T, Hv, generator=rng, device=device).to(BF16)
    g, beta = -F.softplus(a.float()), b.float().sigmoid()
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b}


def call(inputs: Inputs, backend: str, phase: str) -> Work:
    """Our call into preallocated outputs; packed where there are several sequences."""
    from attncc import ops

    x = inputs
    packed = x["s"].shape[0] != x["q"].shape[0]
    args = [x[n][0] if packed else x[n] for n in NAMES]
    extra = {"cu_seqlens": x["cu_seqlens"].int()} if packed else {}
    out = {
        "s": nan_like(*x["s"].shape, dtype=x["s"].dtype, device=x["s"].device),
        "o": nan_like(*args[2].shape, dtype=x["v"].dtype, device=x["s"].device),
    }
    run = getattr(ops.gated_delta_rule, phase)
    final = {"s": out["s"], "o": out["o"][None] if packed else out["o"]}

    def fn() -> dict[str, torch.Tensor]:
        run(*args, s=x["s"], out=out, backend=backend, **extra)
        return final

    return Work(fn, out)


def step_call(inputs: Inputs, backend: str) -> tuple[Any, dict[str, Any], Outputs]:
    """The op, the arguments of one token's call into preallocated outputs, and those."""
    from attncc import ops

    x = inputs
    out = {
        n: nan_like(*x[like].shape, dtype=x[like].dtype, device=x[like].device)
        for n, like in (("s", "s"), ("o", "v"))
    }
    args = {n: x[n] for n in (*NAMES, "s")}
    return ops.gated_delta_rule, {**args, "out": out, "backend": backend}, out


def prepared(op: Any, arguments: dict[str, Any], out: Outputs) -> Work:
    """A decode call that is bound once."""
    run = op.prepare(**arguments, phase="decode")

    def fn() -> Outputs:
        run()
        return out

    return Work(fn, out)


def prefill_parts(inputs: Inputs) -> Iterator[Part]:
    """All of o and s, from the chunked form; sequences are of one length.

    The eps of both is the call's dtype's: operands of contractions keep it, the state's too.
    """
    x = inputs
    n, dtype = x["s"].shape[0], x["v"].dtype
    xs = [x[name].reshape(n, -1, *x[name].shape[2:]) for name in NAMES]
    s, o = oracles.gated_delta_chunked(*xs, x["s"])
    es, eo = oracles.gated_delta_chunked(*xs, x["s"], torch.float32)
    shape = x["v"].shape
    yield Part("o", (slice(None),), o.reshape(shape), eo.reshape(shape).to(dtype), dtype)
    yield Part("s", (slice(None),), s, es.to(dtype), dtype)


def step_parts(inputs: Inputs) -> Iterator[Part]:
    """All of o and s of one token; the state is fp32 arithmetic throughout, and judged so."""
    xs, s0 = [inputs[name] for name in NAMES], inputs["s"]
    s, o = oracles.gated_delta_step(*xs, s0)
    es, eo = oracles.gated_delta_step(*xs, s0, torch.float32)
    dtype = inputs["v"].dtype
    yield Part("o", (slice(None),), o, eo.to(dtype), dtype)
    yield Part("s", (slice(None),), s, es.to(s0.dtype), s0.dtype)


def chunk_flops(T: int, Hv: int, K: int, V: int, C: int = 64) -> float:
    """Operations of the chunked WY form, whose chunks hold C tokens."""
    return T * Hv * (4 * K * C + 4 * V * C + 2 * C * C / 3 + 6 * K * V)
