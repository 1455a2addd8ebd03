"""Attention with soft-capped logits (Gemma 2, 2024)."""

import attncc.dsl.api as ac


@ac.op(out="B T (Hkv G) E")
def soft_cap(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    cap=ac.param(default=50.0),
    scale=ac.param(default=ac.rsqrt("D")),
):
    """Causal attention whose scaled scores go through ``cap * tanh(score / cap)``."""
    score = ac.tanh(ac.dot(q, k, "D") * scale / cap) * cap
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")
