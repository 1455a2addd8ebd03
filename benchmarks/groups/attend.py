"""What the attention groups share: inputs, our call, the oracle's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import oracles
from benchmarks.case import Inputs, Part, Work, generator, nan_like

BF16 = torch.bfloat16


Build = Callable[[torch.device], dict[str, Any]]


def builder(B: int, T: int, S: int, Hq: int, Hk: int, D: int) -> Build:
    """Makes q [B, T, Hq, D] and k, v [B, S, Hk, D], bf16, normal."""

    def build(device: torch.device) -> Inputs:
        rng = generator(device)
        shapes = {"q": (B, T, Hq, D), "k": (B, S, Hk, D), "v": (B, S, Hk, D)}
        return {
            n: torch.randn(*shape, generator=rng, device=device, dtype=BF16)
            for n, shape in shapes.items()
        }

    return build


def call(op: Any, inputs: Inputs, backend: str, phase: str = "prefill", **extra: Any) -> Work:
    """Our attention over a whole history, into a preallocated output."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    out = nan_like(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    run = getattr(op, phase)
    return Work(lambda: {"o": run(q, k, v, out=out, backend=backend, **extra)}, {"o": out})


def parts(
    inputs: Inputs, score: oracles.Score | None = None, mask: oracles.Mask | None = None
) -> Iterator[Part]:
    """The whole output, in one piece a batch entry."""
    for b in range(inputs["q"].shape[0]):
        q, k, v = (inputs[n][b : b + 1] for n in ("q", "k", "v"))
        oracle = oracles.attention(q, k, v, score=score, mask=mask)
        eager = oracles.attention(q, k, v, torch.float32, score=score, mask=mask).to(q.dtype)
        yield Part("o", (slice(b, b + 1),), oracle, eager, q.dtype)


def io_bytes(B: int, T: int, S: int, Hq: int, Hk: int, D: int) -> int:
    """q, k, v read once and o written, 2 bytes an element."""
    return 2 * (2 * B * T * Hq * D + 2 * B * S * Hk * D)
