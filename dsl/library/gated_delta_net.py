"""One token of a gated DeltaNet layer between its convolutions and its output projection."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T (Hk G) V")
def gated_delta_net(
    q=ac.Activation("B T Hk K"),
    k=ac.Activation("B T Hk K"),
    v=ac.Activation("B T (Hk G) V"),
    a=ac.Activation("B T (Hk G)"),
    b=ac.Activation("B T (Hk G)"),
    z=ac.Activation("B T (Hk G) V"),
    a_log=ac.Param("(Hk G)"),
    dt_bias=ac.Param("(Hk G)"),
    w=ac.Param("V", default=1),
    eps=ac.param(default=1e-6),
    s=ac.State("B (Hk G) K V"),
):
    """Norms of q and k, gates, recurrence and gated norm: one kernel for a decode step.

    Raw a and b are parametrised here: the decay is ``exp(-exp(a_log) softplus(a + dt_bias))``, the
    write rate ``sigmoid(b)``. A step holds all of V, so the read-out's norm is a sum inside it.
    """
    q, k = ac.l2norm(q, "K"), ac.l2norm(k, "K")
    s = ac.exp(-ac.exp(a_log) * ac.softplus(a + dt_bias)) * s
    s = s + k * (ac.sigmoid(b) * (v - ac.dot(s, k, "K")))
    r = ac.dot(s, q, "K") * ac.rsqrt("K")
    r = r * ac.rsqrt(ac.dot(r, r, "V") / ac.size("V") + eps) * w
    return s, r * ac.silu(z)
