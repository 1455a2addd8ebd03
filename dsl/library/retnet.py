"""Retention (Sun et al., Retentive Network, 2023): one constant decay a head."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T H V")
def retnet(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    gamma=ac.Param("H"),
    s=ac.State("B H K V"),
    scale=ac.param(default=ac.rsqrt("K")),
):
    """``[B, T, H, .]``; ``gamma`` ``[H]`` is the decay itself, in the paper ``1 - 2 ** (-5 - h)``.

    Rotation of q and k by position, and the norm of the output, are the layer's.
    """
    s = gamma * s + k * v
    return s, ac.dot(s, q, "K") * scale
