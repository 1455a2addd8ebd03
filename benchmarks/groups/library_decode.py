"""Decode steps of library ops: attention variants, and recurrences with a state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.case import Case
from benchmarks.groups.library import Arg, Row, gate, rate, unit
from benchmarks.groups.library_masks import variants
from benchmarks.groups.library_prefill import (
    comba_args,
    gamma,
    mamba2_args,
    near_one,
    raw_args,
    rwkv7_args,
)
from benchmarks.peers import library as plain
from benchmarks.peers import steps

F32 = torch.float32


def _attention(B: int, S: int, Hq: int, Hk: int, D: int) -> list[Row]:
    args = {"q": Arg((B, 1, Hq, D)), "k": Arg((B, S, Hk, D)), "v": Arg((B, S, Hk, D))}
    full = 4.0 * B * Hq * S * D
    found = [
        Row(
            v.op, f"B{B} S{S} Hq{Hq} Hk{Hk} D{D}{v.text}", {**args, **v.args}, v.peers,
            full * v.share, args["q"].bytes, v.options, "decode", last=True, read=v.near,
        )
        for v in variants(B, 1, S, Hq, Hk, D)
    ]  # fmt: skip
    return [*found, *(_narrow(row) for row in found if row.op in ("sliding_window", "soft_cap"))]


def _narrow(row: Row) -> Row:
    """The same over e4m3 histories, beside our own bf16."""
    peers = {"attncc-bf16": lambda inputs: row.ours({**inputs, "held": {}}, "triton"), **row.peers}
    return replace(row, sizes=f"{row.sizes} e4m3", peers=peers, stored=True)


def _steps(B: int, H: int, K: int, V: int) -> list[Row]:
    """One token of B sequences; the bytes are mostly the state's, read and written."""
    head, vectors = (B, 1, H), {n: Arg((B, 1, H, K), unit) for n in ("q", "k")}
    state, values = {"s": Arg((B, H, K, V), dtype=F32)}, {"v": Arg((B, 1, H, V))}
    common = {**vectors, **values, **state}
    gated = {"g": Arg(head, gate, F32), "beta": Arg(head, rate)}
    raw = {**common, **raw_args(B, 1, H, K, V)}
    net = {**raw, "z": Arg((*head, V)), "w": Arg((V,), near_one, F32)}
    oja = {**vectors, "v": Arg((*head, V), unit), "g": Arg((*head, V), gate, F32),
           "beta": Arg(head, rate), **state}  # fmt: skip
    turned = {"s": Arg((B, 2 * H, V // 2, K), dtype=F32)}
    found: list[tuple[str, dict[str, Arg], Any]] = [
        ("linear_attention", common, steps.linear_step),
        ("retnet", {**common, "gamma": Arg((H,), gamma, F32)}, steps.linear_step),
        ("mamba2", {**mamba2_args(B, 1, 2 * H, K, V // 2), **turned}, steps.mamba2_step),
        ("comba", {**common, **gated, **comba_args(B, 1, H, K)}, steps.comba_step),
        ("raw_gated_delta_rule", raw, steps.raw_step),
        ("gated_delta_net", net, steps.raw_step),
        ("gated_oja", oja, steps.oja_step),
        ("rwkv7", {**rwkv7_args(B, 1, H, K, V), **state}, steps.rwkv7_step),
        ("gla", {**common, "g": Arg((B, 1, H, K), gate, F32)}, steps.gla_step),
        ("delta_rule", {**common, "beta": gated["beta"]}, steps.delta_step),
        ("kda", {**common, "g": Arg((B, 1, H, K), gate, F32), "beta": gated["beta"]},
         steps.delta_step),
        ("gated_delta_product", _product(2, common, gated, state), steps.delta_step),
    ]  # fmt: skip
    text, out = f"B{B} H{H} K{K} V{V} fp32 state", state["s"].bytes + 2 * B * H * V
    other = {
        "mamba2": f"B{B} heads{2 * H} groups1 K{K} V{V // 2} fp32 state",
        "gated_delta_product": f"{text} n2",
    }
    made = [
        _step(op, other.get(op, text), args, run, 8.0 * B * H * K * V, out)
        for op, args, run in found
    ]
    return [*made, _hgrn(B, H * V)]


def _product(
    n: int, common: dict[str, Arg], gated: dict[str, Arg], state: dict[str, Arg]
) -> dict[str, Arg]:
    """n rows of k, v and beta a token."""
    rows = {**{name: common[name] for name in ("k", "v")}, "beta": gated["beta"]}
    more = {name: Arg((a.shape[0], n, *a.shape[2:]), a.make, a.dtype) for name, a in rows.items()}
    return {"q": common["q"], **more, "g": gated["g"], **state}


def _step(op: str, text: str, args: dict[str, Arg], run: Any, flops: float, out: int) -> Row:
    peers = {"torch.compile": plain.compiled(run)}
    if op in ("raw_gated_delta_rule", "gated_delta_net"):
        recurrent = "fused_recurrent_gated_delta_rule"
        rule = plain.fla("gated_delta_rule", recurrent, plain.raw_arguments)
        peers["fla recurrent"] = (
            rule if op == "raw_gated_delta_rule" else plain.gated_net(recurrent)
        )
    elif op in plain.OF_FLA:
        peers["fla recurrent"] = plain.of_fla(op, "fused_recurrent")
    return Row(op, text, args, peers, flops, out, phase="decode")


def _hgrn(B: int, D: int) -> Row:
    args = {"x": Arg((B, 1, D)), "g": Arg((B, 1, D), gate, F32), "s": Arg((B, D), dtype=F32)}
    return _step("hgrn", f"B{B} D{D} fp32 state", args, steps.hgrn_step, 2.0 * B * D, 6 * B * D)


def rows(
    *, B: int = 32, S: int = 8192, Hq: int = 32, Hk: int = 8, D: int = 128, states: int = 128,
    H: int = 32, K: int = 128, V: int = 128,
) -> list[Row]:  # fmt: skip
    """Every row."""
    return [*_attention(B, S, Hq, Hk, D), *_steps(states, H, K, V)]


def cases() -> list[Case]:
    """One step of each op."""
    return [row.case() for row in rows()]
