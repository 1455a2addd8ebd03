"""Prompts of the library's other ops: attention variants, recurrences, norms and rotations."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.case import Case
from benchmarks.groups.library import Arg, Draw, Row, gate, rate, unit
from benchmarks.groups.library_masks import variants
from benchmarks.groups.recurrences import CHUNK
from benchmarks.peers import library as plain

F32 = torch.float32


def _attention(B: int, S: int, Hq: int, Hk: int, D: int) -> list[Row]:
    args = {"q": Arg((B, S, Hq, D)), "k": Arg((B, S, Hk, D)), "v": Arg((B, S, Hk, D))}
    full = 4.0 * B * Hq * S * S * D
    return [
        Row(
            v.op, f"B{B} S{S} Hq{Hq} Hk{Hk} D{D}{v.text}", {**args, **v.args}, v.peers,
            full * v.share, args["q"].bytes, v.options, last=True,
        )
        for v in variants(B, S, S, Hq, Hk, D)
    ]  # fmt: skip


def _recurrences(T: int, H: int, K: int, V: int) -> list[Row]:
    """One prompt from a zero state."""
    vectors = {n: Arg((1, T, H, K), unit) for n in ("q", "k")}
    values, head = {"v": Arg((1, T, H, V))}, (1, T, H)
    common = {**vectors, **values}
    chunks = T * H * (4.0 * K * CHUNK + 2 * V * CHUNK + 4 * K * V)
    solved = chunks + T * H * (2.0 * V * CHUNK + 2 * CHUNK**2 / 3 + 2 * K * V)
    each = 8.0 * T * H * K * V
    raw = {**common, **raw_args(1, T, H, K, V)}
    out = 2 * T * H * V + 4 * H * K * V
    text = f"T{T} H{H} K{K} V{V}"
    comba, oja, rwkv7 = ({"fla": plain.of_fla(n, "chunk")} for n in ("comba", "gated_oja", "rwkv7"))
    rule = "chunk_gated_delta_rule"
    own = {"fla": plain.fla("gated_delta_rule", rule, plain.raw_arguments)}
    net = {"fla": plain.gated_net(rule)}
    gated = {"g": Arg(head, gate, F32), "beta": Arg(head, rate)}
    return [
        Row("linear_attention", text, common, _compiled(plain.linear_attention, "linear_attention"),
            chunks, out),
        Row("retnet", text, {**common, "gamma": Arg((H,), gamma, F32)},
            _compiled(plain.retnet, "retnet"), chunks, out),
        _mamba2(T, 4 * H, K, V // 2),
        _hgrn(8, T // 2, 16 * K),
        _hgrn(1, 4 * T, 16 * K),
        Row("comba", text, {**common, **gated, **comba_args(1, T, H, K)}, comba, solved, out),
        Row("raw_gated_delta_rule", text, raw, own, solved, out),
        Row("gated_delta_net", text, {**raw, "z": Arg((*head, V)), "w": Arg((V,), near_one, F32)},
            net, solved, out),
        Row("gated_oja", text, {**vectors, "v": Arg((*head, V), unit),
            "g": Arg((*head, V), gate, F32), "beta": Arg(head, rate)}, oja, each, out),
        Row("rwkv7", text, rwkv7_args(1, T, H, K, V), rwkv7, each, out),
    ]  # fmt: skip


def _compiled(run: Any, op: str = "") -> dict[str, Any]:
    """Plain PyTorch, and FLA's kernel where it has the op."""
    found = {"torch.compile": plain.compiled(run)}
    return found | ({"fla": plain.of_fla(op, "chunk")} if op else {})


def _mamba2(T: int, H: int, K: int, V: int) -> Row:
    args = mamba2_args(1, T, H, K, V)
    flops = T * H * (4.0 * K * CHUNK + 2 * V * CHUNK + 4 * K * V)
    out = 2 * T * H * V + 4 * H * K * V
    text = f"T{T} heads{H} groups1 K{K} V{V}"
    peers = {**_compiled(plain.mamba2), "fla": plain.mamba2_scan}
    return Row("mamba2", text, args, peers, flops, out)


def _hgrn(B: int, T: int, D: int) -> Row:
    args = {"x": Arg((B, T, D)), "g": Arg((B, T, D), gate, F32)}
    peers = {
        name: plain.fla("hgrn", kernel, plain.hgrn_arguments)
        for name, kernel in (("fla", "chunk_hgrn"), ("fla recurrent", "fused_recurrent_hgrn"))
    }
    sizes, out = f"B{B} T{T} D{D}", 2 * B * T * D + 4 * B * D
    return Row("hgrn", sizes, args, peers, 2.0 * B * T * D, out)


# --- arguments that steps share ---------------------------------------------------------------


def gamma(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """RetNet's decays, ``1 - 2 ** (-5 - h)``."""
    return 1 - torch.exp2(-5 - torch.arange(shape[0], dtype=F32))


def near_one(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Weights of a norm."""
    return 1 + 0.1 * draw(*shape)


def small(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Parameters of gates: decays of about exp(-0.7)."""
    return 0.5 * draw(*shape)


def feedback(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Keys of Comba's prediction, shorter than 1."""
    return 0.7 * unit(draw, shape)


def raw_args(B: int, T: int, H: int, K: int, V: int) -> dict[str, Arg]:
    """What a layer hands to a gated delta rule before its gates."""
    heads = {n: Arg((B, T, H)) for n in ("a", "b")}
    return {**heads, **{n: Arg((H,), small, F32) for n in ("a_log", "dt_bias")}}


def comba_args(B: int, T: int, H: int, K: int) -> dict[str, Arg]:
    """Comba's own."""
    return {"p": Arg((B, T, H, K), feedback), "d": Arg((H,), small, F32)}


def mamba2_args(B: int, T: int, H: int, K: int, V: int) -> dict[str, Arg]:
    """Of one group."""
    shared = {n: Arg((B, T, 1, K), unit) for n in ("b", "c")}
    model = {n: Arg((H,), small, F32) for n in ("a_log", "d", "dt_bias")}
    return {"x": Arg((B, T, H, V)), "dt": Arg((B, T, H)), **shared, **model}


def removal(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """A key that is as long as its rate keeps a state bounded: half of a unit vector."""
    return 0.5 * unit(draw, shape)


def rwkv7_args(B: int, T: int, H: int, K: int, V: int) -> dict[str, Arg]:
    """RWKV-7's, w in fp32."""
    found = {n: Arg((B, T, H, K), unit) for n in ("r", "k")}
    found |= {"a": Arg((B, T, H, K), unit), "b": Arg((B, T, H, K), removal)}
    return {**found, "v": Arg((B, T, H, V)), "w": Arg((B, T, H, K), gate, F32)}


# --- rows -------------------------------------------------------------------------------------


def _rows(B: int, T: int, H: int, V: int, L: int) -> list[Row]:
    x, w = {"x": Arg((B, T, H, V))}, {"w": Arg((V,), near_one, F32)}
    tables = {n: Arg((L, V // 2), angles, F32) for n in ("cos", "sin")}
    turned = {**x, "position": Arg((B, T), places(L), torch.int32), **tables}
    out, text = x["x"].bytes, f"B{B} T{T} H{H} V{V}"
    found = [
        ("rms_norm", {**x, **w}, plain.rms_norm),
        ("layer_norm", {**x, "w": Arg((V,), near_one), "bias": Arg((V,))}, plain.layer_norm),
        ("l2_norm", x, plain.l2_norm),
        ("gated_rms_norm", {**x, "z": Arg((B, T, H, V)), **w}, plain.gated_rms_norm),
        ("silu", x, plain.silu),
        ("rope", turned, plain.rope),
        ("rope_interleaved", turned, plain.rope_interleaved),
    ]
    return [
        Row(op, text, args, _compiled(run), 8.0 * B * T * H * V, out) for op, args, run in found
    ]


def angles(draw: Draw, shape: tuple[int, ...]) -> torch.Tensor:
    """Cosines of anything."""
    return draw(*shape).cos()


def places(L: int) -> Any:
    """Positions in tables of L rows."""
    return lambda draw, shape: torch.arange(shape[1]).expand(shape) % L


def rows(
    *, S: int = 8192, Hq: int = 32, Hk: int = 8, D: int = 128, T: int = 8192, H: int = 16,
    K: int = 128, V: int = 128, tokens: int = 32768,
) -> list[Row]:  # fmt: skip
    """Every row; the last ones' peers take longest to compile."""
    attention = _attention(1, S, Hq, Hk, D)
    return [*_rows(1, tokens, Hq, D, S), *attention, *_recurrences(T, H, K, V)]


def cases() -> list[Case]:
    """One of each op; the last ones' peers try many configurations in their first call."""
    return [row.case() for row in rows()]
