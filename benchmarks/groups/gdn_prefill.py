"""Gated delta rule over whole prompts, one sequence or several packed ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.case import Case, Inputs, Work
from benchmarks.groups import recur
from benchmarks.peers import fla, flashinfer

SHAPES = [
    (8192, 16, 32, 1),
    (32768, 16, 32, 1),
    (32768, 16, 32, 16),
    (32768, 4, 8, 1),
    (131072, 16, 32, 1),
]
FEW = 16
"""Sequences times heads below which FlashInfer cuts sequences, as we do."""


def _ours(inputs: Inputs, backend: str) -> Work:
    return recur.call(inputs, backend, "prefill")


def case(T: int, Hq: int, Hv: int, nseq: int, K: int = 128, V: int = 128) -> Case:
    """T tokens in nseq sequences of one length, from a zero state."""

    def build(device: torch.device) -> Inputs:
        x: Inputs = dict(recur.inputs_of(1, T, Hq, Hv, K, V, device))
        x["s"] = torch.zeros(nseq, Hv, K, V, device=device)
        x["cu_seqlens"] = torch.arange(nseq + 1, device=device) * (T // nseq)
        return x

    peers = {"fla": fla.gdn_prefill, "flashinfer": flashinfer.gdn_prefill}
    if nseq * Hv < FEW:
        peers["flashinfer uncut"] = flashinfer.gdn_prefill_uncut
    return Case(
        group="gdn_prefill",
        name=f"T{T} nseq{nseq} Hq{Hq} Hv{Hv} K{K} V{V}",
        build=build,
        ours=_ours,
        peers=peers,
        parts=recur.prefill_parts,
        bytes=T * (2 * Hq * K + 2 * Hv * V) * 2,
        flops=recur.chunk_flops(T, Hv, K, V),
    )


def cases() -> list[Case]:
    """The five shapes of the peers' table, and the state pass in CuTe-DSL for two of them."""
    found = [case(*shape) for shape in SHAPES]
    return found + [replace(c, name=f"{c.name}, CuTe-DSL", backend="cutedsl") for c in found[1:3]]
