"""The index of DeepSeek sparse attention alone: which rows each token will read.

DeepSeek-AI, DeepSeek-V3.2-Exp (2025).
"""

import attncc.dsl.api as ac


@ac.op(out="B T J")
def lightning_indexer(
    qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di")
):
    """Positions of each token's 2048 greatest scores, in order, -1 where there are fewer.

    ``w`` is as in :func:`attncc.dsl.library.sparse_mla.sparse_mla`.
    """
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")  # closes over heads before the top-k
    return ac.topk(index, "S", k=2048, where=ac.causal)
