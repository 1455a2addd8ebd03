"""Ops whose outputs read the state across the axis of its updates, and random arguments."""

import torch
import torch.nn.functional as F

import attncc as ac

OJA = ac.ops.gated_oja


@ac.op(scan="T", out={"o": "B T H V", "p": "B T H V"})
def two_queries(
    q=ac.Activation("B T H K"), r=ac.Activation("B T H K"), k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"), a=ac.Activation("B T H"), z=ac.Activation("B T H V"),
    s=ac.State("B H V K"),
):  # fmt: skip
    """One decay a token that is no exponential, rows of length 1, a gate and a norm behind reads.

    The state lies as [V, K], and its updates contract V.
    """
    w = ac.l2norm(v, "V")
    s = ac.sigmoid(a) * s
    s = s + w * (k - ac.dot(s, w, "V"))
    o = ac.dot(s, ac.l2norm(q, "K"), "K")
    p = ac.dot(s, r, "K")
    return s, o * ac.rsqrt(ac.dot(o, o, "V") / ac.size("V") + 0.1) * ac.silu(z), o + p


def unit(*shape, dtype, device="cpu"):
    """Random rows of length 1."""
    return F.normalize(torch.randn(shape, device=device), dim=-1).to(dtype)


def oja(
    tokens, heads, group, key, value, *, batch=1, gate=1.0, dtype=torch.bfloat16, device="cpu"
):  # fmt: skip
    """Arguments of the gated Oja rule and an initial state; ``gate`` 0 leaves the gate out.

    A strong gate forgets everything at one token, and one element at another.
    """
    wide = heads * group
    q, k = (unit(batch, tokens, heads, key, dtype=dtype, device=device) for _ in range(2))
    args = {"q": q, "k": k, "v": unit(batch, tokens, wide, value, dtype=dtype, device=device)}
    args["beta"] = torch.rand(batch, tokens, wide, device=device)
    if gate:
        args["g"] = -gate * torch.rand(batch, tokens, wide, value, device=device)
    if gate > 2:
        args["g"][:, tokens // 2] = -torch.inf
        args["g"][:, tokens - 3, :, 3] = -torch.inf
    return args, torch.randn(batch, wide, key, value, device=device)


def queries(tokens, heads, key, value, *, dtype=torch.bfloat16, device="cpu"):
    """Arguments of :func:`two_queries`, and an initial state."""
    names = {"q": key, "r": key, "k": key, "v": value, "z": value}
    args = {
        n: unit(1, tokens, heads, size, dtype=dtype, device=device) for n, size in names.items()
    }
    args["a"] = torch.randn(1, tokens, heads, device=device).to(dtype) + 2
    return args, torch.randn(1, heads, value, key, device=device)
