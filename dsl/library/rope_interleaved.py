"""Rotary position embedding of neighbours (Su et al., RoFormer, 2021), from tables."""

import attncc.dsl.api as ac


@ac.op(out="B T H (D R)")
def rope_interleaved(
    x=ac.Activation("B T H (D R)"),
    position=ac.Activation("B T"),
    cos=ac.Param("L D"),
    sin=ac.Param("L D"),
):
    """Rotates neighbours, elements 2d and 2d + 1, as in the paper."""
    (a, _), (b, _) = ac.unroll("R", x, x, exactly=2)
    c, s = ac.take(cos, "L", position), ac.take(sin, "L", position)
    return ac.where(ac.eq(ac.index("R"), 0), a * c - b * s, b * c + a * s)
