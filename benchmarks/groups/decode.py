"""One query token a sequence over a long history, bf16 or e4m3 beside scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.case import Case, Inputs, Part, Work, nan_like
from benchmarks.groups import attend, pages
from benchmarks.peers import flashinfer, pytorch

SHAPES = [
    (1, 32768, 32, 8),
    (8, 8192, 32, 8),
    (64, 8192, 32, 8),
    (128, 4096, 32, 4),
    (16, 8192, 32, 32),
]


def _ours(inputs: Inputs, backend: str) -> Work:
    from attncc import ops

    return attend.call(ops.attention, inputs, backend, "decode")


def case(B: int, T: int, Hq: int, Hk: int, D: int = 128) -> Case:
    """B sequences with T tokens each; the bytes are those of k and v."""
    return Case(
        group="decode",
        name=f"B{B} T{T} Hq{Hq} Hk{Hk} D{D}",
        build=attend.builder(B, 1, T, Hq, Hk, D),
        ours=_ours,
        peers={
            "sdpa-cudnn": pytorch.sdpa("CUDNN_ATTENTION", causal=False),
            "sdpa-flash": pytorch.sdpa("FLASH_ATTENTION", causal=False),
            "flex": pytorch.flex(),
            "flashinfer": flashinfer.decode_paged,
        },
        parts=attend.parts,
        bytes=2 * B * Hk * T * D * 2,
        flops=4.0 * B * Hq * T * D,
        timing="graph",
        reads=True,
    )


UNIT = 2.0**-6
"""Every row's scale: one number, as FlashInfer takes it, in a tensor with one a row, as ours."""


def _stored(inputs: Inputs, name: str) -> Inputs:
    """e4m3 [B, S, Hk, D] and fp32 scales [B, Hk, 1, S] in place of a bf16 history."""
    data = (inputs[name].float() / UNIT).clamp(-448, 448).to(torch.float8_e4m3fn)
    B, S, Hk, _ = data.shape
    scales = torch.full((B, Hk, 1, S), UNIT, device=data.device)
    return {name: data, f"{name}_scales": scales}


def _build_e4m3(B: int, T: int, Hq: int, Hk: int, D: int) -> attend.Build:
    plain = attend.builder(B, 1, T, Hq, Hk, D)

    def build(device: torch.device) -> Inputs:
        inputs = plain(device)
        return {"q": inputs["q"], **_stored(inputs, "k"), **_stored(inputs, "v")}

    return build


def _ours_e4m3(inputs: Inputs, backend: str) -> Work:
    from attncc import QuantisedTensor, ops

    q = inputs["q"]
    k, v = (QuantisedTensor(inputs[n], inputs[f"{n}_scales"]) for n in ("k", "v"))
    out = nan_like(*q.shape, dtype=q.dtype, device=q.device)
    run = ops.attention.decode
    return Work(lambda: {"o": run(q, k, v, out=out, backend=backend)}, {"o": out})


def _meant(inputs: Inputs, rows: slice = slice(None)) -> Inputs:
    """What the stored bits mean: e4m3 times a power of two, which bf16 holds exactly."""
    meant = {n: (inputs[n][rows].float() * UNIT).bfloat16() for n in ("k", "v")}
    return {"q": inputs["q"][rows], **meant}


def _parts_e4m3(inputs: Inputs) -> Iterator[Part]:
    for b in range(inputs["q"].shape[0]):
        for part in attend.parts(_meant(inputs, slice(b, b + 1))):
            yield Part("o", (slice(b, b + 1),), part.oracle, part.eager, part.dtype)


def case_e4m3(B: int, T: int, Hq: int, Hk: int, D: int = 128) -> Case:
    """As :func:`case`, of e4m3 with a scale a row; beside it our own bf16 on the same numbers."""
    return Case(
        group="decode",
        name=f"B{B} T{T} Hq{Hq} Hk{Hk} D{D} e4m3",
        build=_build_e4m3(B, T, Hq, Hk, D),
        ours=_ours_e4m3,
        peers={
            "attncc-bf16": lambda inputs: _ours(_meant(inputs), "triton"),
            "flashinfer": lambda inputs: flashinfer.decode_paged(inputs, UNIT),
        },
        parts=_parts_e4m3,
        bytes=2 * B * Hk * T * (D + 4),
        flops=4.0 * B * Hq * T * D,
        timing="graph",
        reads=True,
    )


def cases() -> list[Case]:
    """The five shapes of the peers' table, two of them in e4m3, and all of them in pages."""
    plain = [case(*shape) for shape in SHAPES]
    stored = [case_e4m3(*SHAPES[i]) for i in (1, 2)]
    return [*plain, *stored, *(pages.case(own, page) for page in (16, 64) for own in plain)]
