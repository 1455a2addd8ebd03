"""Kimi delta attention (Kimi Linear, 2025): the delta rule with a decay for each key element."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T (Hk G) V")
def kda(
    q=ac.Activation("B T Hk K"),
    k=ac.Activation("B T Hk K"),
    v=ac.Activation("B T (Hk G) V"),
    g=ac.Activation("B T (Hk G) K"),
    beta=ac.Activation("B T (Hk G)", default=1),
    s=ac.State("B (Hk G) K V"),
    scale=ac.param(default=ac.rsqrt("K")),
    l2norm=ac.flag(),
):
    """``[B, T, H, .]``; g ``[B, T, H, K]`` is a natural-log gate, beta ``[B, T, H]`` a rate.

    With the flag ``l2norm`` queries and keys are brought to length 1 first.
    """
    if l2norm:
        q, k = ac.l2norm(q, "K"), ac.l2norm(k, "K")
    s = ac.exp(g) * s
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K") * scale
