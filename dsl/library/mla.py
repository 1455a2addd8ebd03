"""Multi-head latent attention: keys and values of every head are projections of one latent."""

import attncc.dsl.api as ac


@ac.op(out="B T H V")
def mla(
    q_nope=ac.Activation("B T H D"),
    q_rope=ac.Activation("B T H P"),
    c=ac.Cache("B S R"),
    r=ac.Cache("B S P"),
    wuk=ac.Param("H D R"),
    wuv=ac.Param("H V R"),
    scale=ac.param(),
):
    """Causal attention over a latent ``c`` and a RoPE key ``r`` (DeepSeek-V2, 2024, section 2.1).

    A head's key is ``(c wuk, r)``, its value ``c wuv``; ``wuk`` and ``wuv`` are the two parts of
    the joint up-projection ``[H, D + V, R]``. Whether a head's query goes to the latent or the
    latent to the heads' keys is chosen for each call. ``scale`` has no default: it is the model's,
    ``1 / sqrt(D + P)`` with whatever a longer context multiplies it by, not the latent's.
    """
    score = (ac.dot(q_nope, wuk, c, "D R") + ac.dot(q_rope, r, "P")) * scale
    return ac.dot(ac.softmax(score, "S", where=ac.causal), c, wuv, "S R")
