"""Attention inside documents of one sequence (intra-document masking; Llama 3, 2024)."""

import attncc.dsl.api as ac


@ac.op(out="B T (Hkv G) E")
def document_attention(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    document=ac.Cache("B S"),
    scale=ac.param(default=ac.rsqrt("D")),
):
    """Causal attention to keys of the query's own document; ``document`` ``[B, S]`` holds ids.

    Ids are whole numbers (or fp32) of any order; equal ids far apart are one document.
    """
    same = ac.eq(ac.at_query(document, "S"), document)
    score = ac.dot(q, k, "D") * scale
    return ac.dot(ac.softmax(score, "S", where=ac.causal & same), v, "S")
