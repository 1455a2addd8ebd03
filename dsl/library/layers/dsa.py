"""DeepSeek sparse attention from h_t to W_O (DeepSeek-AI, DeepSeek-V3.2-Exp, 2025), absorbed."""

from typing import Any

import attncc.dsl.api as ac
from attncc.dsl.compose import Nodes
from attncc.dsl.composition import Composition
from attncc.dsl.layers import Dtype, Inner, NodeKind
from attncc.dsl.library.sparse_mla import sparse_mla

QUERY, KEYS, WEIGHTS = "Indexer Query", "Indexer Key", "Indexer head weights"
LATENT, OUTPUT = "MLA latent cache", "Main MLA output"
SCORE, SELECTED = "Index score", "Selected positions"


def _query(n: Nodes, latent: str, at: str, quantised: bool) -> list[str]:
    """The index's queries, and their scales where they are quantised."""
    q = n.project("index_q_proj", latent, "index_q_projected", "B T Hi Di", label="Indexer Q")
    about: Any = {} if quantised else {"row": QUERY, "symbol": "q_i"}
    q = n.same(NodeKind.ROPE, "index_q_rope", q, "index_q", inputs=[at], label="RoPE", **about)
    if not quantised:
        return [q]
    n.object("q_fp8", "B T Hi Di", "q_i", row=QUERY, dtype=Dtype.E4M3)
    n.object("q_scale", "B T Hi", "s_i", row=QUERY, dtype=Dtype.FP32)
    n.node(NodeKind.QUANTISE, "index_q_quant", [q], ["q_fp8", "q_scale"], label="quantise")
    return ["q_fp8", "q_scale"]


def _keys(n: Nodes, h: str, at: str, quantised: bool) -> list[str]:
    """The index's keys in their cache; the caches that it reads."""
    k = n.project("index_k_proj", h, "index_k_projected", "B T Di", label="Indexer K")
    k = n.same(
        NodeKind.LAYERNORM, "index_k_norm", k, "index_k_normed", label="LayerNorm",
        params={"index_k_norm_weight": "Di", "index_k_norm_bias": "Di"},
    )  # fmt: skip
    k = n.same(NodeKind.ROPE, "index_k_rope", k, "index_k", inputs=[at], label="RoPE")
    if not quantised:
        n.cache("index_k_cache", "B S Di", "k_j", row=KEYS)
        n.append("index_k_append", k, "index_k_cache", label="k_cache")
        return ["index_k_cache"]
    n.object("k_fp8", "B T Di", "k_t", dtype=Dtype.E4M3)
    n.object("k_scale", "B T", "s_t", dtype=Dtype.UE8M0)
    n.node(
        NodeKind.QUANTISE, "index_k_quant", [k], ["k_fp8", "k_scale"], label="quantise",
        dequantised=1,
    )  # fmt: skip
    n.cache("index_k_cache", "B S Di", "k_j", row=KEYS, dtype=Dtype.E4M3)
    n.cache("index_scale_cache", "B S", "s_j", row=KEYS, dtype=Dtype.UE8M0)
    n.append("index_k_append", "k_fp8", "index_k_cache", label="k_cache")
    n.append("index_scale_append", "k_scale", "index_scale_cache", label="k_scale_cache")
    return ["index_k_cache", "index_scale_cache"]


def _weights(n: Nodes, h: str, scales: list[str]) -> str:
    """The heads' weights: a projection times fixed numbers and the queries' scales."""
    w = n.project("weights_proj", h, "index_weights", "B T Hi", label="weights_proj")
    n.object("weights", "B T Hi", "w_i", row=WEIGHTS)
    n.node(NodeKind.SCALE, "index_scale", [w, *scales], ["weights"], label="scale")
    return "weights"


def dsa(op: Any, name: str = "dsa_layer", *, quantised: bool = True) -> Composition:
    """The layer around a sparse latent attention, which fixes how many rows are selected.

    The index rotates halves, the main attention neighbours.

    Args:
        op: the sparse latent attention, or its declaration.
        name: of the layer.
        quantised: the index's queries and keys are e4m3, as in the release.
    """

    def layer(n: Nodes) -> str:
        """An indexer over every token; latent attention over the rows that it selects."""
        h = n.input("hidden_states", "B T M", "h_t", row="Current layer input")
        n.rows("Current layer input", QUERY, KEYS, WEIGHTS, SCORE, SELECTED, LATENT, OUTPUT)
        at = n.positions()
        latent = n.project("q_a_proj", h, "q_latent", "B T Rq", label="W_DQ")
        latent = n.same(
            NodeKind.RMSNORM, "q_a_norm", latent, "q_latent_normed", "c_q", label="RMSNorm",
            params={"q_a_norm_weight": "Rq"},
        )  # fmt: skip
        qi, *scales = _query(n, latent, at, quantised)
        ki, *more = _keys(n, h, at, quantised)
        w = _weights(n, h, scales)

        q = n.project("q_nope_proj", latent, "q_nope", "B T H D", "q_C", label="W_UQ")
        qc = n.project("absorb", q, "q_absorbed", "B T H R", "q_C'", label="W_UK", per="H")
        qr = n.project("q_rope_proj", latent, "q_rope_projected", "B T H P", label="W_QR")
        near: Any = {"inputs": [at], "label": "RoPE", "settings": {"interleaved": 1}}
        qr = n.same(NodeKind.ROPE, "q_rope", qr, "q_rotated", "q_R", **near)
        c = n.project("kv_proj", h, "kv_projected", "B T R", label="W_DKV")
        c = n.same(
            NodeKind.RMSNORM, "kv_norm", c, "kv_latent", "cKV_t", label="RMSNorm",
            params={"kv_norm_weight": "R"},
        )  # fmt: skip
        r = n.project("k_rope_proj", h, "k_rope_projected", "B T P", label="W_KR")
        r = n.same(NodeKind.ROPE, "k_rope", r, "k_rotated", "kR_t", **near)
        n.cache("kv_cache", "B S R", "cKV_j", row=LATENT)
        n.cache("k_rope_cache", "B S P", "kR_j", row=LATENT)
        n.append("kv_append", c, "kv_cache")
        n.append("k_rope_append", r, "k_rope_cache")
        u = n.object("latent_output", "B T H R", "u")
        n.op(
            "attend", op,
            {
                "qi": qi, "w": w, "ki": ki, "qc": qc, "qr": qr,
                "c": "kv_cache", "r": "k_rope_cache", "o": u,
            },
            label="MLA", also=more,
            inner=[Inner("index", "I_j", SCORE), Inner("J", "J", SELECTED)],
        )  # fmt: skip
        heads = n.project("v_proj", u, "head_output", "B T H V", label="W_UV", per="H")
        return n.project("o_proj", heads, "output", "B T M", "y_t", label="W_O", row=OUTPUT)

    layer.__name__ = name
    return ac.layer(layer)


dsa_layer = dsa(sparse_mla)
