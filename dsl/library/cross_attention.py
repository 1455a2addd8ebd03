"""Attention to another sequence that does not grow (Vaswani et al., 2017)."""

import attncc.dsl.api as ac


@ac.op(out="B T (Hkv G) E")
def cross_attention(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Memory("B S Hkv D"),
    v=ac.Memory("B S Hkv E"),
    scale=ac.param(default=ac.rsqrt("D")),
):
    """Every query sees the whole memory ``[B, S, Hkv, .]``, for instance an encoder's output."""
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * scale, "S"), v, "S")
