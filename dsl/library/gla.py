"""Gated linear attention (Yang et al., 2023): a decay for each element of the key."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T H V")
def gla(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    g=ac.Activation("B T H K", default=0),
    s=ac.State("B H K V"),
    scale=ac.param(default=ac.rsqrt("K")),
):
    """``[B, T, H, .]``; ``g`` ``[B, T, H, K]`` is a natural-log gate, at most 0.

    One gate a head ("simple GLA") is ``gla.with_patterns(g="B T H")``.
    """
    s = ac.exp(g) * s + k * v
    return s, ac.dot(s, q, "K") * scale
