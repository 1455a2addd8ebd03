"""Root mean square norm (Zhang and Sennrich, 2019)."""

import attncc.dsl.api as ac


@ac.op(out="B T H V")
def rms_norm(x=ac.Activation("B T H V"), w=ac.Param("V", default=1), eps=ac.param(default=1e-6)):
    """``x * rsqrt(mean x^2 + eps) * w``, rounded once."""
    return x * ac.rsqrt(ac.dot(x, x, "V") / ac.size("V") + eps) * w
