"""The library's attention variants: further arguments, and FlexAttention's or SDPA's call of each.

Of T queries the first stands at position S - T of S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.case import Inputs, Work
from benchmarks.groups.library import Arg, Draw
from benchmarks.peers import library as plain
from benchmarks.peers import pytorch

Mod = Callable[[Inputs], Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """One op beside attention itself.

    Attributes:
        op: its name.
        run: the peer's call.
        args: further tensors.
        options: further numbers.
        share: pairs that are seen, of all T times S.
        near: share of a history that a last query sees.
        text: of the case's name.
        peer: its name.
        others: further peers by name.
    """

    op: str
    run: Callable[[Inputs], Work]
    share: float
    args: Mapping[str, Arg] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    near: float = 1.0
    text: str = ""
    peer: str = "flex"
    others: Mapping[str, Callable[[Inputs], Work]] = field(default_factory=dict)

    @property
    def peers(self) -> dict[str, Callable[[Inputs], Work]]:
        """Everything it is measured beside."""
        return {self.peer: self.run, **self.others}


def _causal(first: int) -> Mod:
    return lambda x: lambda b, h, i, j: i + first >= j


def _window(first: int, width: int) -> Mod:
    return lambda x: lambda b, h, i, j: (i + first >= j) & (i + first - j < width)


def _document(first: int) -> Mod:
    def make(inputs: Inputs) -> Any:
        doc = inputs["document"][0].contiguous()
        return lambda b, h, i, j: (i + first >= j) & (doc[i + first] == doc[j])

    return make


def _prefix(first: int, prefix: int) -> Mod:
    return lambda x: lambda b, h, i, j: (i + first >= j) | (j < prefix)


def _alibi(first: int) -> Mod:
    def make(inputs: Inputs) -> Any:
        slopes = inputs["slopes"]
        return lambda s, b, h, i, j: s - slopes[h] * (i + first - j)

    return make


def slopes(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """ALiBi's, a power of two a head."""
    return torch.exp2(-torch.arange(1, shape[0] + 1) * 8.0 / shape[0])


def variants(
    B: int, T: int, S: int, Hq: int, Hk: int, D: int, width: int = 1024, length: int = 1024
) -> list[Variant]:
    """All of them, for T queries at the end of S keys."""
    first = S - T
    width, length, P = min(width, S), min(length, S), S // 4
    causal = (T * S - T * (T - 1) / 2) / (T * S)
    seen = width * T - (width * (width - 1) / 2 if first == 0 else 0)
    mask = _causal(first) if T > 1 else None  # a single query at the end sees everything
    f32, i32 = torch.float32, torch.int32

    def documents(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
        return (torch.arange(shape[1]) // length).expand(shape)

    def prefix(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, P)

    beside = {n: Arg((P, Hk, D)) for n in ("pk", "pv")}
    both = lambda x: lambda b, h, i, j: (j < P) | (i + first >= j - P)  # noqa: E731
    doc_share = min(1.0, length / S) / (2 if T > 1 else 1)
    return [
        Variant("sliding_window", pytorch.flex(mask=_window(first, width)), seen / (T * S),
                options={"w": width}, near=width / S, text=f" w{width}"),
        Variant("soft_cap", pytorch.flex(
                    score=lambda x: lambda s, b, h, i, j: 50.0 * torch.tanh(s / 50.0), mask=mask
                ), causal, options={"cap": 50.0}),
        Variant("alibi", pytorch.flex(score=_alibi(first), mask=mask), causal,
                {"slopes": Arg((Hq,), slopes, f32)}),
        Variant("sink_attention", plain.sink(mask=mask), causal, {"sink": Arg((Hq,), dtype=f32)}),
        Variant("document_attention", pytorch.flex(mask=_document(first)), doc_share,
                {"document": Arg((B, S), documents, i32)}, near=length / S,
                text=f" documents of {length}"),
        Variant("prefix_lm", pytorch.flex(mask=_prefix(first, P) if T > 1 else None),
                causal + (P * P / 2 / (T * S) if T > 1 else 0),
                {"prefix": Arg((B,), prefix, i32)}, text=f" prefix{P}"),
        Variant("cross_attention", pytorch.sdpa("FLASH_ATTENTION", causal=False), 1.0,
                peer="sdpa-flash",
                others={"sdpa-cudnn": pytorch.sdpa("CUDNN_ATTENTION", causal=False)}),
        Variant("cascade", plain.joined(pytorch.flex(mask=both)), causal + P / S, beside,
                text=f" prefix{P}"),
    ]  # fmt: skip
