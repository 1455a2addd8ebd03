"""Comba (Hu et al., Comba: Closed-loop Control of Bilinear RNNs, 2025)."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T (Hk G) V")
def comba(
    q=ac.Activation("B T Hk K"),
    k=ac.Activation("B T Hk K"),
    v=ac.Activation("B T (Hk G) V"),
    p=ac.Activation("B T Hk K"),
    g=ac.Activation("B T (Hk G)", default=0),
    beta=ac.Activation("B T (Hk G)", default=1),
    d=ac.Param("Hk", default=0),
    s=ac.State("B (Hk G) K V"),
    scale=ac.param(default=ac.rsqrt("K")),
):
    """``[B, T, H, .]``; ``g`` ``[B, T, H]`` is a natural-log gate, ``beta`` ``[B, T, H]`` a rate.

    The prediction is made with the feedback key ``p`` (the paper's key times a scalar a head) and
    before the token's decay; the output is read with ``q - d * k``, ``d`` ``[Hk]``.
    """
    e = beta * (v - ac.dot(s, p, "K"))
    s = ac.exp(g) * s + k * e
    return s, ac.dot(s, q - d * k, "K") * scale
