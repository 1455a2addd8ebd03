"""The library's layers in plain PyTorch, on the same weights: in fp64 the oracle of the modules.

In fp32 or 16 bits each stage is computed in fp32 and rounded once, as an eager model would.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus

import attncc as ac
from attncc.dsl.library.layers.dsa import dsa

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: width of the model, key heads, value (or query) heads a key head, dims."""

    width: int
    heads: int
    group: int
    dim: int
    kernel: int = 4


def working(x: Tensor) -> torch.dtype:
    """What a stage computes in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rope(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding of [B, T, H, D] at absolute positions [B, T]; halves."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float64)
    angle = positions.double()[..., None, None] * base ** (-steps / half)
    cos, sin = angle.cos().to(working(x)), angle.sin().to(working(x))
    a, b = x.to(working(x)).chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def rope_neighbours(x: Tensor, positions: Tensor) -> Tensor:
    """The same of elements 2d and 2d + 1."""
    halves = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    return torch.stack(rope(halves, positions).chunk(2, -1), -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over the whole sequence, rounded once."""
    work, group = working(q), q.shape[2] // k.shape[2]
    k, v = (x.to(work).repeat_interleave(group, 2) for x in (k, v))
    score = torch.einsum("bthd,bshd->bhts", q.to(work), k) * q.shape[-1] ** -0.5
    hidden = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    p = score.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", p, v).to(q.dtype)


def attention(w: Weights, x: Tensor, s: Shape) -> Tensor:
    """[B, T, M] from h_t to W_O."""
    b, t, _ = x.shape
    at = torch.arange(t, device=x.device).expand(b, t)
    q = rope((x @ w["q_proj_weight"].T).view(b, t, -1, s.dim), at)
    k = rope((x @ w["k_proj_weight"].T).view(b, t, -1, s.dim), at)
    o = attend(q, k, (x @ w["v_proj_weight"].T).view(b, t, -1, s.dim))
    return o.flatten(2) @ w["o_proj_weight"].T


def convolved(x: Tensor, w: Tensor) -> Tensor:
    """SiLU of the causal convolution of [B, T, D]."""
    work = working(x)
    rows = pad(x.to(work).transpose(1, 2), (w.shape[1] - 1, 0))
    return silu(conv1d(rows, w.to(work)[:, None], groups=len(w)).transpose(1, 2)).to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """x * rsqrt(sum x^2 + 1e-6)."""
    y = x.to(working(x))
    return (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule token by token, rounded once."""
    work, group = working(q), v.shape[2] // q.shape[2]
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


def gated_norm(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """The norm over the last axis, then the gate."""
    work = working(x)
    y = x.to(work)
    y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.to(work)
    return (y * silu(z.to(work))).to(x.dtype)


def delta(w: Weights, x: Tensor, s: Shape) -> Tensor:
    """[B, T, M] from h_t to W_O."""
    b, t, _ = x.shape
    work = working(x)
    q, k, v = (
        convolved(x @ w[f"{n}_proj_weight"].T, w[f"{n}_conv_weight"]).view(b, t, -1, s.dim)
        for n in "qkv"
    )
    a, rate = ((x @ w[f"{n}_proj_weight"].T).to(work) for n in "ab")
    g = -w["A_log"].to(work).exp() * softplus(a + w["dt_bias"].to(work))
    r = recur(unit(q), unit(k), v, g, rate.sigmoid())
    z = (x @ w["z_proj_weight"].T).view(b, t, -1, s.dim)
    return gated_norm(r, z, w["norm_weight"]).flatten(2) @ w["o_proj_weight"].T


def rms(x: Tensor, w: Tensor) -> Tensor:
    """Root mean square norm, rounded once."""
    y = x.to(working(x))
    return (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.to(y.dtype)).to(x.dtype)


def quantised(x: Tensor, *, power: bool) -> tuple[Tensor, Tensor]:
    """e4m3 numbers of the last axis and its scale: the largest magnitude over 448."""
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    if power:
        scale = torch.exp2(scale.double().log2().ceil()).float()
    return (x.float() / scale).to(torch.float8_e4m3fn).to(x.dtype), scale


def partly(x: Tensor, at: Tensor, turned: int) -> Tensor:
    """RoPE on the first elements of each head."""
    return torch.cat([rope(x[..., :turned], at), x[..., turned:]], -1)


def sparse(w: Weights, x: Tensor, s: Shape) -> Tensor:
    """The indexer, exact top-k, latent attention over every row with the others masked out."""
    b, t, _ = x.shape
    work, heads = working(x), s.heads * s.group
    at = torch.arange(t, device=x.device).expand(b, t)

    def linear(name: str, y: Tensor, *shape: int) -> Tensor:
        return (y @ w[f"{name}_weight"].T).view(b, t, *shape)

    latent = rms(linear("q_a_proj", x, -1), w["q_a_norm_weight"])
    qi = partly(linear("index_q_proj", latent, s.heads, -1), at, s.dim // 2)
    qi, q_scale = quantised(qi, power=False)
    ki = linear("index_k_proj", x, -1).to(work)
    ki = torch.nn.functional.layer_norm(
        ki, ki.shape[-1:], w["index_k_norm_weight"].to(work), w["index_k_norm_bias"].to(work), 1e-6
    ).to(x.dtype)
    ki, k_scale = quantised(partly(ki[:, :, None], at, s.dim // 2)[:, :, 0], power=True)
    rate = (s.heads * qi.shape[-1]) ** -0.5
    weights = (linear("weights_proj", x, -1) * rate * q_scale.squeeze(-1)).to(x.dtype).to(work)
    keys = ki.to(work) * k_scale.to(work)
    index = torch.einsum("bthd,bsd->bths", qi.to(work), keys).relu()
    index = torch.einsum("bths,bth->bts", index, weights)
    hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
    seen = index.masked_fill(hidden, -torch.inf)  # ReLU makes ties common: the lower index first
    best = seen.sort(dim=-1, descending=True, stable=True).indices[..., :SELECTED]
    hidden = hidden | ~torch.zeros_like(index, dtype=torch.bool).scatter(-1, best, True)

    q = linear("q_nope_proj", latent, heads, -1)
    qc = torch.einsum("bthd,hrd->bthr", q, w["absorb_weight"]).to(work)
    qr = rope_neighbours(linear("q_rope_proj", latent, heads, -1), at).to(work)
    c = rms(linear("kv_proj", x, -1), w["kv_norm_weight"]).to(work)
    r = rope_neighbours(linear("k_rope_proj", x, 1, -1), at)[:, :, 0].to(work)
    score = torch.einsum("bthr,bsr->bhts", qc, c) + torch.einsum("bthp,bsp->bhts", qr, r)
    score = score * (q.shape[-1] + qr.shape[-1]) ** -0.5
    p = score.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    u = torch.einsum("bhts,bsr->bthr", p, c).to(x.dtype)
    o = torch.einsum("bthr,hvr->bthv", u, w["v_proj_weight"])
    return o.flatten(2) @ w["o_proj_weight"].T


SELECTED = 6


@ac.op(out="B T H R")
def selected(
    qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di"),
    qc=ac.Activation("B T H R"), qr=ac.Activation("B T H P"), c=ac.Cache("B S R"),
    r=ac.Cache("B S P"), scale=ac.param(),
):  # fmt: skip
    """The library's sparse latent attention, of fewer rows."""
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")
    J = ac.topk(index, "S", k=6, where=ac.causal)
    score = (ac.dot(qc, c[J], "R") + ac.dot(qr, r[J], "P")) * scale
    return ac.dot(ac.softmax(score, J), c[J], J)


FEW = dsa(selected)
Layer = Callable[[Weights, Tensor, Shape], Tensor]
PLAIN: dict[str, Layer] = {"attention": attention, "delta": delta, "sparse": sparse}


def module(
    kind: str, s: Shape, dtype: torch.dtype, device: str = "cpu", **options: object
) -> ac.nn.LayerModule:
    """The module of these sizes, its weights drawn from a fixed seed."""
    torch.manual_seed(0)
    about = {"dtype": dtype, "device": device, **options}
    if kind == "attention":
        return ac.nn.MultiHeadAttention(s.width, s.heads * s.group, s.heads, s.dim, **about)
    if kind == "sparse":
        return ac.nn.SparseLatentAttention(
            s.width, s.heads * s.group, query_rank=3 * s.dim, latent=2 * s.dim,
            rope_dim=s.dim // 2, nope_dim=s.dim, value_dim=s.dim, index_heads=s.heads,
            index_dim=2 * s.dim, composition=FEW, **about,
        )  # fmt: skip
    found = ac.nn.GatedDeltaNet(
        s.width, s.heads, s.heads * s.group, s.dim, s.dim, s.kernel, **about
    )
    with torch.no_grad():  # gates that forget within a test's few tokens
        found.dt_bias.copy_(torch.linspace(-3.0, 1.0, len(found.dt_bias)))
    return found


def double(weights: Weights) -> dict[str, Tensor]:
    """The same weights in fp64."""
    return {n: x.detach().double() for n, x in weights.items()}


def whole(kind: str, layer: ac.nn.LayerModule, x: Tensor, s: Shape) -> tuple[Tensor, Tensor]:
    """The oracle, and the eager layer in the module's dtype."""
    weights = {n: p.detach() for n, p in layer.named_parameters()}
    run = PLAIN[kind]
    return run(double(weights), x.detach().double(), s), run(weights, x.detach(), s)


def gradients(kind: str, weights: Weights, x: Tensor, s: Shape) -> tuple[Tensor | None, ...]:
    """Of the sum of the output's squares, by the input and then by each weight, in their dtype."""
    leaves = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
    x = x.detach().clone().requires_grad_()
    y = PLAIN[kind](leaves, x, s)
    return torch.autograd.grad(y.square().sum(), (x, *leaves.values()), allow_unused=True)
