"""Sliding-window attention (Beltagy et al., Longformer, 2020; Mistral 7B, 2023)."""

import attncc.dsl.api as ac


@ac.op(out="B T (Hkv G) E")
def sliding_window(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    w=ac.param(integer=True),
    scale=ac.param(default=ac.rsqrt("D")),
):
    """Causal attention to the last ``w`` keys, the query's own among them."""
    near = ac.causal & (ac.index("T") - ac.index("S") < w)
    score = ac.dot(q, k, "D") * scale
    return ac.dot(ac.softmax(score, "S", where=near), v, "S")
