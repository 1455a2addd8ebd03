"""Layer normalisation (Ba, Kiros and Hinton, 2016)."""

import attncc.dsl.api as ac


@ac.op(out="B T H V")
def layer_norm(
    x=ac.Activation("B T H V"),
    w=ac.Param("V", default=1),
    bias=ac.Param("V", default=0),
    eps=ac.param(default=1e-5),
):
    """``(x - mean) * rsqrt(var + eps) * w + bias``, rounded once."""
    x = x - ac.sum(x, "V") / ac.size("V")
    return x * ac.rsqrt(ac.dot(x, x, "V") / ac.size("V") + eps) * w + bias
