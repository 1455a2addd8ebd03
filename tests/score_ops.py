"""Ops that use the whole breadth of scores, and arguments for them; every tier draws from here."""

from collections.abc import Callable
from typing import Any

import torch

import attncc as ac
from tests.strategies import randn

# --- several folds


@ac.op(out="B T (Hkv G) E")
def differential(
    q=ac.Activation("B T (Hkv G) D"), q2=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"), k2=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    lam=ac.Param("(Hkv G)"),
):  # fmt: skip
    one = ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=ac.causal)
    two = ac.softmax(ac.dot(q2, k2, "D") * ac.rsqrt("D"), "S", where=ac.causal)
    return 0.5 * ac.dot(one - lam * two, v, "S")


@ac.op(out={"o": "B T (Hkv G) E", "n": "B T (Hkv G) R"})
def two_values(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    r=ac.Cache("B S Hkv R"), gate=ac.Activation("B T (Hkv G)"),
):  # fmt: skip
    p = ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=ac.causal)
    return ac.dot(p * ac.sigmoid(gate), v, "S"), -ac.dot(p, r, "S") / 2


@ac.op(out="B T (Hkv G) E")
def softmax_and_sum(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
):  # fmt: skip
    score = ac.dot(q, k, "D") * ac.rsqrt("D")
    p = ac.softmax(score, "S", where=ac.causal)
    linear = ac.dot(ac.where(ac.causal, ac.relu(score), 0.0), v, "S")
    return ac.dot(p, v, "S") + 0.1 * linear


# --- plain sums and inner sums


@ac.op(out="B T (Hkv G) E")
def rectified(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
):  # fmt: skip
    score = ac.dot(q, k, "D") * ac.rsqrt("D")
    return ac.dot(ac.where(ac.causal, ac.relu(score), 0.0), v, "S")


@ac.op(out="B T H E")
def indexed(
    q=ac.Activation("B T H D"), k=ac.Cache("B S D"), v=ac.Cache("B S E"),
    qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di"),
):  # fmt: skip
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + index
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


# --- two histories


@ac.op(out="B T (Hkv G) E")
def shared_prefix(
    q=ac.Activation("B T (Hkv G) D"), pk=ac.Memory("P Hkv D"), pv=ac.Memory("P Hkv E"),
    k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"), sink=ac.Param("(Hkv G)"),
):  # fmt: skip
    scores = {axis: ac.dot(q, x, "D") * ac.rsqrt("D") for axis, x in (("P", pk), ("S", k))}
    p = ac.softmax(scores, where={"S": ac.causal}, sink=sink)
    return ac.dot(p, {"P": pv, "S": v})


# --- positions, tables, masks


@ac.op(out="B T (Hkv G) E")
def relative(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    table=ac.Param("(Hkv G) L"), sink=ac.Param("(Hkv G)"),
):  # fmt: skip
    bias = ac.take(table, "L", ac.index("T") - ac.index("S"))
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + bias
    return ac.dot(ac.softmax(score, "S", where=ac.causal, sink=sink), v, "S")


@ac.op(out="B T (Hkv G) E")
def dilated(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    step=ac.param(default=3, integer=True),
):  # fmt: skip
    far = ac.eq((ac.index("T") - ac.index("S")) % step, 0)
    p = ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=ac.causal & far)
    return ac.dot(p, v, "S")


@ac.op(out="B T (Hkv G) E")
def prefix_lm(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    prefix=ac.Activation("B"),
):  # fmt: skip
    seen = ac.causal | (ac.index("S") < prefix)
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=seen), v, "S")


@ac.op(out="B T (Hkv G) E")
def prefix_of(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    prefix=ac.param(integer=True),
):  # fmt: skip
    seen = ac.causal | (ac.index("S") < prefix)
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=seen), v, "S")


@ac.op(out="B T (Hkv G) E")
def documents(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    document=ac.Cache("B S"),
):  # fmt: skip
    same = ac.eq(ac.at_query(document, "S"), document)
    p = ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=ac.causal & same)
    return ac.dot(p, v, "S")


@ac.op(out="B T (Hkv G) E")
def by_importance(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    weight=ac.Cache("B S"), least=ac.Activation("B T"),
):  # fmt: skip
    seen = ac.causal & ~(weight < least)
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=seen), v, "S")


@ac.op(out="B T (Hkv G) E")
def forgetting(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    f=ac.Cache("B S (Hkv G)"),
):  # fmt: skip
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + ac.between(f, "S")
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


# --- arguments


def heads(batch: int, tokens: int, history: int, width: int = 32) -> dict[str, torch.Tensor]:
    """Queries of 2 x 2 heads, keys and values of 2."""
    return {
        "q": randn(1, batch, tokens, 4, width),
        "k": randn(2, batch, history, 2, width),
        "v": randn(3, batch, history, 2, width),
    }


def _gates(batch: int, history: int) -> torch.Tensor:
    gates = -randn(4, batch, history, 4).abs() / 4
    gates[:, 5:7, 1] = -torch.inf
    return gates


def _documents(batch: int, history: int, length: int) -> torch.Tensor:
    found = torch.arange(history).div(length, rounding_mode="floor").int()
    return found.expand(batch, history).contiguous()


Arguments = Callable[[int, int, int], dict[str, Any]]
CASES: dict[str, tuple[Any, Arguments]] = {
    "differential": (differential, lambda b, t, s: {
        "q2": randn(5, b, t, 4, 32), "k2": randn(6, b, s, 2, 32), "lam": randn(7, 4).float()}),
    "two_values": (two_values, lambda b, t, s: {
        "r": randn(8, b, s, 2, 16), "gate": randn(9, b, t, 4)}),
    "softmax_and_sum": (softmax_and_sum, lambda b, t, s: {}),
    "rectified": (rectified, lambda b, t, s: {}),
    "indexed": (indexed, lambda b, t, s: {
        "k": randn(2, b, s, 32), "v": randn(3, b, s, 32), "qi": randn(10, b, t, 3, 16),
        "w": randn(11, b, t, 3), "ki": randn(12, b, s, 16)}),
    "shared_prefix": (shared_prefix, lambda b, t, s: {
        "pk": randn(13, 41, 2, 32), "pv": randn(14, 41, 2, 32), "sink": randn(15, 4).float()}),
    "relative": (relative, lambda b, t, s: {
        "table": randn(16, 4, 20).float(), "sink": randn(15, 4).float()}),
    "dilated": (dilated, lambda b, t, s: {"step": 3}),
    "prefix_lm": (prefix_lm, lambda b, t, s: {
        "prefix": torch.arange(b).int() * (s // 2) + s // 4}),
    "prefix_of": (prefix_of, lambda b, t, s: {"prefix": s // 2}),
    "documents": (documents, lambda b, t, s: {"document": _documents(b, s, max(s // 5, 1))}),
    "by_importance": (by_importance, lambda b, t, s: {
        "weight": randn(17, b, s).float(), "least": randn(18, b, t).float()}),
    "forgetting": (forgetting, lambda b, t, s: {"f": _gates(b, s).float()}),
}  # fmt: skip


def arguments(
    name: str, batch: int, tokens: int, history: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Any]:
    """Arguments of a case; fp64 values become ``dtype``, others (gates, ids) keep their own."""
    given = {**heads(batch, tokens, history), **CASES[name][1](batch, tokens, history)}
    return {
        n: x.to(device, dtype if x.dtype == torch.float64 else x.dtype)
        if isinstance(x, torch.Tensor)
        else x
        for n, x in given.items()
    }
