"""RWKV-7 (Peng et al., RWKV-7 "Goose", 2025): a generalised delta rule."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T H V")
def rwkv7(
    r=ac.Activation("B T H K"),
    w=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    a=ac.Activation("B T H K"),
    b=ac.Activation("B T H K"),
    s=ac.State("B H K V"),
    scale=ac.param(default=1),
):
    """``[B, T, H, .]``; ``w`` is the natural logarithm of the decay, ``-exp(-0.5) * sigmoid(.)``.

    ``a`` is the removal key negated and of length 1, ``b`` the key put in its place (the paper's
    ``-kappa`` and ``kappa * rate``); what is removed is read before the token's decay.
    """
    s = ac.exp(w) * s + b * ac.dot(s, a, "K") + k * v
    return s, ac.dot(s, r, "K") * scale
