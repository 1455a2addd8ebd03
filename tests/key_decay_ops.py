"""Ops whose decay has a value for each key element, and random arguments of theirs."""

import torch
import torch.nn.functional as F

import attncc as ac


@ac.op(scan="T", out="B T H V")
def two_vectors(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    b=ac.Activation("B T H K"), w=ac.Activation("B T H K"), gate=ac.Activation("B T H"),
    s=ac.State("B H V K"),
):  # fmt: skip
    """A decay that is no exponential, two vectors a row, a gated output, the state as [V, K]."""
    s = ac.sigmoid(w) * s
    s = s + k * (v - ac.dot(s, b, "K"))
    return s, ac.dot(s, q, "K") * ac.sigmoid(gate)


@ac.op(scan="T", out="B T (Hk G) V")
def normalised(
    q=ac.Activation("B T Hk K"), k=ac.Activation("B T Hk K"), v=ac.Activation("B T (Hk G) V"),
    f=ac.Activation("B T (Hk G) K"), beta=ac.Activation("B T (Hk G)"),
    bias=ac.Param("(Hk G) K"), s=ac.State("B (Hk G) K V"),
):  # fmt: skip
    """Vectors of length 1, shared by groups of heads, and gates that are computed."""
    q, k = ac.l2norm(q, "K"), ac.l2norm(k, "K")
    s = ac.exp(-ac.softplus(f + bias)) * s
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def ahead(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H K"), s=ac.State("B H K V"),
):  # fmt: skip
    """A read-out ahead of the decay, as in RWKV-6."""
    read = ac.dot(s, q, "K")
    s = ac.exp(g) * s + k * v
    return s, read


@ac.op(scan="T", out="B T H V")
def two_updates(
    q=ac.Activation("B T H K"), k=ac.Activation("B (T N) H K"), v=ac.Activation("B (T N) H V"),
    g=ac.Activation("B T H K"), s=ac.State("B H K V"),
):  # fmt: skip
    """Updates of one token one after the other, behind a decay per element."""
    s = ac.exp(g) * s
    for kj, vj in ac.unroll("N", k, v):
        s = s + kj * (vj - ac.dot(s, kj, "K"))
    return s, ac.dot(s, q, "K")


OPS = {"kda": ac.ops.kda, "gla": ac.ops.gla, "two_vectors": two_vectors}
ROWS = {"rwkv7": ac.ops.rwkv7, "two_updates": two_updates, "ahead": ahead}
"""Those with several rows a token, or with reads ahead of the decay."""
SYSTEMS = OPS | ROWS | {"normalised": normalised}
"""Those whose systems have a Gluon form, though the state pass may have none."""


def arguments(name, batch, tokens, heads, key, value, dtype=torch.bfloat16, device="cpu"):
    """Random arguments of an op, and an initial state."""

    def unit(*shape):
        return F.normalize(torch.randn(shape, device=device), dim=-1).to(dtype)

    wide = heads * 2 if name == "normalised" else heads
    q, k = unit(batch, tokens, heads, key), unit(batch, tokens, heads, key)
    v = torch.randn(batch, tokens, wide, value, device=device).to(dtype)
    open_gate = torch.randn(batch, tokens, wide, key, device=device) + 3
    beta = torch.rand(batch, tokens, wide, device=device)
    if name == "two_updates":
        k, v = (torch.stack([x, x.flip(1)], 2).flatten(1, 2) for x in (k, v))
    if name == "rwkv7":  # r, w, k, v, a, b
        a, rate = unit(batch, tokens, heads, key), -1.9 * beta[..., None]
        others = (F.logsigmoid(open_gate), k, v, a, (rate * a).to(dtype))
        return (q, *others), torch.randn(batch, wide, key, value, device=device)
    more = {
        "kda": lambda: (F.logsigmoid(open_gate), beta),
        "gla": lambda: (F.logsigmoid(open_gate),),
        "ahead": lambda: (F.logsigmoid(open_gate),),
        "two_updates": lambda: (F.logsigmoid(open_gate),),
        "two_vectors": lambda: (unit(batch, tokens, heads, key), open_gate, beta),
        "normalised": lambda: (-open_gate, beta, torch.randn(wide, key, device=device)),
    }[name]()
    sides = (value, key) if name == "two_vectors" else (key, value)
    return (q, k, v, *more), torch.randn(batch, wide, *sides, device=device)


def nearly_one(args, scale=0.01):
    """Arguments of ``kda`` with keys that are nearly the same, a beta of 2 and weak gates."""
    q, k, v, g, beta = args
    near = torch.randn_like(k[:1, :1].float()) + 0.25 * torch.randn_like(k.float())
    return q, F.normalize(near, dim=-1).to(k.dtype), v, scale * g, torch.full_like(beta, 2.0)


def forgetting(args, at=3):
    """Arguments with strong gates, which are number ``at``, and some of minus infinity."""
    args = list(args)
    g = args[at] * 20
    g[:, g.shape[1] // 2] = -torch.inf
    g[:, 1, :, ::3] = -torch.inf
    args[at] = g
    return tuple(args)
