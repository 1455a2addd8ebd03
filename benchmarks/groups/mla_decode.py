"""Latent attention of one token a sequence: the fold alone, and with its two up-projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import attncc as ac
from benchmarks.case import Case, Inputs, Part, Work, generator, nan_like
from benchmarks.peers import latent

BF16 = torch.bfloat16
SHAPES = [(1, 32768), (32, 8192), (128, 4096)]
PARTS = 16
"""Heads of one piece of the oracle."""


@ac.op(out="B T H R")
def latent_attention(
    q=ac.Activation("B T H R"),
    q_rope=ac.Activation("B T H P"),
    c=ac.Cache("B S R"),
    r=ac.Cache("B S P"),
    scale=ac.param(),
):
    """What is left of latent attention between its products: queries are in the latent's space."""
    score = (ac.dot(q, c, "R") + ac.dot(q_rope, r, "P")) * scale
    return ac.dot(ac.softmax(score, "S", where=ac.causal), c, "S")


def _draw(device: torch.device, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    rng = generator(device)
    return {
        n: torch.randn(*shape, generator=rng, device=device, dtype=BF16)
        for n, shape in shapes.items()
    }


def _ours(inputs: Inputs, backend: str) -> Work:
    x = inputs
    out = nan_like(*x["q"].shape, dtype=BF16, device=x["q"].device)
    args = [x[n] for n in ("q", "q_rope", "c", "r")]
    run = latent_attention.decode
    return Work(lambda: {"o": run(*args, scale=x["scale"], out=out, backend=backend)}, {"o": out})


def _ours_projected(inputs: Inputs, backend: str) -> Work:
    x = inputs
    B, _, H, _ = x["q_nope"].shape
    out = nan_like(B, 1, H, x["wuv"].shape[1], dtype=BF16, device=x["c"].device)
    args = [x[n] for n in ("q_nope", "q_rope", "c", "r", "wuk", "wuv")]
    run = ac.ops.mla.decode
    return Work(lambda: {"o": run(*args, scale=x["scale"], out=out, backend=backend)}, {"o": out})


def _fold(x: Inputs, q: torch.Tensor, b: int, heads: slice, dtype: torch.dtype) -> torch.Tensor:
    """Some heads of one sequence: q [H', R] to [H', R]."""
    c, r = x["c"][b].to(dtype), x["r"][b].to(dtype)
    score = q.to(dtype) @ c.T + x["q_rope"][b, 0, heads].to(dtype) @ r.T
    return (score * x["scale"]).softmax(-1) @ c


def _pieces(inputs: Inputs, H: int) -> Iterator[tuple[int, slice]]:
    for b in range(inputs["c"].shape[0]):
        for first in range(0, H, PARTS):
            yield b, slice(first, first + PARTS)


def parts(inputs: Inputs) -> Iterator[Part]:
    """The whole output, some heads of a sequence at a time."""
    for b, heads in _pieces(inputs, inputs["q"].shape[2]):
        q = inputs["q"][b, 0, heads]
        exact = _fold(inputs, q, b, heads, torch.float64)
        rough = _fold(inputs, q, b, heads, torch.float32).to(BF16)
        yield Part("o", (b, 0, heads), exact, rough, BF16)


def parts_projected(inputs: Inputs) -> Iterator[Part]:
    """The same with the products before and behind; roughly, both are stored in bf16."""
    for b, heads in _pieces(inputs, inputs["q_nope"].shape[2]):
        named = (inputs["q_nope"][b, 0, heads], inputs["wuk"][heads], inputs["wuv"][heads])
        found = []
        for dtype in (torch.float64, torch.float32):
            stored = BF16 if dtype == torch.float32 else dtype
            q, into, back = (t.to(dtype) for t in named)
            absorbed = torch.einsum("hd,hdr->hr", q, into).to(stored)
            u = _fold(inputs, absorbed, b, heads, dtype).to(stored).to(dtype)
            found.append(torch.einsum("hr,hvr->hv", u, back))
        yield Part("o", (b, 0, heads), found[0], found[1].to(BF16), BF16)


def case(B: int, T: int, H: int = 128, R: int = 512, P: int = 64) -> Case:
    """B sequences with T tokens each; the bytes are those of the latent and the RoPE part."""

    def build(device: torch.device) -> Inputs:
        shapes = {"q": (B, 1, H, R), "q_rope": (B, 1, H, P), "c": (B, T, R), "r": (B, T, P)}
        return {**_draw(device, shapes), "scale": (R + P) ** -0.5}

    return Case(
        group="mla_decode",
        name=f"B{B} T{T} H{H}",
        build=build,
        ours=_ours,
        peers={"flashinfer-fa3": latent.flashinfer_fa3, "sdpa": latent.sdpa},
        parts=parts,
        bytes=B * T * (R + P) * 2,
        flops=2.0 * B * H * T * (2 * R + P),
        timing="graph",
        reads=True,
    )


def case_projected(
    B: int, T: int, H: int = 128, R: int = 512, P: int = 64, D: int = 128, V: int = 128
) -> Case:
    """As :func:`case`, from queries of D to outputs of V: both weights are read as well."""

    def build(device: torch.device) -> Inputs:
        shapes = {"q_nope": (B, 1, H, D), "q_rope": (B, 1, H, P), "c": (B, T, R), "r": (B, T, P)}
        drawn = _draw(device, {**shapes, "wuk": (H, D, R), "wuv": (H, V, R)})
        scaled = {n: drawn[n] * R**-0.5 for n in ("wuk", "wuv")}
        return {**drawn, **scaled, "scale": (D + P) ** -0.5}

    return Case(
        group="mla_decode",
        name=f"B{B} T{T} H{H} projected",
        build=build,
        ours=_ours_projected,
        peers={"flashinfer-fa3 and bmm": latent.flashinfer_projected},
        parts=parts_projected,
        bytes=B * T * (R + P) * 2 + 2 * H * R * (D + V),
        flops=2.0 * B * H * (T * (2 * R + P) + R * (D + V)),
        timing="graph",
        reads=True,
    )


def cases() -> list[Case]:
    """The three shapes of the peers' table, and the second one with its projections."""
    return [*(case(*shape) for shape in SHAPES), case_projected(*SHAPES[1])]
