"""Causal attention over a whole prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.case import Case, Inputs, Work
from benchmarks.groups import attend
from benchmarks.peers import pytorch

SHAPES = [(4, 4096, 32, 8), (1, 16384, 32, 8)]


def _ours(inputs: Inputs, backend: str) -> Work:
    from attncc import ops

    return attend.call(ops.attention, inputs, backend)


def _causal(inputs: Inputs) -> Callable[..., Any]:
    return lambda b, h, i, j: i >= j


def case(B: int, S: int, Hq: int, Hk: int, D: int = 128) -> Case:
    """B prompts of S tokens; half of the S x S pairs are computed."""
    return Case(
        group="prefill",
        name=f"B{B} S{S} Hq{Hq} Hk{Hk} causal",
        build=attend.builder(B, S, S, Hq, Hk, D),
        ours=_ours,
        peers={
            "sdpa-cudnn": pytorch.sdpa("CUDNN_ATTENTION", causal=True),
            "sdpa-flash": pytorch.sdpa("FLASH_ATTENTION", causal=True),
            "flex": pytorch.flex(mask=_causal),
        },
        parts=attend.parts,
        bytes=attend.io_bytes(B, S, S, Hq, Hk, D),
        flops=4.0 * B * Hq * S * S * D / 2,
    )


def cases() -> list[Case]:
    """The two shapes of the peers' table: as the tables of plans say, and by other dialects."""
    plain = [case(*shape) for shape in SHAPES]
    return plain + [
        replace(c, name=f"{c.name}, {name}", backend=backend)
        for name, backend in (("Triton", "triton"), ("CuTe-DSL", "cutedsl"))
        for c in plain
    ]
