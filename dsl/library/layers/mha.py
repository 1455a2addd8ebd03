"""Multi-head attention from h_t to W_O; MHA, GQA and MQA are the sizes of G and Hkv."""

import attncc.dsl.api as ac
from attncc.dsl.compose import Nodes
from attncc.dsl.layers import Inner, NodeKind
from attncc.dsl.library.attention import attention

QUERY, KEYS, HISTORY = "Current Query", "Current Key/Value", "Historical Key/Value"
SCORES, OUTPUT = "Scores and probabilities", "Output"
HEADS, ROWS = "B T (Hkv G) D", "B T Hkv D"


@ac.layer
def mha_decode(n: Nodes) -> str:
    """Causal attention over the layer's own cache, with RoPE at each token's position."""
    h = n.input("hidden_states", "B T M", "h_t", row="Current layer input")
    at = n.positions()
    n.rows("Current layer input", QUERY, KEYS, HISTORY, SCORES, OUTPUT)
    q = n.project("q_proj", h, "q_projected", HEADS, label="W_Q")
    k = n.project("k_proj", h, "k_projected", ROWS, label="W_K")
    v = n.project("v_proj", h, "value_states", ROWS, "v_t", label="W_V", row=KEYS)
    q = n.same(
        NodeKind.ROPE, "q_rope", q, "query_states", "q_t", inputs=[at], label="RoPE", row=QUERY
    )
    k = n.same(NodeKind.ROPE, "k_rope", k, "key_states", "k_t", inputs=[at], label="RoPE", row=KEYS)
    n.cache("k_cache", "B S Hkv D", "K_cache", row=HISTORY)
    n.cache("v_cache", "B S Hkv D", "V_cache", row=HISTORY)
    n.append("k_append", k, "k_cache", label="cache update")
    n.append("v_append", v, "v_cache", label="cache update")
    o = n.object("attn_output", HEADS, "o_t", row=OUTPUT)
    n.op(
        "attend", attention, {"q": q, "k": "k_cache", "v": "v_cache", "o": o}, axes={"E": "D"},
        label="attention",
        inner=[Inner("score", "a_t", SCORES), Inner("p", "p_t", SCORES)],
    )  # fmt: skip
    return n.project("o_proj", o, "output", "B T M", "y_t", label="W_O", row=OUTPUT)
