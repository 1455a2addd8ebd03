"""Gated delta rule (Yang et al., Gated Delta Networks, 2024)."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T (Hk G) V")
def gated_delta_rule(
    q=ac.Activation("B T Hk K"),
    k=ac.Activation("B T Hk K"),
    v=ac.Activation("B T (Hk G) V"),
    g=ac.Activation("B T (Hk G)", default=0),
    beta=ac.Activation("B T (Hk G)", default=1),
    s=ac.State("B (Hk G) K V"),
    scale=ac.param(default=ac.rsqrt("K")),
    l2norm=ac.flag(),
):
    """One token: decay (g is a natural-log gate), predict, write the error, read.

    With the flag ``l2norm`` queries and keys are brought to length 1 first. Rates (beta) are used
    as they are, up to 2.
    """
    if l2norm:
        q, k = ac.l2norm(q, "K"), ac.l2norm(k, "K")
    s = ac.exp(g) * s
    e = beta * (v - ac.dot(s, k, "K"))
    s = s + k * e
    return s, ac.dot(s, q, "K") * scale
