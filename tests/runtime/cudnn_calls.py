"""Calls whose cuDNN graphs are looked at, and their descriptions."""

import torch

import attncc as ac
from attncc.codegen.emit.cudnn import GraphPlan
from attncc.codegen.pipeline import analyse
from attncc.runtime import cudnn_graph
from attncc.runtime.bind import bind
from tests.gdp_document import Shape, arguments

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CALLS = {
    "plain": Shape((9, 4)),
    "one update, no state": Shape((20,), n=1, state=None),
    "three updates": Shape((5, 0, 8), n=3, k_dim=128, v_dim=128),
    "four updates, wide keys": Shape((7,), n=4, k_dim=128, v_dim=64),
    "wide values, fp16": Shape((7, 1), k_dim=64, v_dim=128, dtype=FP16),
    "more values": Shape((6, 6), heads=(1, 1, 3)),
    "more values, keys too": Shape((6, 6), heads=(1, 3, 3)),
    "more queries": Shape((6, 6), heads=(4, 4, 2), gate=BF16),
    "more queries, keys of values, bf16 state": Shape((6, 6), heads=(4, 2, 2), state=BF16),
    "no gates": Shape((11, 2), gate=None, beta=None),
    "unit rows, strided, own scale": Shape((11, 2), unit=True, strided=True, scale=0.3),
    "gates of q's dtype": Shape((11, 2), gate=FP16, beta=FP16, dtype=FP16),
}


def plan_of(shape: Shape) -> GraphPlan:
    """The graph of a call of this shape."""
    args = arguments(shape)
    q, k, v = args["q"], args["k"], args["v"]
    heads = max(q.shape[1], v.shape[1])
    op = ac.gdp._op("Gq" if k.shape[1] == q.shape[1] else "Gv")
    call, _ = bind(
        op.declaration, (q, k, v),
        {
            "alpha": args.get("g"), "beta": args.get("beta"), "s": args.get("initial_state"),
            "scale": shape.scale, "l2norm": shape.unit, "cu_seqlens": args["cu_seqlens"],
            "sizes": {"N": shape.n, "Gq": heads // v.shape[1], "Gv": heads // q.shape[1]},
        },
    )  # fmt: skip
    return cudnn_graph.plan_of(call, analyse(call.program))
