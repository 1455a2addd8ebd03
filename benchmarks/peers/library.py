"""Library ops elsewhere: plain PyTorch under ``torch.compile``, FLA's recurrent kernels, flex."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import Inputs, Outputs, Work
from benchmarks.peers.pytorch import heads_first

Named = dict[str, torch.Tensor]


def compiled(run: Callable[[Inputs], Named]) -> Callable[[Inputs], Work]:
    """A function of the inputs under ``torch.compile(dynamic=False)``."""

    def make(inputs: Inputs) -> Work:
        torch._dynamo.reset()
        call: Any = torch.compile(run, dynamic=False)
        return Work(lambda: call(inputs))

    return make


# --- rows ------------------------------------------------------------------------------------


def rms(x: torch.Tensor) -> torch.Tensor:
    """``x`` over its root mean square, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rms_norm(x: Inputs) -> Named:
    """A weighted norm over the last axis."""
    return {"o": (rms(x["x"]) * x["w"]).to(x["x"].dtype)}


def gated_rms_norm(x: Inputs) -> Named:
    """A weighted norm, then a gate."""
    return {"o": (rms(x["x"]) * x["w"] * F.silu(x["z"].float())).to(x["x"].dtype)}


def layer_norm(x: Inputs) -> Named:
    """torch's own."""
    own = x["x"]
    return {"o": F.layer_norm(own, own.shape[-1:], x["w"], x["bias"], 1e-5)}


def normalised(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def l2_norm(x: Inputs) -> Named:
    """Vectors of length 1."""
    return {"o": normalised(x["x"]).to(x["x"].dtype)}


def silu(x: Inputs) -> Named:
    """torch's own."""
    return {"o": F.silu(x["x"])}


def _angles(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    at = x["position"]
    return x["cos"][at][:, :, None], x["sin"][at][:, :, None]


def rope(x: Inputs) -> Named:
    """Halves of a head's elements rotated."""
    a, b = x["x"].float().chunk(2, -1)
    c, s = _angles(x)
    return {"o": torch.cat([a * c - b * s, b * c + a * s], -1).to(x["x"].dtype)}


def rope_interleaved(x: Inputs) -> Named:
    """Neighbours rotated."""
    a, b = x["x"].float().unflatten(-1, (-1, 2)).unbind(-1)
    c, s = _angles(x)
    o = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    return {"o": o.to(x["x"].dtype)}


# --- linear recurrences without a correction, in chunks --------------------------------------


def scanned(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, scale: float, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``S' = exp(g) S + k v`` from a zero state, in matrix products (Dao and Gu, 2024, section 6).

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K].
        v: [B, T, H, V].
        g: [B, T, H], natural logarithm of the decay, fp32.
        scale: of the output.
        chunk: tokens of a chunk; divides T.

    Returns:
        The output [B, T, H, V] in v's dtype, the final state [B, H, K, V] in fp32.
    """
    dtype = v.dtype
    q, k, v, g = (x.unflatten(1, (-1, chunk)) for x in (q, k, v, g))
    a = g.cumsum(2)  # [B, n, C, H]
    seen = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()[:, :, None]
    inside = (a[:, :, :, None] - a[:, :, None]).masked_fill(~seen, -torch.inf).exp()
    score = torch.einsum("bnihk,bnjhk->bnijh", q, k) * inside
    o = torch.einsum("bnijh,bnjhv->bnihv", score.to(dtype), v).float()
    late = (a[:, :, -1:] - a).exp()[..., None]
    states = torch.einsum("bnjhk,bnjhv->bnhkv", (k * late).to(dtype), v).float()
    total = F.pad(a[:, :, -1].cumsum(1), (0, 0, 1, 0))  # [B, n + 1, H], before each chunk
    n = total.shape[1]
    before = torch.ones(n, n - 1, dtype=torch.bool, device=q.device).tril(-1)[:, :, None]
    between = (total[:, :, None] - total[:, None, 1:]).masked_fill(~before, -torch.inf).exp()
    starts = torch.einsum("bmnh,bnhkv->bmhkv", between, states)  # [B, n + 1, H, K, V]
    early = (q * a.exp()[..., None]).to(dtype)
    o = o + torch.einsum("bnihk,bnhkv->bnihv", early, starts[:, :-1].to(dtype)).float()
    return (o * scale).flatten(1, 2).to(dtype), starts[:, -1]


CHUNK = 128


def linear_attention(x: Inputs) -> Named:
    """Without a decay."""
    q = x["q"]
    g = torch.zeros(q.shape[:3], device=q.device)
    o, s = scanned(q, x["k"], x["v"], g, q.shape[-1] ** -0.5, min(CHUNK, q.shape[1]))
    return {"o": o, "s": s}


def retnet(x: Inputs) -> Named:
    """One constant decay a head."""
    q = x["q"]
    g = x["gamma"].float().log().expand(q.shape[:3])
    o, s = scanned(q, x["k"], x["v"], g, q.shape[-1] ** -0.5, min(CHUNK, q.shape[1]))
    return {"o": o, "s": s}


def mamba2(x: Inputs) -> Named:
    """A step in the decay and in the values; b and c of one group."""
    step = F.softplus(x["dt"].float() + x["dt_bias"])
    g = -x["a_log"].exp() * step
    heads = x["x"].shape[2]
    b, c = (x[n].expand(-1, -1, heads, -1) for n in ("b", "c"))
    v = (step[..., None] * x["x"]).to(x["x"].dtype)
    o, s = scanned(c, b, v, g, 1.0, min(CHUNK, v.shape[1]))
    return {"o": (o.float() + x["d"][:, None] * x["x"]).to(o.dtype), "s": s.mT}


# --- FLA -------------------------------------------------------------------------------------


def fla(
    place: str, name: str, arguments: Callable[[Inputs], dict[str, Any]]
) -> Callable[[Inputs], Work]:
    """A kernel of FLA; ``arguments`` are made before anything is timed.

    Args:
        place: module below ``fla.ops``.
        name: the function.
        arguments: by its names; the state that it starts from is ``initial_state``.
    """

    def make(inputs: Inputs) -> Work:
        run = getattr(import_module(f"fla.ops.{place}"), name)
        named = arguments(inputs)

        def fn() -> Outputs:
            o, s = run(**named, output_final_state=True)
            return {"o": o, "s": s}

        return Work(fn)

    return make


def _given(x: Inputs, *names: str, **renamed: str) -> dict[str, Any]:
    found = {n: x[n] for n in names}
    found |= {theirs: x[own] for theirs, own in renamed.items()}
    return found | ({"initial_state": x["s"]} if "s" in x else {})


def comba_arguments(x: Inputs) -> dict[str, Any]:
    """FLA takes the query that is read with."""
    q = (x["q"].float() - x["d"][:, None] * x["k"]).to(x["q"].dtype)
    return {**_given(x, "k", "v", "p", "g", "beta"), "q": q}


def oja_arguments(x: Inputs) -> dict[str, Any]:
    """The gate is called gv."""
    return _given(x, "q", "k", "v", "beta", gv="g")


def rwkv7_arguments(x: Inputs) -> dict[str, Any]:
    """Its scale is 1 here."""
    return {**_given(x, "r", "w", "k", "v", "a", "b"), "scale": 1.0}


def rwkv7_chunk_arguments(x: Inputs) -> dict[str, Any]:
    """Gates here are between -5 and 0, which is what its tensor cores may be used for."""
    return {**rwkv7_arguments(x), "safe_gate": True}


def delta_arguments(x: Inputs) -> dict[str, Any]:
    """Of the delta rule and KDA, whose keys have length 1 here."""
    return _given(x, "q", "k", "v", "beta", *(n for n in ("g",) if n in x))


def hgrn_arguments(x: Inputs) -> dict[str, Any]:
    """As ours."""
    return _given(x, "x", "g")


def raw_arguments(x: Inputs) -> dict[str, Any]:
    """Norms, gate and rate are made in the kernel."""
    flags = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")
    found = _given(x, "q", "k", "v", "dt_bias", g="a", beta="b", A_log="a_log")
    return {**found, **dict.fromkeys(flags, True)}


OF_FLA: dict[str, tuple[str, str, Callable[[Inputs], dict[str, Any]]]] = {
    "linear_attention": (  # without the sum of keys that it may divide by
        "linear_attn",
        "linear_attn",
        lambda x: {**_given(x, "q", "k", "v"), "normalize": False},
    ),
    "retnet": ("retention", "retention", lambda x: _given(x, "q", "k", "v")),  # its own decays
    "gla": ("gla", "gla", lambda x: _given(x, "q", "k", "v", gk="g")),
    "delta_rule": ("delta_rule", "delta_rule", delta_arguments),
    "kda": ("kda", "kda", delta_arguments),
    "comba": ("comba", "comba", comba_arguments),
    "gated_oja": ("gated_oja_rule", "gated_oja_rule", oja_arguments),
    "rwkv7": ("rwkv7", "rwkv7", rwkv7_arguments),
    "hgrn": ("hgrn", "hgrn", hgrn_arguments),
}
"""Module, the function's name behind ``chunk_`` or ``fused_recurrent_``, and arguments, by op."""


def of_fla(op: str, kind: str) -> Callable[[Inputs], Work]:
    """FLA's kernel of an op.

    Args:
        op: one of :data:`OF_FLA`.
        kind: ``chunk`` for prompts, ``fused_recurrent`` for steps.
    """
    place, name, arguments = OF_FLA[op]
    safe = op == "rwkv7" and kind == "chunk"
    return fla(place, f"{kind}_{name}", rwkv7_chunk_arguments if safe else arguments)


def mamba2_scan(inputs: Inputs) -> Work:
    """Mamba-2 as simple GLA, whose arguments are made before anything is timed, and its skip."""
    torch._dynamo.reset()
    heads, step = inputs["x"].shape[2], F.softplus(inputs["dt"].float() + inputs["dt_bias"])
    named: Named = {n: inputs[m].expand(-1, -1, heads, -1) for n, m in (("k", "b"), ("q", "c"))}
    named = {n: t.contiguous() for n, t in named.items()}
    named |= {"v": (step[..., None] * inputs["x"]).to(inputs["x"].dtype)}
    named |= {"g": -inputs["a_log"].exp() * step, "scale": 1.0}  # type: ignore[dict-item]
    work = fla("simple_gla", "chunk_simple_gla", lambda _: named)(inputs)

    def skipped(o: torch.Tensor, x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return (o.float() + d[:, None] * x).to(o.dtype)

    skip: Any = torch.compile(skipped, dynamic=False)

    def fn() -> Outputs:
        found = dict(work.fn())
        return {"o": skip(found["o"], inputs["x"], inputs["d"]), "s": found["s"].mT}

    return Work(fn)


def gated_net(kernel: str) -> Callable[[Inputs], Work]:
    """A kernel of FLA's gated delta rule, then the gated norm compiled."""

    def make(inputs: Inputs) -> Work:
        torch._dynamo.reset()
        rule = fla("gated_delta_rule", kernel, raw_arguments)(inputs)
        norm: Any = torch.compile(gated_rms_norm, dynamic=False)

        def fn() -> Outputs:
            found = dict(rule.fn())
            return {**found, **norm({"x": found["o"], "z": inputs["z"], "w": inputs["w"]})}

        return Work(fn)

    return make


# --- FlexAttention with more than a score and a mask -----------------------------------------


def _with_lse(flex: Any, *args: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's output and natural-log lse, as newer and older versions of torch give it."""
    from torch.nn.attention import flex_attention as module

    if not hasattr(module, "AuxRequest"):
        o, lse = flex(*args, **options, return_lse=True)
        return o, lse
    o, found = flex(*args, **options, return_aux=module.AuxRequest(lse=True))
    return o, found.lse


def sink(*, mask: Callable[[Inputs], Any] | None) -> Callable[[Inputs], Work]:
    """A sink scales the output by ``sigmoid(lse - sink)``, as models with it do."""

    def make(inputs: Inputs) -> Work:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        q, k, v = heads_first(inputs)
        options: dict[str, Any] = {"enable_gqa": True}
        if mask is not None:
            options["block_mask"] = create_block_mask(
                mask(inputs), None, None, q.shape[2], k.shape[2], device=q.device
            )
        logits = inputs["sink"][:, None]

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            o, lse = _with_lse(flex_attention, q, k, v, **options)
            return (o * torch.sigmoid(lse - logits)[..., None]).to(q.dtype)

        call: Any = torch.compile(run, dynamic=False)
        return Work(lambda: {"o": call(q, k, v).transpose(1, 2)})

    return make


def joined(make: Callable[[Inputs], Work]) -> Callable[[Inputs], Work]:
    """The prefix copied in front of every sequence's own keys, before anything is timed."""

    def run(inputs: Inputs) -> Work:
        batch = inputs["q"].shape[0]
        rows = {
            n: torch.cat([inputs[f"p{n}"].expand(batch, -1, -1, -1), inputs[n]], 1)
            for n in ("k", "v")
        }
        return make({**inputs, **rows})

    return run
