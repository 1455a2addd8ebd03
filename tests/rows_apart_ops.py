"""Scans in chunks whose outputs need whole rows of the read-outs."""

import torch

import attncc as ac


@ac.op(scan="T", out="B T (Hk G) V")
def normed_rule(
    q=ac.Activation("B T Hk K"), k=ac.Activation("B T Hk K"), v=ac.Activation("B T (Hk G) V"),
    g=ac.Activation("B T (Hk G)"), beta=ac.Activation("B T (Hk G)"),
    z=ac.Activation("B T (Hk G) V"), w=ac.Param("V"), s=ac.State("B (Hk G) K V"),
):  # fmt: skip
    """A delta rule whose read-out is normed along V and gated."""
    s = ac.exp(g) * s
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    r = ac.dot(s, q, "K") * ac.rsqrt("K")
    r = r * ac.rsqrt(ac.dot(r, r, "V") / ac.size("V") + 1e-6) * w
    return s, r * ac.silu(z)


@ac.op(scan="T", out={"plain": "B T (Hk G) V", "o": "B T (Hk G) V", "n": "B T (Hk G)"})
def several_reads(
    q=ac.Activation("B T Hk K"), p=ac.Activation("B T Hk K"), k=ac.Activation("B T Hk K"),
    v=ac.Activation("B T (Hk G) V"), w=ac.Param("V"), s=ac.State("B (Hk G) K V"),
    scale=ac.param(default=0.5),
):  # fmt: skip
    """One output that chunks hold, and two over both read-outs; one lacks the tile's axis."""
    s = 0.9 * s + k * v
    a, b = ac.dot(s, q, "K") * scale, ac.dot(s, p, "K")
    n = ac.dot(a * w - b, a * w - b, "V") / ac.size("K")
    return s, a + 1, a / (1 + n) - b, n


def arguments(b: int, t: int, hk: int, g: int, k: int, v: int, dtype: torch.dtype, seed: int = 0):
    """What :data:`normed_rule` takes, on the CPU, and a state."""
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made)

    h = hk * g
    args = {"q": draw(b, t, hk, k) / k**0.5, "k": draw(b, t, hk, k), "v": draw(b, t, h, v)}
    args["k"] = args["k"] / args["k"].norm(dim=-1, keepdim=True)
    args["z"] = draw(b, t, h, v)
    args = {n: x.to(dtype) for n, x in args.items()}
    args |= {"g": -0.2 * draw(b, t, h).abs(), "beta": torch.sigmoid(draw(b, t, h))}
    return {**args, "w": 1 + 0.1 * draw(v), "s": draw(b, h, k, v)}
