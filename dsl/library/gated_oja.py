"""Gated Oja rule (Oja, 1982, with a decay for each value element): keys are learnt from values."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T (Hk G) V")
def gated_oja(
    q=ac.Activation("B T Hk K"),
    k=ac.Activation("B T Hk K"),
    v=ac.Activation("B T (Hk G) V"),
    g=ac.Activation("B T (Hk G) V", default=0),
    beta=ac.Activation("B T (Hk G)", default=1),
    s=ac.State("B (Hk G) K V"),
    scale=ac.param(default=ac.rsqrt("K")),
    l2norm=ac.flag(),
):
    """``[B, T, H, .]``; g ``[B, T, H, V]`` is a natural-log gate, beta ``[B, T, H]`` a rate.

    The delta rule with keys and values in each other's place: the state predicts the key from the
    value, and the error is written along the value; the query reads along K as everywhere.
    """
    if l2norm:
        q, k = ac.l2norm(q, "K"), ac.l2norm(k, "K")
    s = ac.exp(g) * s
    s = s + v * (beta * (k - ac.dot(s, v, "V")))
    return s, ac.dot(s, q, "K") * scale
