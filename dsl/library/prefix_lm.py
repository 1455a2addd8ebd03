"""Prefix language model (Raffel et al., T5, 2019): a prefix sees itself both ways."""

import attncc.dsl.api as ac


@ac.op(out="B T (Hkv G) E")
def prefix_lm(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    prefix=ac.Activation("B"),
    scale=ac.param(default=ac.rsqrt("D")),
):
    """Every query sees the first ``prefix`` ``[B]`` keys and those up to its own."""
    seen = ac.causal | (ac.index("S") < prefix)
    score = ac.dot(q, k, "D") * scale
    return ac.dot(ac.softmax(score, "S", where=seen), v, "S")
