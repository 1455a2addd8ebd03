"""Ops with one softmax over the op's own history, for the tests of warp-specialised prefill."""

import torch

import attncc as ac
from tests.score_ops import documents


@ac.op(out="B T (Hkv G) E")
def full(q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E")):
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S"), v, "S")


@ac.op(out="B T (Hkv G) E")
def windowed(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    width=ac.param(integer=True),
):  # fmt: skip
    seen = ac.causal & (ac.index("T") - ac.index("S") < width)
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=seen), v, "S")


@ac.op(out="B T (Hkv G) E")
def ahead(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    least=ac.param(integer=True), most=ac.param(integer=True),
):  # fmt: skip
    """A band that begins and ends away from the diagonal."""
    gap = ac.index("S") - ac.index("T")
    seen = (gap >= least) & (gap <= most)
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=seen), v, "S")


@ac.op(out="B T (Hkv G) E")
def capped(q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E")):
    score = 30 * ac.tanh(ac.dot(q, k, "D") * ac.rsqrt("D") / 30)
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def alibi(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    slope=ac.Param("(Hkv G)"),
):  # fmt: skip
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + slope * (ac.index("S") - ac.index("T"))
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def gated(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    gate=ac.Activation("B T (Hkv G)"), sink=ac.Param("(Hkv G)"),
):  # fmt: skip
    """A sink in the sum, and an epilogue that reads what the row has."""
    p = ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=ac.causal, sink=sink)
    return ac.dot(p, v, "S") * ac.sigmoid(gate)


@ac.op(out="B T Hkv G E")
def apart(q=ac.Activation("B T Hkv G D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E")):
    """Heads of a group on a memory axis of their own."""
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def learned(
    q=ac.Param("(Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    gate=ac.Activation("B T (Hkv G)"),
):  # fmt: skip
    """Queries that every token has."""
    p = ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=ac.causal)
    return ac.dot(p, v, "S") * gate


@ac.op(out="B T (Hkv G) E")
def from_a_key_on(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    slope=ac.Param("(Hkv G)"),
):  # fmt: skip
    """A band that limits a row's first key and not its last one."""
    gap = ac.index("S") - ac.index("T")
    score = ac.dot(q, k, "D") * ac.rsqrt("D") - slope * gap
    return ac.dot(ac.softmax(score, "S", where=gap >= -40), v, "S")


@ac.op(out="B T (Hkv G) E")
def crowded(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    document=ac.Cache("B S"), weight=ac.Cache("B S"), slope=ac.Param("(Hkv G)"),
):  # fmt: skip
    """More values a key than a thread has registers for in blocks of 128 keys."""
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + slope * (ac.index("S") - ac.index("T"))
    seen = ac.causal & ac.eq(ac.at_query(document, "S"), document) & (weight > 0)
    return ac.silu(ac.dot(ac.softmax(score, "S", where=seen), v, "S"))


@ac.op(out="B T (Hkv G) E")
def biased(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    bias=ac.Activation("(Hkv G) T S"),
):  # fmt: skip
    """A value for each query and key."""
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + bias
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def many_bands(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    width=ac.param(integer=True),
):  # fmt: skip
    """Four comparisons of queries with keys."""
    t, s = ac.index("T"), ac.index("S")
    seen = ((2 * s >= t) & (t - s < width)) | (ac.causal | (s <= t - 2))
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=seen), v, "S")


CROWDED = {"crowded": crowded, "biased": biased, "many_bands": many_bands}
"""Those that need blocks of fewer keys; no table of plans makes Gluon their default."""

CASES = {
    "causal": ac.ops.attention, "full": full, "windowed": windowed, "ahead": ahead,
    "capped": capped, "alibi": alibi, "gated": gated, "documents": documents,
}  # fmt: skip


def extras(name, q, history):
    """What a case takes besides q [B, T, H, D], k and v; documents of 1 to 200 tokens."""
    batch, _, heads, _ = q.shape
    device = q.device
    if name == "windowed":
        return {"width": 150}
    if name == "ahead":
        return {"least": -200, "most": -3}
    if name == "alibi":
        return {"slope": 2.0 ** -torch.arange(1, heads + 1, device=device, dtype=torch.float32)}
    if name == "gated":
        sink = torch.randn(heads, device=device, dtype=torch.float32)
        return {"gate": torch.randn_like(q[..., 0]), "sink": sink}
    if name == "documents":
        lengths = torch.tensor([70, 1, 200, 129, 64])
        repeats = history // int(lengths.sum()) + 1
        ids = torch.repeat_interleave(torch.arange(5 * repeats), lengths.repeat(repeats))[:history]
        return {"document": ids.int().to(device).expand(batch, -1).contiguous()}
    return {}
