"""Root mean square norm with a gate, the read-out of gated DeltaNet and Mamba-2."""

import attncc.dsl.api as ac


@ac.op(out="B T H V")
def gated_rms_norm(
    x=ac.Activation("B T H V"),
    z=ac.Activation("B T H V"),
    w=ac.Param("V", default=1),
    eps=ac.param(default=1e-6),
    gate_first=ac.flag(),
):
    """The norm, then the gate ``silu(z)``; the other order is Mamba-2's."""
    gate = ac.silu(z)
    x = x * gate if gate_first else x
    y = x * ac.rsqrt(ac.dot(x, x, "V") / ac.size("V") + eps) * w
    return y if gate_first else y * gate
