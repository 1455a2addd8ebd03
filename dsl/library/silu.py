"""Sigmoid-weighted linear unit (Elfwing et al., 2018)."""

import attncc.dsl.api as ac


@ac.op(out="B T H V")
def silu(x=ac.Activation("B T H V")):
    """``x * sigmoid(x)``."""
    return ac.silu(x)
