"""Causal prefill with changed scores or masks, each declared, against FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import oracles
from benchmarks.case import Case, Inputs, Part, Work
from benchmarks.groups import attend
from benchmarks.peers import pytorch

Flex = Callable[[Inputs], Any]


@dataclass(frozen=True, slots=True)
class Mod:
    """One change: its op's further arguments, its oracle and FlexAttention's functions.

    Attributes:
        op: the name in ``declared``.
        extra: further arguments of the op, made from q.
        share: of the causal pairs, how many are seen.
        score: the oracle's score change, from the inputs.
        mask: the oracle's further mask, from the inputs.
        flex_score: FlexAttention's ``score_mod``, from the inputs.
        flex_mask: FlexAttention's ``mask_mod``, from the inputs.
    """

    op: str
    extra: Callable[[torch.Tensor], dict[str, Any]]
    share: float
    flex_mask: Flex
    flex_score: Flex | None = None
    score: Callable[[Inputs], oracles.Score] | None = None
    mask: Callable[[Inputs], oracles.Mask] | None = None


def _slopes(q: torch.Tensor) -> dict[str, Any]:
    H = q.shape[2]
    return {"slopes": torch.exp2(-torch.arange(1, H + 1, device=q.device) * 8.0 / H)}


def _documents(length: int) -> Callable[[torch.Tensor], dict[str, Any]]:
    def make(q: torch.Tensor) -> dict[str, Any]:
        doc = torch.arange(q.shape[1], device=q.device, dtype=torch.int32) // length
        return {"doc": doc.expand(q.shape[0], -1).contiguous()}

    return make


def _causal(inputs: Inputs) -> Any:
    return lambda b, h, i, j: i >= j


def _flex_alibi(inputs: Inputs) -> Any:
    slopes = inputs["slopes"]
    return lambda s, b, h, i, j: s + slopes[h] * (j - i)


def _flex_document(inputs: Inputs) -> Any:
    doc = inputs["doc"][0].contiguous()
    return lambda b, h, i, j: (i >= j) & (doc[i] == doc[j])


def _alibi(inputs: Inputs) -> oracles.Score:
    slopes = inputs["slopes"]
    return lambda s, i, j, h: s + slopes[h].to(s.dtype) * (j - i)


def _same_document(inputs: Inputs) -> oracles.Mask:
    doc = inputs["doc"][0]
    return lambda i, j: doc[i] == doc[j]


def mods(S: int, width: int = 1024, length: int = 1024) -> dict[str, Mod]:
    """The four changes for prompts of S tokens."""
    return {
        "softcap": Mod(
            "softcap", lambda q: {"cap": 30.0}, 1.0, _causal,
            flex_score=lambda x: lambda s, b, h, i, j: 30 * torch.tanh(s / 30),
            score=lambda x: lambda s, i, j, h: 30 * torch.tanh(s / 30),
        ),
        "alibi": Mod("alibi", _slopes, 1.0, _causal, flex_score=_flex_alibi, score=_alibi),
        f"window{width}": Mod(
            "window", lambda q: {"width": width}, 2 * (width / S) * (1 - width / 2 / S),
            flex_mask=lambda x: lambda b, h, i, j: (i >= j) & (i - j < width),
            mask=lambda x: lambda i, j: i - j < width,
        ),
        f"document{length}": Mod(
            "document", _documents(length), length / S, _flex_document, mask=_same_document
        ),
    }  # fmt: skip


def case(name: str, mod: Mod, B: int, S: int, Hq: int, Hk: int, D: int) -> Case:
    """One change at one shape."""
    plain = attend.builder(B, S, S, Hq, Hk, D)

    def build(device: torch.device) -> Inputs:
        inputs = plain(device)
        extra = mod.extra(inputs["q"])
        return {**inputs, **extra, "extra": extra}

    def ours(inputs: Inputs, backend: str) -> Work:
        from benchmarks.groups import declared

        return attend.call(getattr(declared, mod.op), inputs, backend, **inputs["extra"])

    def parts(inputs: Inputs) -> Iterator[Part]:
        return attend.parts(
            inputs,
            None if mod.score is None else mod.score(inputs),
            None if mod.mask is None else mod.mask(inputs),
        )

    return Case(
        group="prefill_mods",
        name=f"B{B} S{S} {name}",
        build=build,
        ours=ours,
        peers={"flex": pytorch.flex(score=mod.flex_score, mask=mod.flex_mask)},
        parts=parts,
        bytes=attend.io_bytes(B, S, S, Hq, Hk, D),
        flops=4.0 * B * Hq * S * S * D / 2 * mod.share,
    )


def cases() -> list[Case]:
    """Soft cap, ALiBi, window and documents at B2 S8192."""
    B, S, Hq, Hk, D = 2, 8192, 32, 8, 128
    return [case(name, mod, B, S, Hq, Hk, D) for name, mod in mods(S).items()]
