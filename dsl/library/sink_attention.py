"""Attention with a learned sink (Xiao et al., StreamingLLM, 2023; gpt-oss, 2025)."""

import attncc.dsl.api as ac


@ac.op(out="B T (Hkv G) E")
def sink_attention(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    sink=ac.Param("(Hkv G)"),
    scale=ac.param(default=ac.rsqrt("D")),
):
    """Causal attention; ``sink`` ``[Hq]`` is one more logit a head, with a value of zeros."""
    score = ac.dot(q, k, "D") * scale
    return ac.dot(ac.softmax(score, "S", where=ac.causal, sink=sink), v, "S")
