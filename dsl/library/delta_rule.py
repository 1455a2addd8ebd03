"""Delta rule (Schlag et al., 2021; DeltaNet, Yang et al., 2024): write the prediction's error."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T H V")
def delta_rule(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    beta=ac.Activation("B T H", default=1),
    s=ac.State("B H K V"),
    scale=ac.param(default=ac.rsqrt("K")),
    l2norm=ac.flag(),
):
    """``[B, T, H, .]``; ``beta`` ``[B, T, H]`` is a rate in [0, 2], used as it is.

    With the flag ``l2norm`` queries and keys are brought to length 1 first.
    """
    if l2norm:
        q, k = ac.l2norm(q, "K"), ac.l2norm(k, "K")
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K") * scale
