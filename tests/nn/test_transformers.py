"""Complete layers equal HuggingFace's, weight by weight: tiny random configs, none downloaded."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import attncc as ac
from attncc.dsl.library.layers.dsa import dsa
from tests.library.test_transformers import (
    BATCH,
    CLOSE,
    TOKENS,
    causal,
    inputs,
    layer,
    modelling,
    pieces,
)
from tests.nn.plain import selected
from tests.tolerance import max_error


def holds(mine: ac.nn.LayerModule, weights: Mapping[str, Tensor], x: Tensor, want: Tensor) -> None:
    """The module with these weights, whole and from caches, gives what the other layer gives."""
    assert set(weights) == {n for n, _ in mine.named_parameters()}
    with torch.no_grad():
        mine.load_state_dict(dict(weights))
        kept = mine.allocate(BATCH, 16, page=4)
        parts = [
            mine(x[:, at], kept=kept, phase="prefill" if at.start == 0 else "decode")
            for at in pieces()
        ]
        for found in (mine(x), torch.cat(parts, 1)):
            assert max_error(found, want) <= CLOSE * float(want.abs().max())


def by_name(**modules: Any) -> dict[str, Tensor]:
    return {f"{n}_weight": m.weight for n, m in modules.items()}


def test_llama_attention() -> None:
    llama = modelling("llama")
    config = llama.LlamaConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8
    )
    made, x = layer(llama.LlamaAttention, config), inputs(48)
    rotation = llama.LlamaRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    with torch.no_grad():
        want = made(x, rotation, causal())[0]
    mine = ac.nn.MultiHeadAttention(48, 6, 2, 8, dtype=torch.float32)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    holds(mine, by_name(**{n: getattr(made, n) for n in names}), x, want)


def test_qwen3_next_gated_delta_net() -> None:
    qwen = modelling("qwen3_next")
    config = qwen.Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=1, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=6, linear_conv_kernel_dim=4,
        layer_types=["linear_attention"],
    )  # fmt: skip
    made, x = layer(qwen.Qwen3NextGatedDeltaNet, config), inputs(32)
    with torch.no_grad():
        want = made(x)
    # Of each key head's rows: q 8, k 8, v 2 x 6, z 2 x 6; b 2, a 2.
    heads = made.in_proj_qkvz.weight.unflatten(0, (2, 40)).split([8, 8, 12, 12], 1)
    b, a = made.in_proj_ba.weight.unflatten(0, (2, 4)).split([2, 2], 1)
    filters = made.conv1d.weight[:, 0].split([16, 16, 24])
    weights = {
        **{f"{n}_proj_weight": w.flatten(0, 1) for n, w in zip("qkvz", heads, strict=True)},
        **{f"{n}_conv_weight": w for n, w in zip("qkv", filters, strict=True)},
        "a_proj_weight": a.flatten(0, 1), "b_proj_weight": b.flatten(0, 1),
        "A_log": made.A_log, "dt_bias": made.dt_bias, "norm_weight": made.norm.weight,
        "o_proj_weight": made.out_proj.weight,
    }  # fmt: skip
    mine = ac.nn.GatedDeltaNet(32, 2, 4, key_dim=8, value_dim=6, dtype=torch.float32)
    holds(mine, weights, x, want)


@pytest.mark.parametrize("selects", [True, False])
def test_deepseek_v32_sparse_attention(selects: bool) -> None:
    deepseek = modelling("deepseek_v32")
    config = deepseek.DeepseekV32Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12,
        kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
        index_n_heads=8, index_head_dim=16, index_topk=6 if selects else 64,
    )  # fmt: skip
    made, x = layer(deepseek.DeepseekV32Attention, config), inputs(32)
    rotation = deepseek.DeepseekV32RotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    with torch.no_grad():
        want = made(x, rotation, causal().expand(BATCH, 1, TOKENS, TOKENS))[0]
    index = made.indexer
    q = made.q_b_proj.weight.unflatten(0, (4, 10))
    latent, rope = made.kv_a_proj_with_mqa.weight.split([10, 4])
    up = made.kv_b_proj.weight.unflatten(0, (4, 11))
    weights = {
        **by_name(
            q_a_proj=made.q_a_proj, q_a_norm=made.q_a_layernorm, kv_norm=made.kv_a_layernorm,
            o_proj=made.o_proj, index_q_proj=index.wq_b, index_k_proj=index.wk,
            index_k_norm=index.k_norm, weights_proj=index.weights_proj,
        ),
        "index_k_norm_bias": index.k_norm.bias, "kv_proj_weight": latent,
        "k_rope_proj_weight": rope, "q_nope_proj_weight": q[:, :6].flatten(0, 1),
        "q_rope_proj_weight": q[:, 6:].flatten(0, 1), "absorb_weight": up[:, :6].mT,
        "v_proj_weight": up[:, 6:],
    }  # fmt: skip
    op = selected if selects else ac.ops.sparse_mla
    mine = ac.nn.SparseLatentAttention(
        32, 4, query_rank=12, latent=10, rope_dim=4, nope_dim=6, value_dim=5, index_heads=8,
        index_dim=16, composition=dsa(op, quantised=False), dtype=torch.float32,
    )  # fmt: skip
    holds(mine, weights, x, want)
