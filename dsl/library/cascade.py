"""Cascade attention (FlashInfer, Ye et al., 2024): a prefix shared by all, then own keys."""

import attncc.dsl.api as ac


@ac.op(out="B T (Hkv G) E")
def cascade(
    q=ac.Activation("B T (Hkv G) D"),
    pk=ac.Memory("P Hkv D"),
    pv=ac.Memory("P Hkv E"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    scale=ac.param(default=ac.rsqrt("D")),
):
    """The prefix ``[P, Hkv, .]`` is held once and seen whole, own keys ``[B, S, Hkv, .]`` causally.

    One softmax over both: each is a pass of its own, and the two partials are merged.
    """
    scores = {axis: ac.dot(q, x, "D") * scale for axis, x in (("P", pk), ("S", k))}
    p = ac.softmax(scores, where={"S": ac.causal})
    return ac.dot(p, {"P": pv, "S": v})
