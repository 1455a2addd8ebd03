"""However a sequence is cut, the library's ops give the same: the law of ``tests/laws``."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

import attncc as ac
from tests.drawn.bounds import hold, magnitude
from tests.drawn.known import Known
from tests.laws import test_segmentation as laws
from tests.laws.test_segmentation import HISTORY_WAYS, STATE_WAYS, Way, by_name, holds
from tests.library import test_short_conv as short_conv
from tests.strategies import randn

KV = (("H", 2), ("K", 6), ("V", 4))
GROUPED = (("Hk", 2), ("G", 2), ("K", 6), ("V", 4))
HEADS = (("Hkv", 2), ("G", 2), ("D", 4), ("E", 3))

SCANS = [
    Known(ac.ops.linear_attention, KV),
    Known(ac.ops.retnet, KV, (("gamma", "coef"),)),
    Known(ac.ops.mamba2, GROUPED, (("b", "unit"), ("c", "unit"))),
    Known(ac.ops.gla, KV),
    Known(ac.ops.delta_rule, KV),
    Known(ac.ops.raw_gated_delta_rule, GROUPED),
    Known(ac.ops.gated_delta_net, GROUPED),
    Known(
        ac.ops.gated_delta_product, (("N", 2), ("H", 2), ("Gq", 2), ("Gv", 1), ("K", 6), ("V", 4))
    ),
    Known(ac.ops.kda, GROUPED),
    Known(ac.ops.rwkv7, KV, (("w", "gate"), ("a", "unit"))),
    Known(ac.ops.hgrn, (("D", 5),)),
    Known(ac.ops.comba, GROUPED, (("p", "unit"),)),
    Known(ac.ops.gated_oja, GROUPED, (("v", "unit"),)),
]
FOLDS = [
    Known(ac.ops.sliding_window, HEADS),
    Known(ac.ops.soft_cap, HEADS),
    Known(ac.ops.alibi, HEADS),
    Known(ac.ops.sink_attention, HEADS),
    Known(ac.ops.document_attention, HEADS, (("document", "label"),)),
    Known(ac.ops.sparse_mla, (("Hi", 3), ("Di", 4), ("H", 2), ("R", 6), ("P", 4))),
    Known(ac.ops.mla, (("H", 2), ("D", 4), ("P", 3), ("R", 6), ("V", 5))),
    Known(ac.ops.cascade, (*HEADS, ("P", 7))),
    Known(ac.ops.lightning_indexer, (("Hi", 3), ("Di", 4))),
]
ROWS = [
    (ac.ops.rms_norm, {"x": (2, 9, 3, 8), "w": (8,)}),
    (ac.ops.layer_norm, {"x": (2, 9, 3, 8), "w": (8,), "bias": (8,)}),
    (ac.ops.l2_norm, {"x": (2, 9, 3, 8)}),
    (ac.ops.silu, {"x": (2, 9, 3, 8)}),
    (ac.ops.gated_rms_norm, {"x": (2, 9, 3, 8), "z": (2, 9, 3, 8), "w": (8,)}),
    (ac.ops.rope, {"x": (2, 9, 3, 8), "cos": (20, 4), "sin": (20, 4)}),
    (ac.ops.rope_interleaved, {"x": (2, 9, 3, 8), "cos": (20, 4), "sin": (20, 4)}),
]
ELSEWHERE = {
    "attention": laws.FOLDS, "gated_delta_rule": laws.SCANS, "short_conv": short_conv,
    "prefix_lm": None, "cross_attention": None,
}  # fmt: skip
"""Where the others are cut: by the laws, in ``test_short_conv.py``, and by tests below."""


@pytest.mark.parametrize("way", STATE_WAYS, ids=by_name)
@pytest.mark.parametrize("op", SCANS, ids=by_name)
def test_a_state_cut_anywhere(op: Known, way: Way) -> None:
    holds(op, way, Random(2), 35)


@pytest.mark.parametrize("way", HISTORY_WAYS, ids=by_name)
@pytest.mark.parametrize("op", FOLDS, ids=by_name)
def test_a_history_cut_anywhere(op: Known, way: Way) -> None:
    holds(op, way, Random(3), 35)


def cut(x: torch.Tensor, low: int, high: int, rows: bool) -> torch.Tensor:
    return x[:, low:high] if rows else x


@pytest.mark.parametrize("op, shapes", ROWS, ids=[op.declaration.name for op, _ in ROWS])
def test_rows_cut_anywhere(op: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    named = {n: randn(i, *shape).float() for i, (n, shape) in enumerate(shapes.items())}
    if "cos" in named:
        named["position"] = torch.arange(18, dtype=torch.int32).view(2, 9)
    exact, rough = op.reference(**named), op(**named, backend="torch")
    for edges in ((0, 4, 9), (0, 0, 1, 8, 9), tuple(range(10))):
        outs = [
            op(**{n: cut(x, a, b, n in ("x", "z", "position")) for n, x in named.items()},
               backend="torch")
            for a, b in pairwise(edges)
        ]  # fmt: skip
        hold(torch.cat(outs, 1), exact, rough, f"{op} {edges}", magnitude({"o": exact}))


@pytest.mark.parametrize("edges", [(0, 5, 12), (0, 4, 4, 11, 12), tuple(range(13))])
def test_queries_of_a_memory_cut_anywhere(edges: tuple[int, ...]) -> None:
    """The memory is whole for each of them."""
    q, k, v = (randn(i, 2, n, 4, 6).float() for i, n in enumerate((12, 9, 9)))
    k, v = k[:, :, :2], v[:, :, :2]
    exact = ac.ops.cross_attention.reference(q, k, v)
    rough = ac.ops.cross_attention(q, k, v, backend="torch")
    outs = [ac.ops.cross_attention(q[:, a:b], k, v, backend="torch") for a, b in pairwise(edges)]
    hold(torch.cat(outs, 1), exact, rough, "pieces", magnitude({"o": exact}))


@pytest.mark.parametrize("edges", [(0, 5, 12), (0, 7, 7, 11, 12), (0, 5, *range(6, 13))])
def test_a_prefix_cut_behind_its_end(edges: tuple[int, ...]) -> None:
    """Inside a prefix no cut is the same: its first tokens see its last ones."""
    q, k, v = (randn(i, 2, 12, 4, 6).float() for i in range(3))
    k, v = k[:, :, :2].contiguous(), v[:, :, :2].contiguous()
    prefix = torch.tensor([5, 2], dtype=torch.int32)
    op = ac.ops.prefix_lm
    exact = op.reference(q, k, v, prefix)
    rough = op(q, k, v, prefix, backend="torch")
    sizes = {"B": 2, "Hkv": 2, "D": 6, "E": 6}
    cache = ac.DenseCache.allocate(op, sizes=sizes, capacity=12, dtype=torch.float32)
    outs = [
        op(q[:, a:b], k[:, a:b], v[:, a:b], prefix, cache=cache, backend="torch")
        for a, b in pairwise(edges)
    ]
    hold(torch.cat(outs, 1), exact, rough, "pieces", magnitude({"o": exact}))


def test_every_op_of_the_library_is_cut_somewhere() -> None:
    here = {str(k) for k in (*SCANS, *FOLDS)} | {op.declaration.name for op, _ in ROWS}
    known = {name for name, held in ELSEWHERE.items() if isinstance(held, list)}
    assert known <= {str(k) for k in (*laws.FOLDS, *laws.SCANS)}
    assert callable(short_conv.test_a_window_cut_anywhere)
    assert not here & set(ELSEWHERE) and here | set(ELSEWHERE) == set(ac.ops.__all__)
