"""Gated delta product over packed prompts, n updates a token; peers exist for V = 64 and 128."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks import oracles
from benchmarks.case import Case, Inputs, Part, Work, generator, nan_like
from benchmarks.peers import fla, flashinfer

BF16 = torch.bfloat16
SHAPES = [
    (8192, 2, 1, 128),
    (32768, 2, 1, 128),
    (32768, 3, 8, 128),
    (8192, 2, 1, 64),
    (32768, 2, 1, 64),
    (32768, 3, 8, 64),
]


def _ours(inputs: Inputs, backend: str) -> Work:
    """FlashInfer's call, into tensors of ours."""
    from attncc import gdp

    x = inputs
    (T, H, _), V, device = x["q"].shape, x["v"].shape[2], x["q"].device
    out = {
        "o": nan_like(T, H, V, dtype=BF16, device=device),
        "s": nan_like(*x["s"].shape, dtype=x["s"].dtype, device=device),
    }
    cu = x["cu_seqlens"].int()

    def fn() -> dict[str, torch.Tensor]:
        gdp.chunk_gated_delta_product(
            x["q"], x["k"], x["v"], x["alpha"], x["beta"], x["n"], None, x["s"], True, cu,
            output=out["o"], output_state=out["s"], backend=backend,
        )  # fmt: skip
        return out

    return Work(fn, out)


def parts(inputs: Inputs) -> Iterator[Part]:
    """All of o and s: the gated delta rule over rows, a token's decay on its first, its query on
    its last (the expansion of Megatron's product kernels); sequences are of one length.
    """
    o, s = expanded(inputs, torch.float64)
    eo, es = expanded(inputs, torch.float32)
    yield Part("o", (slice(None),), o, eo.to(BF16), BF16)
    yield Part("s", (slice(None),), s, es.to(BF16), BF16)


def expanded(x: Inputs, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[T, H, V]`` and states ``[N, H, V, K]`` through the chunked oracle."""
    n, nseq, (T, H, K) = x["n"], x["s"].shape[0], x["q"].shape
    q = torch.zeros(T, n, H, K, dtype=x["q"].dtype, device=x["q"].device)
    q[:, -1] = x["q"]
    g = torch.zeros(T, n, H, device=q.device)
    g[:, 0] = x["g"]
    rows = (q, x["k"], x["v"], g, x["beta"])
    each = T * n // nseq
    q, k, v = (r.reshape(nseq, each, H, r.shape[-1]) for r in rows[:3])
    g, beta = (r.reshape(nseq, each, H) for r in rows[3:])
    s, o = oracles.gated_delta_chunked(q, k, v, g, beta, x["s"].mT, dtype)
    return o.reshape(T, n, H, -1)[:, -1], s.mT


def case(T: int, n: int, nseq: int, V: int, H: int = 16, K: int = 128) -> Case:
    """T tokens in nseq sequences of one length, n updates each, from a zero state."""

    def build(device: torch.device) -> Inputs:
        rng = generator(device)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng, device=device)

        g = -F.softplus(-(draw(T, H) + 3))
        return {
            "q": F.normalize(draw(T, H, K), dim=-1).to(BF16),
            "k": F.normalize(draw(T * n, H, K), dim=-1).to(BF16),
            "v": draw(T * n, H, V).to(BF16),
            "g": g, "alpha": g.exp(), "beta": draw(T * n, H).sigmoid(), "n": n,
            "s": torch.zeros(nseq, H, V, K, device=device),
            "cu_seqlens": torch.arange(nseq + 1, device=device) * (T // nseq),
        }  # fmt: skip

    peers = {"fla": fla.gdp}
    if V == 64:  # its SM90 kernel has no other
        peers["flashinfer"] = flashinfer.gdp
    return Case(
        group="gdp", name=f"T{T} nseq{nseq} H{H} n{n} K{K} V{V}", build=build, ours=_ours,
        peers=peers, parts=parts,
        bytes=T * H * ((1 + n) * K + (1 + n) * V) * 2,
        flops=chunk_flops(T, H, n, K, V),
    )  # fmt: skip


def chunk_flops(T: int, H: int, n: int, K: int, V: int, C: int = 64) -> float:
    """Operations of the chunked form with C rows a chunk."""
    rows = T * n * H * (2 * K * C + 2 * V * C + 2 * C * C / 3 + 4 * K * V)
    return rows + T * H * (2 * K * C * n + 2 * V * C * n + 2 * K * V)


def cases() -> list[Case]:
    """Three shapes with values of 128, as FLA has them, and three of 64, as FlashInfer has."""
    return [case(*shape) for shape in SHAPES]
