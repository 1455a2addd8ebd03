"""Linear attention (Katharopoulos et al., Transformers are RNNs, 2020), without its normaliser."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T H V")
def linear_attention(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    s=ac.State("B H K V"),
    scale=ac.param(default=ac.rsqrt("K")),
    l2norm=ac.flag(),
):
    """Feature maps of q and k ``[B, T, H, K]`` and values ``[B, T, H, V]``: write, read.

    With the flag ``l2norm`` queries and keys are brought to length 1 first.
    """
    if l2norm:
        q, k = ac.l2norm(q, "K"), ac.l2norm(k, "K")
    s = s + k * v
    return s, ac.dot(s, q, "K") * scale
