"""Vectors of length 1."""

import attncc.dsl.api as ac


@ac.op(out="B T H V")
def l2_norm(x=ac.Activation("B T H V"), eps=ac.param(default=1e-6)):
    """``x * rsqrt(sum x^2 + eps)``; a zero vector stays zero."""
    return x * ac.rsqrt(ac.dot(x, x, "V") + eps)
