"""Gated delta rule, one token a sequence, fp32 state."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.case import Case, Inputs, Work, generator
from benchmarks.groups import recur
from benchmarks.peers import fla, flashinfer

SHAPES = [(1, 16, 32), (32, 16, 32), (128, 16, 32), (512, 16, 32)]


def _ours(inputs: Inputs, backend: str) -> Work:
    return recur.call(inputs, backend, "decode")


def case(B: int, Hq: int, Hv: int, K: int = 128, V: int = 128) -> Case:
    """B sequences; the bytes are the state's, read and written."""

    def build(device: torch.device) -> Inputs:
        x: Inputs = dict(recur.inputs_of(B, 1, Hq, Hv, K, V, device))
        x["s"] = torch.randn(B, Hv, K, V, generator=generator(device, 1), device=device)
        return x

    return Case(
        group="gdn_decode",
        name=f"B{B} Hq{Hq} Hv{Hv} fp32 state",
        build=build,
        ours=_ours,
        peers={"fla": fla.gdn_decode, "flashinfer": flashinfer.gdn_decode},
        parts=recur.step_parts,
        bytes=2 * B * Hv * K * V * 4,
        flops=8.0 * B * Hv * K * V,
        timing="graph",
    )


def _prepared(inputs: Inputs, backend: str) -> Work:
    return recur.prepared(*recur.step_call(inputs, backend))


def cases() -> list[Case]:
    """The four batch sizes of the peers' table: the kernels alone, and called once.

    A call between two events holds what the host takes to launch it, where that is longer than the
    kernel: so the peers' table was measured.
    """
    alone = [case(*shape) for shape in SHAPES]
    called = [replace(c, name=f"{c.name}, called", ours=_prepared, timing="events") for c in alone]
    return alone + called
