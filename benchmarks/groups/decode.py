"""One query token a sequence over a long bf16 history."""

from __future__ import annotations

from benchmarks.case import Case, Inputs, Work
from benchmarks.groups import attend
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


def cases() -> list[Case]:
    """The five shapes of the peers' table."""
    return [case(*shape) for shape in SHAPES]
