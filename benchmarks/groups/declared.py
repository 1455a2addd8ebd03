"""Attention with the score and mask changes that FlexAttention's users reach for, declared."""

import attncc as ac


@ac.op(out="B T (Hkv G) E")
def softcap(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    cap=ac.param(default=30.0),
):
    """Scores are held within (-cap, cap)."""
    score = cap * ac.tanh(ac.dot(q, k, "D") * ac.rsqrt("D") / cap)
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def alibi(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    slopes=ac.Param("(Hkv G)"),
):
    """A penalty linear in the distance (Press et al., Train Short, Test Long, 2022)."""
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + slopes * (ac.index("S") - ac.index("T"))
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def window(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    width=ac.param(default=1024, integer=True),
):
    """Each query sees the last ``width`` tokens, itself among them."""
    near = ac.causal & (ac.index("T") - ac.index("S") < width)
    score = ac.dot(q, k, "D") * ac.rsqrt("D")
    return ac.dot(ac.softmax(score, "S", where=near), v, "S")


@ac.op(out="B T (Hkv G) E")
def document(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    doc=ac.Cache("B S"),
):
    """Each query sees its own document only."""
    same = ac.causal & ac.eq(ac.at_query(doc, "S"), doc)
    score = ac.dot(q, k, "D") * ac.rsqrt("D")
    return ac.dot(ac.softmax(score, "S", where=same), v, "S")
