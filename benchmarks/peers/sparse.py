"""Sparse attention in plain torch, eager and compiled: the index with its top-k, and the gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attncc import Quantised, QuantisedTensor
from attncc.dsl.axes import parse
from benchmarks.case import Inputs, Work


def stored(keys: torch.Tensor) -> QuantisedTensor:
    """Keys [B, S, D] as e4m3 with one power of two a row."""
    return QuantisedTensor.of(keys, parse("B S Di"), Quantised(scale="ue8m0"))


def meant(keys: QuantisedTensor) -> torch.Tensor:
    """What the stored bits mean, which bf16 holds exactly."""
    scale = torch.exp2(keys.scales.float() - 127)  # [B, 1, S]
    return (keys.data.float() * scale.mT).to(torch.bfloat16)


def index(k: int, *, compiled: bool = False) -> Callable[[Inputs], Work]:
    """Scores in bf16, added up over heads, and ``torch.topk``."""

    def make(inputs: Inputs) -> Work:
        from benchmarks.groups.dsa_index import Picked

        q, w, keys = inputs["qi"][:, 0], inputs["w"][:, 0], inputs["ki"]

        def run() -> torch.Tensor:
            s = torch.relu(torch.einsum("bhd,btd->bht", q, keys))
            return torch.einsum("bht,bh->bt", s, w).float().topk(k, dim=-1)[1]

        found = _compiled(run, compiled=compiled)
        return Work(lambda: Picked(inputs, found()))

    return make


def gathered(scale: float, *, compiled: bool = False) -> Callable[[Inputs], Work]:
    """The picked rows copied together, then two matrix products."""

    def make(inputs: Inputs) -> Work:
        q, kv, R = inputs["q"][:, 0], inputs["kv"], inputs["R"]
        places = inputs["places"][:, 0].long()

        def run() -> torch.Tensor:
            rows = torch.gather(kv, 1, places[..., None].expand(-1, -1, kv.shape[-1]))
            p = torch.softmax((q @ rows.transpose(1, 2)).float() * scale, -1).to(q.dtype)
            return p @ rows[..., :R]

        found = _compiled(run, compiled=compiled)
        return Work(lambda: {"o": found()[:, None]})

    return make


def _compiled(run: Callable[[], torch.Tensor], *, compiled: bool) -> Callable[[], Any]:
    if not compiled:
        return run
    torch._dynamo.reset()
    return torch.compile(run, dynamic=False)
