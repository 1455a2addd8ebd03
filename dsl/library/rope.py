"""Rotary position embedding (Su et al., RoFormer, 2021), from tables of cosines and sines."""

import attncc.dsl.api as ac


@ac.op(out="B T H (R D)")
def rope(
    x=ac.Activation("B T H (R D)"),
    position=ac.Activation("B T"),
    cos=ac.Param("L D"),
    sin=ac.Param("L D"),
):
    """Rotates element d of the first half with element d of the second, as in Llama."""
    (a, _), (b, _) = ac.unroll("R", x, x, exactly=2)
    c, s = ac.take(cos, "L", position), ac.take(sin, "L", position)
    return ac.where(ac.eq(ac.index("R"), 0), a * c - b * s, b * c + a * s)
