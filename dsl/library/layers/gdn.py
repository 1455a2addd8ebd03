"""Gated DeltaNet from h_t to W_O (Yang et al., 2024; parametrised as in Qwen3-Next and FLA)."""

import attncc.dsl.api as ac
from attncc.dsl.compose import Nodes
from attncc.dsl.layers import Dtype, Inner, NodeKind
from attncc.dsl.library.gated_delta_net import gated_delta_net
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from attncc.dsl.library.raw_gated_delta_rule import raw_gated_delta_rule
from attncc.dsl.library.short_conv import short_conv

QKV, GATES, READ = "Q/K/V", "Decay and write rate", "Read-out"
STATE, WINDOWS, ERROR = "Recurrent state", "Short-convolution state", "Prediction and error"
FEW = 8
"""Sequences of a decode step whose read-outs are normed where they are computed."""
KEYS, VALUES, HEADS = "B T Hk K", "B T (Hk G) V", "B T (Hk G)"


def _convolved(n: Nodes, name: str, h: str, axis: str, pattern: str) -> str:
    """Projection, short convolution, SiLU, heads: the way of q, k and v."""
    x = n.project(f"{name}_proj", h, f"{name}_projected", f"B T {axis}", label=f"W_{name.upper()}")
    window = n.window(f"conv_state_{name}", f"B W {axis}", f"conv_{name}", row=WINDOWS)
    w = n.param(f"{name}_conv_weight", f"{axis} W", f"w_{name}")
    y = n.object(f"{name}_convolved", f"B T {axis}")
    n.op(
        f"{name}_conv", short_conv, {"x": x, "w": w, "win": window, "o": y}, axes={"D": axis},
        label="ShortConv",
    )  # fmt: skip
    s = n.same(NodeKind.SILU, f"{name}_silu", y, f"{name}_activated", label="SiLU")
    n.fuse(
        [f"{name}_conv", f"{name}_silu"], short_conv, {"x": x, "w": w, "win": window, "o": s},
        axes={"D": axis}, flags=["silu"],
    )  # fmt: skip
    last = {"symbol": "v_t", "row": QKV} if name == "v" else {}
    heads = n.object(name if last else f"{name}_heads", pattern, **last)
    n.node(NodeKind.RESHAPE, f"{name}_split", [s], [heads], label="heads")
    return heads


@ac.layer
def gdn_layer(n: Nodes) -> str:
    """Three convolved projections, one matrix state a head, a gated norm."""
    h = n.input("hidden_states", "B T M", "h_t", row="Current layer input")
    n.rows("Current layer input", QKV, GATES, "Decayed state", ERROR, STATE, WINDOWS, READ)
    query = _convolved(n, "q", h, "DK", KEYS)
    key = _convolved(n, "k", h, "DK", KEYS)
    v = _convolved(n, "v", h, "DV", VALUES)
    q = n.same(NodeKind.L2NORM, "q_norm", query, "q", "q_t", label="L2Norm", row=QKV)
    k = n.same(NodeKind.L2NORM, "k_norm", key, "k", "k_t", label="L2Norm", row=QKV)
    a = n.project("a_proj", h, "a", HEADS, label="a_proj")
    b = n.project("b_proj", h, "b", HEADS, label="b_proj")
    z = n.project("z_proj", h, "z", VALUES, "z_t", label="W_Z")
    g = n.same(
        NodeKind.GATE, "decay", a, "g", "ln lambda_t", label="gate", row=GATES, dtype=Dtype.FP32,
        params={"A_log": "(Hk G)", "dt_bias": "(Hk G)"},
        formula="-exp(A_log) softplus(a + dt_bias), the decay's natural logarithm",
    )  # fmt: skip
    beta = n.same(
        NodeKind.SIGMOID, "write_rate", b, "beta", "beta_t", label="sigmoid", row=GATES,
        dtype=Dtype.FP32,
    )  # fmt: skip
    s = n.state("recurrent_state", "B (Hk G) K V", "S_t", row=STATE)
    r = n.object("read_out", VALUES, "r_t", row=READ)
    n.op(
        "recurrence", gated_delta_rule,
        {"q": q, "k": k, "v": v, "g": g, "beta": beta, "s": s, "o": r}, label="recurrence",
        inner=[
            Inner("s'", "Sbar_t", "Decayed state"), Inner("read0", "vhat_t", ERROR),
            Inner("e", "e_t", ERROR),
        ],
    )  # fmt: skip
    y = n.same(
        NodeKind.GATED_RMSNORM, "norm", r, "normed", inputs=[z], label="Gated RMSNorm",
        params={"norm_weight": "V"},
    )  # fmt: skip
    gates = {"a": a, "b": b, "a_log": "A_log", "dt_bias": "dt_bias"}
    raw = {"q": query, "k": key, "v": v, **gates, "s": s}
    before = ["q_norm", "k_norm", "decay", "write_rate", "recurrence"]
    # One program for all of V leaves nothing to sum afterwards, but few of them fit a GPU at once.
    n.fuse(
        [*before, "norm"], gated_delta_net, {**raw, "z": z, "w": "norm_weight", "o": y},
        phase="decode", most=FEW,
    )  # fmt: skip
    n.fuse(before, raw_gated_delta_rule, {**raw, "o": r}, phase="decode")
    return n.project("o_proj", y, "output", "B T M", "y_t", label="W_O", row=READ)
