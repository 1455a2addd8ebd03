"""HGRN (Qin et al., Hierarchically Gated Recurrent Network, 2023): an element-wise recurrence."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T D")
def hgrn(
    x=ac.Activation("B T D"),
    g=ac.Activation("B T D"),
    s=ac.State("B D"),
):
    """``[B, T, D]``: ``g`` is a natural-log forget gate, ``x`` what is added.

    In the paper that is ``(1 - exp(g)) * candidate``; the state is the output.
    """
    s = ac.exp(g) * s + x
    return s, s
