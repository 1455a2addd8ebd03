"""Two small decoder layers on random weights, and their fp64 references written without attncc.

Each model is an embedding, one layer (with its residual) and an output head, so that greedy
decoding has something to choose.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

import attncc as ac

Weights = dict[str, Tensor]
GDN = ac.ops.gated_delta_rule


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: vocabulary, width, key heads, value heads (or query heads) a key head."""

    vocabulary: int
    width: int
    heads: int
    group: int
    dim: int
    kernel: int = 4


def weights(
    shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype, device: str
) -> Weights:
    """Random weights, scaled by their fan-in, rounded to the dtype they are stored in."""
    g = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=g)
        found[name] = (x if name == "embed" else x * shape[0] ** -0.5).to(device, dtype)
    return found


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [B, T, H, D] at absolute positions [B, T]; halves, base 10000."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float64)
    angle = positions.double()[..., None, None] * 10000.0 ** (-steps / half)
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = angle.cos().to(work), angle.sin().to(work)
    a, b = x.to(work).chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


# --- attention ------------------------------------------------------------------------------------


def attention_weights(s: Shape, seed: int, dtype: torch.dtype, device: str) -> Weights:
    q, kv = s.heads * s.group * s.dim, s.heads * s.dim
    shapes = {
        "embed": (s.vocabulary, s.width), "wq": (s.width, q), "wk": (s.width, kv),
        "wv": (s.width, kv), "wo": (q, s.width), "head": (s.width, s.vocabulary),
    }  # fmt: skip
    return weights(shapes, seed, dtype, device)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_layer(s: Shape, w: Weights, tokens: Tensor, start: Tensor, attend: Attend) -> Tensor:
    """Logits [B, T, vocabulary]; ``start`` [B] is how much of each history is held already."""
    b, t = tokens.shape
    x = w["embed"][tokens]
    positions = start[:, None] + torch.arange(t, device=tokens.device)
    q = rope((x @ w["wq"]).view(b, t, -1, s.dim), positions)
    k = rope((x @ w["wk"]).view(b, t, s.heads, s.dim), positions)
    o = attend(q, k, (x @ w["wv"]).view(b, t, s.heads, s.dim))
    return (x + o.reshape(b, t, -1) @ w["wo"]) @ w["head"]


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over the whole sequence in fp32 (or fp64), rounded once."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[2] // k.shape[2]
    k, v = (x.to(work).repeat_interleave(group, 2) for x in (k, v))
    score = torch.einsum("bthd,bshd->bhts", q.to(work), k) * q.shape[-1] ** -0.5
    hidden = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    p = score.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", p, v).to(q.dtype)


# --- gated delta rule -----------------------------------------------------------------------------


def delta_weights(s: Shape, seed: int, dtype: torch.dtype, device: str) -> Weights:
    k, v, hv = s.heads * s.dim, s.heads * s.group * s.dim, s.heads * s.group
    shapes = {
        "embed": (s.vocabulary, s.width), "wqkv": (s.width, 2 * k + v),
        "conv": (s.kernel, 2 * k + v), "a_proj": (s.width, hv), "b_proj": (s.width, hv),
        "wo": (v, s.width), "head": (s.width, s.vocabulary),
    }  # fmt: skip
    found = weights(shapes, seed, dtype, device)
    found["A_log"] = torch.linspace(0.0, 1.5, hv, device=device)
    found["dt_bias"] = torch.linspace(-3.0, 1.0, hv, device=device)
    return found


Recur = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def delta_layer(
    s: Shape, w: Weights, tokens: Tensor, tail: Tensor, recur: Recur
) -> tuple[Tensor, Tensor]:
    """Logits, and the last ``kernel - 1`` rows before the convolution for the next call."""
    b, t = tokens.shape
    x = w["embed"][tokens]
    rows = torch.cat([tail, x @ w["wqkv"]], 1)
    mixed = silu(sum(rows[:, i : i + t] * w["conv"][i] for i in range(s.kernel)))
    q, k, v = mixed.split([s.heads * s.dim, s.heads * s.dim, s.heads * s.group * s.dim], -1)
    q, k = (normalize(y.reshape(b, t, s.heads, s.dim), dim=-1) for y in (q, k))
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    g = -w["A_log"].to(work).exp() * softplus((x @ w["a_proj"]).to(work) + w["dt_bias"].to(work))
    beta = (x @ w["b_proj"]).to(work).sigmoid()
    o = recur(q, k, v.reshape(b, t, -1, s.dim), g, beta)
    return (x + o.reshape(b, t, -1) @ w["wo"]) @ w["head"], rows[:, -(s.kernel - 1) :]


def empty_tail(s: Shape, w: Weights, batch: int) -> Tensor:
    x = w["wqkv"]
    return x.new_zeros(batch, s.kernel - 1, x.shape[1])


def plain_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule token by token in fp32 (or fp64), rounded once."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = v.shape[2] // q.shape[2]
    q, k = (x.to(work).repeat_interleave(group, 2) for x in (q, k))
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    outs = []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].to(work).exp() * state
        seen = (state * k[:, t, ..., None]).sum(-2)
        error = beta[:, t, :, None].to(work) * (v[:, t].to(work) - seen)
        state = state + k[:, t, ..., None] * error[..., None, :]
        outs.append((state * q[:, t, ..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1).to(v.dtype)


# --- decoding -------------------------------------------------------------------------------------


class AttentionDecoder:
    """Prefill, then one token a call through a dense cache."""

    def __init__(self, s: Shape, w: Weights, batch: int, capacity: int, **options: Any) -> None:
        self.s, self.w, self.options = s, w, options
        x = w["embed"]
        self.cache = ac.DenseCache.allocate(
            ac.ops.attention, sizes={"B": batch, "Hkv": s.heads, "D": s.dim, "E": s.dim},
            capacity=capacity, dtype=x.dtype, device=x.device,
        )  # fmt: skip

    def __call__(self, tokens: Tensor) -> Tensor:
        run = ac.ops.attention if tokens.shape[1] > 1 else ac.ops.attention.decode
        start = self.cache.lengths.clone()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return run(q, k, v, cache=self.cache, **self.options)

        return attention_layer(self.s, self.w, tokens, start, attend)

    def whole(self, w: Weights, tokens: Tensor) -> Tensor:
        """The layer over a whole sequence in plain PyTorch, in the dtype of the weights."""
        start = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        return attention_layer(self.s, w, tokens, start, plain_attention)


class DeltaDecoder:
    """Prefill, then one token a call; carries the state and the convolution's tail."""

    def __init__(self, s: Shape, w: Weights, batch: int, capacity: int, **options: Any) -> None:
        self.s, self.w, self.options = s, w, options
        self.tail, self.state = empty_tail(s, w, batch), None

    def __call__(self, tokens: Tensor) -> Tensor:
        run = GDN if tokens.shape[1] > 1 else GDN.decode

        def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            self.state, o = run(q, k, v, g, beta, s=self.state, **self.options)
            return o

        logits, self.tail = delta_layer(self.s, self.w, tokens, self.tail, recur)
        return logits

    def whole(self, w: Weights, tokens: Tensor) -> Tensor:
        """The layer over a whole sequence in plain PyTorch, in the dtype of the weights."""
        tail = empty_tail(self.s, w, len(tokens))
        return delta_layer(self.s, w, tokens, tail, plain_recurrence)[0]


LAYERS = {
    "attention": (attention_weights, AttentionDecoder),
    "delta": (delta_weights, DeltaDecoder),
}
