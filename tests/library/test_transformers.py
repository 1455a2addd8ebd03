"""The library's ops inside HuggingFace's modelling code: tiny random layers, nothing downloaded.

Each test runs a layer of ``transformers`` whole, then again with the layer's own projections and
norms around our ops: a prefill of the first tokens, the rest one at a time.
"""

import os
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

import attncc as ac
from attncc.dsl.library.short_conv import short_conv
from tests.tolerance import max_error

BATCH, TOKENS, CUT = 2, 13, 8
CLOSE = 5e-6
CONV = ac.Op(short_conv)


def modelling(name: str) -> ModuleType:
    """A model's modelling code, imported by the test that needs it: it takes seconds."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    pytest.importorskip("transformers")
    return import_module(f"transformers.models.{name}.modeling_{name}")


def layer(kind: Any, config: Any) -> Any:
    """A layer with random parameters everywhere, also where a model starts from ones."""
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    made = kind(config, 0).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape) * (0.3 if p.dim() > 1 else 0.5) + (p.dim() == 1) * 0.7)
    return made


def inputs(width: int) -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, width, generator=torch.Generator().manual_seed(1))


def causal() -> torch.Tensor:
    return torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]


def pieces() -> list[slice]:
    """The prefill, then token after token."""
    return [slice(0, CUT), *(slice(i, i + 1) for i in range(CUT, TOKENS))]


def pages(**widths: tuple[int, ...]) -> ac.PagedCache:
    """A cache of pages of 4 rows in an order of their own."""
    each = -(-TOKENS // 4)
    table = torch.randperm(BATCH * each, generator=torch.Generator().manual_seed(2)).int()
    held = {n: torch.full((BATCH * each, 4, *w), torch.nan) for n, w in widths.items()}
    return ac.PagedCache(held, table.view(BATCH, each), torch.zeros(BATCH, dtype=torch.int32))


def test_llama_attention() -> None:
    llama = modelling("llama")
    config = llama.LlamaConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8
    )
    made, x = layer(llama.LlamaAttention, config), inputs(48)
    rotation = llama.LlamaRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    with torch.no_grad():
        want = made(x, rotation, causal())[0]
        projections = (made.q_proj, made.k_proj, made.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, 8)) for project in projections)
        q, k = llama.apply_rotary_pos_emb(q, k, *rotation, unsqueeze_dim=2)
        cache, out = pages(k=(2, 8), v=(2, 8)), []
        for at in pieces():
            run = ac.ops.attention.prefill if at.start == 0 else ac.ops.attention.decode
            out.append(run(q[:, at], k[:, at], v[:, at], cache=cache))
        found = made.o_proj(torch.cat(out, 1).flatten(2))
    assert max_error(found, want) <= CLOSE * float(want.abs().max())


def test_qwen3_next_gated_delta_rule_with_its_convolution() -> None:
    qwen = modelling("qwen3_next")
    config = qwen.Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=1, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=6, linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
    )  # fmt: skip
    made, x = layer(qwen.Qwen3NextGatedDeltaNet, config), inputs(32)
    with torch.no_grad():
        want = made(x)
        q, k, v, z, b, a = made.fix_query_key_value_ordering(
            made.in_proj_qkvz(x), made.in_proj_ba(x)
        )
        mixed = torch.cat([y.flatten(2) for y in (q, k, v)], -1)
        g = -made.A_log.exp() * torch.nn.functional.softplus(a + made.dt_bias)
        window = state = None
        outs = []
        for at in pieces():
            window, y = CONV(mixed[:, at], made.conv1d.weight[:, 0], win=window, silu=True)
            heads = y.split([16, 16, 24], -1)
            q, k, v = (h.unflatten(-1, (-1, d)) for h, d in zip(heads, (8, 8, 6), strict=True))
            run = ac.ops.gated_delta_rule if at.start == 0 else ac.ops.gated_delta_rule.decode
            state, o = run(q, k, v, g[:, at], b[:, at].sigmoid(), s=state, l2norm=True)
            outs.append(o)
        o = torch.cat(outs, 1)
        o = made.norm(o.flatten(0, 2), z.flatten(0, 2)).view(BATCH, TOKENS, -1)
        found = made.out_proj(o)
    assert max_error(found, want) <= CLOSE * float(want.abs().max())


def test_mamba2() -> None:
    mamba = modelling("mamba2")
    config = mamba.Mamba2Config(
        hidden_size=16, expand=2, num_heads=4, head_dim=8, state_size=6, n_groups=2,
        conv_kernel=4, chunk_size=4, num_hidden_layers=1,
    )  # fmt: skip
    made, x = layer(mamba.Mamba2Mixer, config), inputs(16)
    with torch.no_grad():
        want = made(x)
        z, mixed, dt = made.in_proj(x).split([32, 56, 4], -1)
        weights, window, state, outs = made.conv1d.weight[:, 0], None, None, []
        for at in pieces():
            window, y = CONV(mixed[:, at], weights, made.conv1d.bias, win=window, silu=True)
            values, b, c = y.split([32, 12, 12], -1)
            state, o = (ac.ops.mamba2 if at.start == 0 else ac.ops.mamba2.decode)(
                values.unflatten(-1, (4, 8)), dt[:, at].contiguous(), made.A_log,
                b.unflatten(-1, (2, 6)), c.unflatten(-1, (2, 6)), made.D, made.dt_bias, s=state,
            )  # fmt: skip
            outs.append(o.flatten(2))
        found = made.out_proj(made.norm(torch.cat(outs, 1), z))
    assert max_error(found, want) <= CLOSE * float(want.abs().max())


@pytest.mark.parametrize("interleaved", [True, False])
def test_deepseek_v3_latent_attention(interleaved: bool) -> None:
    deepseek = modelling("deepseek_v3")
    config = deepseek.DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12,
        kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
        rope_interleave=interleaved,
    )  # fmt: skip
    made, x = layer(deepseek.DeepseekV3Attention, config), inputs(32)
    rotation = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    rotate = deepseek.apply_rotary_pos_emb
    if interleaved:
        rotate = deepseek.apply_rotary_pos_emb_interleave
    with torch.no_grad():
        want = made(x, rotation, causal())[0]
        q = made.q_b_proj(made.q_a_layernorm(made.q_a_proj(x))).unflatten(-1, (4, 10))
        latent, rope = made.kv_a_proj_with_mqa(x).split([10, 4], -1)
        latent = made.kv_a_layernorm(latent)
        turned, rope = rotate(q[..., 6:], rope[:, :, None], *rotation, unsqueeze_dim=2)
        up = made.kv_b_proj.weight.unflatten(0, (4, 11))
        cache, outs = pages(c=(10,), r=(4,)), []
        for at in pieces():
            run = ac.ops.mla.prefill if at.start == 0 else ac.ops.mla.decode
            args = (q[:, at, :, :6], turned[:, at], latent[:, at], rope[:, at, 0])
            outs.append(run(*args, up[:, :6], up[:, 6:], scale=made.scaling, cache=cache))
        found = made.o_proj(torch.cat(outs, 1).flatten(2))
    assert max_error(found, want) <= CLOSE * float(want.abs().max())
