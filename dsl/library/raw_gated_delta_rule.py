"""The gated delta rule on a layer's raw activations."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T (Hk G) V")
def raw_gated_delta_rule(
    q=ac.Activation("B T Hk K"),
    k=ac.Activation("B T Hk K"),
    v=ac.Activation("B T (Hk G) V"),
    a=ac.Activation("B T (Hk G)"),
    b=ac.Activation("B T (Hk G)"),
    a_log=ac.Param("(Hk G)"),
    dt_bias=ac.Param("(Hk G)"),
    s=ac.State("B (Hk G) K V"),
):
    """Norms of q and k and the gates are computed where they are needed, not stored.

    The decay is ``exp(-exp(a_log) softplus(a + dt_bias))``, the write rate ``sigmoid(b)``.
    """
    q, k = ac.l2norm(q, "K"), ac.l2norm(k, "K")
    s = ac.exp(-ac.exp(a_log) * ac.softplus(a + dt_bias)) * s
    s = s + k * (ac.sigmoid(b) * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K") * ac.rsqrt("K")
