"""Gated delta product (Siems et al., DeltaProduct, 2025): N delta rules a token, one decay."""

import attncc.dsl.api as ac


@ac.op(scan="T", out="B T (H Gq Gv) V")
def gated_delta_product(
    q=ac.Activation("B T (H Gq) K"),
    k=ac.Activation("B (T N) (H Gq) K"),
    v=ac.Activation("B (T N) (H Gv) V"),
    g=ac.Activation("B T (H Gq Gv)", default=0),
    beta=ac.Activation("B (T N) (H Gq Gv)", default=1),
    s=ac.State("B (H Gq Gv) K V"),
    scale=ac.param(default=ac.rsqrt("K")),
    l2norm=ac.flag(),
    alpha=ac.Activation("B T (H Gq Gv)", default=1),
):
    """N updates a token: rows ``t * N .. t * N + N - 1`` of k, v, beta ``[B, T * N, ...]`` are t's.

    The decay (``g`` ``[B, T, H]`` is a natural-log gate, ``alpha`` a linear one, whose logarithm
    nothing takes) acts once, before the token's updates; each update predicts with its key, and
    writes ``beta`` (in [0, 2]) of the error; the query ``[B, T, H, K]`` reads after the last.
    Either side may have more heads, so one of Gq and Gv is 1; gates, state and output have the
    larger number. N = 1 is the gated delta rule.
    """
    if l2norm:
        q, k = ac.l2norm(q, "K"), ac.l2norm(k, "K")
    s = alpha * ac.exp(g) * s
    for kj, vj, bj in ac.unroll("N", k, v, beta):
        s = s + kj * (bj * (vj - ac.dot(s, kj, "K")))
    return s, ac.dot(s, q, "K") * scale
