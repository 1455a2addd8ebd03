"""The causal short convolution with SiLU: whole sequences, and one token of many sequences."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.case import Case, Inputs, Part, Work, generator, nan_like
from benchmarks.peers import convolution

BF16 = torch.bfloat16
SHAPES = [(8, 4096, 4096, 4), (1, 32768, 4096, 4), (16, 2048, 8192, 4), (8, 4096, 4096, 2)]
STEPS = [(32, 8192, 4), (512, 8192, 4)]
CHANNELS = 512
"""Channels that the oracle takes at a time."""


def _draw(B: int, T: int, D: int, W: int, *, window: bool, device: torch.device) -> Inputs:
    rng = generator(device)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=device).to(BF16)

    found: Inputs = {"x": draw(B, T, D), "w": draw(D, W)}
    return {**found, "win": draw(B, W - 1, D)} if window else found


def _ours(inputs: Inputs, backend: str) -> Work:
    from attncc import ops

    x, w = inputs["x"], inputs["w"]
    kept = (x.shape[0], w.shape[1] - 1, x.shape[2])
    out = {
        "win": nan_like(*kept, dtype=BF16 if "win" in inputs else torch.float32, device=x.device),
        "o": nan_like(*x.shape, dtype=BF16, device=x.device),
    }
    more = {"win": inputs["win"]} if "win" in inputs else {}
    run = ops.short_conv.decode if more else ops.short_conv

    def fn() -> dict[str, torch.Tensor]:
        run(x, w, silu=True, **more, out=out, backend=backend)
        return out

    return Work(fn, out)


def parts(inputs: Inputs) -> Iterator[Part]:
    """All of o, some channels at a time, in fp64 and in fp32."""
    x, w = inputs["x"], inputs["w"]
    for start in range(0, x.shape[2], CHANNELS):
        own = slice(start, start + CHANNELS)
        exact, rough = (_values(inputs, own, d) for d in (torch.float64, torch.float32))
        yield Part("o", (slice(None), slice(None), own), exact, rough.to(x.dtype), w.dtype)


def _values(inputs: Inputs, own: slice, dtype: torch.dtype) -> torch.Tensor:
    x, w = inputs["x"][..., own].to(dtype), inputs["w"][own].to(dtype)
    width = w.shape[1]
    kept = (
        inputs["win"][..., own].to(dtype)
        if "win" in inputs
        else x.new_zeros(x.shape[0], width - 1, x.shape[2])
    )
    rows = torch.cat([kept, x], 1)
    y = torch.zeros_like(x)
    for i in range(width):
        y += rows[:, i : i + x.shape[1]] * w[:, i]
    return y * y.sigmoid()


def case(B: int, T: int, D: int, W: int) -> Case:
    """B whole sequences of T tokens; the bytes are those of a copy of x."""
    return Case(
        group="short_conv",
        name=f"B{B} T{T} D{D} W{W} silu",
        build=lambda device: _draw(B, T, D, W, window=False, device=device),
        ours=_ours,
        peers={
            "torch conv1d": convolution.plain,
            "torch.compile": convolution.compiled,
            "fla": convolution.fla,
        },
        parts=parts,
        bytes=2 * B * T * D * 2,
        flops=2.0 * B * T * D * W,
        timing="graph",
    )


def step(B: int, D: int, W: int) -> Case:
    """One token of B sequences: the window is read and written, the token read, o written."""
    return Case(
        group="short_conv",
        name=f"B{B} T1 D{D} W{W} silu, with window",
        build=lambda device: _draw(B, 1, D, W, window=True, device=device),
        ours=_ours,
        peers={"fla": convolution.fla_update},
        parts=parts,
        bytes=2 * B * D * W * 2,
        flops=2.0 * B * D * W,
        timing="graph",
    )


def cases() -> list[Case]:
    """Prefill of four shapes, a decode step of two batches."""
    return [*(case(*shape) for shape in SHAPES), *(step(*shape) for shape in STEPS)]
