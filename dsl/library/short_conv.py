"""Causal short convolution of each channel, as before gated DeltaNet, Mamba-2 or KDA."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T D")
def short_conv(
    x=ac.Activation("B T D"),
    w=ac.Param("D W"),
    bias=ac.Param("D", default=0),
    silu=ac.flag(),
    win=ac.Window("B W D"),
):
    """Weights as a depthwise ``conv1d`` has them; the last of the W belongs to the token itself."""
    win = ac.push(win, x, "W")
    y = ac.dot(win, w, "W") + bias
    return win, ac.silu(y) if silu else y
