"""Attention with linear biases (Press et al., Train Short, Test Long, 2021)."""

import attncc.dsl.api as ac


@ac.op(out="B T (Hkv G) E")
def alibi(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    slopes=ac.Param("(Hkv G)"),
    scale=ac.param(default=ac.rsqrt("D")),
):
    """Causal attention; ``slopes`` ``[Hq]``: a key n positions back loses ``n * slope``."""
    distance = ac.index("T") - ac.index("S")
    score = ac.dot(q, k, "D") * scale - slopes * distance
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")
