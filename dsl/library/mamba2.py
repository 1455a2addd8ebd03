"""Mamba-2 (Dao and Gu, Transformers are SSMs, 2024): state space duality, one decay a head."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T (Hk G) V")
def mamba2(
    x=ac.Activation("B T (Hk G) V"),
    dt=ac.Activation("B T (Hk G)"),
    a_log=ac.Param("(Hk G)"),
    b=ac.Activation("B T Hk K"),
    c=ac.Activation("B T Hk K"),
    d=ac.Param("(Hk G)", default=0),
    dt_bias=ac.Param("(Hk G)", default=0),
    s=ac.State("B (Hk G) V K"),
):
    """Values x ``[B, T, heads, V]``; b and c ``[B, T, groups, K]`` are shared by groups of heads.

    The step is ``softplus(dt + dt_bias)``, the decay ``exp(-exp(a_log) * step)``. V is the paper's
    P (head dim), K its N (state dim); the state is ``[B, heads, V, K]`` as there.
    """
    step = ac.softplus(dt + dt_bias)
    s = ac.exp(-ac.exp(a_log) * step) * s + b * (step * x)
    return s, ac.dot(s, c, "K") + d * x
