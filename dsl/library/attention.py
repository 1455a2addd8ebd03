"""Scaled dot-product attention over the op's own cache."""

import attncc.dsl.api as ac


@ac.op(out="B T (Hkv G) E")
def attention(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    scale=ac.param(default=ac.rsqrt("D")),
):
    """Causal softmax attention; MHA, GQA and MQA are the sizes of G and Hkv."""
    score = ac.dot(q, k, "D") * scale
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")
