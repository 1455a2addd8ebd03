"""DeepSeek sparse attention: a light index picks rows, latent attention reads only those.

DeepSeek-AI, DeepSeek-V3.2-Exp (2025).
"""

import attncc.dsl.api as ac


@ac.op(out="B T H R")
def sparse_mla(
    qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di"),
    qc=ac.Activation("B T H R"), qr=ac.Activation("B T H P"), c=ac.Cache("B S R"),
    r=ac.Cache("B S P"), scale=ac.param(),
):  # fmt: skip
    """Absorbed queries against the latent rows that the index picks; keys of the index all stay.

    ``w`` is the heads' projection times n_heads^-0.5, and, where ``qi`` is quantised, its scales
    and the index's own softmax scale.
    """
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")  # closes over heads before the top-k
    J = ac.topk(index, "S", k=2048, where=ac.causal)
    score = (ac.dot(qc, c[J], "R") + ac.dot(qr, r[J], "P")) * scale
    return ac.dot(ac.softmax(score, J), c[J], J)
