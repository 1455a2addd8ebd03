"""One token of a recurrence in plain PyTorch, to be compiled; the state is fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.case import Inputs
from benchmarks.peers.library import Named, normalised, rms


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """One token's [B, 1, H, D] as fp32 [B, heads, D]."""
    return x[:, 0].float().repeat_interleave(heads // x.shape[2], 1)


def _read(s: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (s * q[..., None]).sum(-2)


def _out(o: torch.Tensor, s: torch.Tensor, like: torch.Tensor) -> Named:
    return {"o": o[:, None].to(like.dtype), "s": s}


def linear_step(x: Inputs) -> Named:
    """Linear attention, or retention where there is a ``gamma``."""
    s, v = x["s"], x["v"]
    q, k, w = (_heads(x[n], s.shape[1]) for n in ("q", "k", "v"))
    kept = x["gamma"][:, None, None] * s if "gamma" in x else s
    s = kept + k[..., None] * w[:, :, None]
    return _out(_read(s, q) * q.shape[-1] ** -0.5, s, v)


def mamba2_step(x: Inputs) -> Named:
    """Mamba-2's, whose state is [V, K]."""
    s = x["s"]
    step = F.softplus(x["dt"][:, 0].float() + x["dt_bias"])
    b, c, v = (_heads(x[n], s.shape[1]) for n in ("b", "c", "x"))
    decay = (-x["a_log"].exp() * step).exp()
    s = decay[..., None, None] * s + (step[..., None] * v)[..., None] * b[:, :, None]
    return _out((s * c[:, :, None]).sum(-1) + x["d"][:, None] * v, s, x["x"])


def hgrn_step(x: Inputs) -> Named:
    """Element by element."""
    s = x["g"][:, 0].float().exp() * x["s"] + x["x"][:, 0]
    return _out(s, s, x["x"])


def gla_step(x: Inputs) -> Named:
    """Gated linear attention: a decay for each key element."""
    s = x["s"]
    q, k, v, g = (_heads(x[n], s.shape[1]) for n in ("q", "k", "v", "g"))
    s = g.exp()[..., None] * s + k[..., None] * v[:, :, None]
    return _out(_read(s, q) * q.shape[-1] ** -0.5, s, x["v"])


def delta_step(x: Inputs) -> Named:
    """Delta rules: N of them a token, behind a decay for each head or key element, if any."""
    s = x["s"]
    q = _heads(x["q"], s.shape[1])
    if "g" in x:
        g = x["g"][:, 0].exp()
        s = (g[..., None, None] if g.dim() == 2 else g[..., None]) * s
    for n in range(x["k"].shape[1]):
        k, v, beta = (x[name][:, n].float() for name in ("k", "v", "beta"))
        e = beta[..., None] * (v - _read(s, k))
        s = s + k[..., None] * e[:, :, None]
    return _out(_read(s, q) * q.shape[-1] ** -0.5, s, x["v"])


def comba_step(x: Inputs) -> Named:
    """The prediction before the decay, with a key of its own."""
    s = x["s"]
    q, k, v, p = (_heads(x[n], s.shape[1]) for n in ("q", "k", "v", "p"))
    e = x["beta"][:, 0].float()[..., None] * (v - _read(s, p))
    s = x["g"][:, 0].exp()[..., None, None] * s + k[..., None] * e[:, :, None]
    return _out(_read(s, q - x["d"][:, None] * k) * q.shape[-1] ** -0.5, s, x["v"])


def oja_step(x: Inputs) -> Named:
    """Keys learnt from values, a decay for each value element."""
    s = x["s"]
    q, k, v, g = (_heads(x[n], s.shape[1]) for n in ("q", "k", "v", "g"))
    s = g.exp()[:, :, None] * s
    e = x["beta"][:, 0].float()[..., None] * (k - (s * v[:, :, None]).sum(-1))
    s = s + e[..., None] * v[:, :, None]
    return _out(_read(s, q) * q.shape[-1] ** -0.5, s, x["v"])


def rwkv7_step(x: Inputs) -> Named:
    """RWKV-7's."""
    s = x["s"]
    r, w, k, v, a, b = (_heads(x[n], s.shape[1]) for n in ("r", "w", "k", "v", "a", "b"))
    removed = _read(s, a)[:, :, None]
    s = w.exp()[..., None] * s + b[..., None] * removed + k[..., None] * v[:, :, None]
    return _out(_read(s, r), s, x["v"])


def raw_step(x: Inputs) -> Named:
    """A gated delta rule with its norms and gates; with ``z`` also the gated norm behind it."""
    s = x["s"]
    q, k = (normalised(_heads(x[n], s.shape[1])) for n in ("q", "k"))
    v = _heads(x["v"], s.shape[1])
    g = -x["a_log"].exp() * F.softplus(x["a"][:, 0].float() + x["dt_bias"])
    s = g.exp()[..., None, None] * s
    e = x["b"][:, 0].float().sigmoid()[..., None] * (v - _read(s, k))
    s = s + k[..., None] * e[:, :, None]
    o = _read(s, q) * q.shape[-1] ** -0.5
    if "z" in x:
        o = rms(o) * x["w"] * F.silu(x["z"][:, 0].float())
    return _out(o, s, x["v"])
