"""However a sequence is cut, the library's ops give the same: the law of ``tests/laws``."""

from random import Random

import pytest

import attncc as ac
from tests.drawn.known import Known
from tests.laws.test_segmentation import HISTORY_WAYS, STATE_WAYS, Way, by_name, holds

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
]


@pytest.mark.parametrize("way", STATE_WAYS, ids=by_name)
@pytest.mark.parametrize("op", SCANS, ids=by_name)
def test_a_state_cut_anywhere(op: Known, way: Way) -> None:
    holds(op, way, Random(2), 35)


@pytest.mark.parametrize("way", HISTORY_WAYS, ids=by_name)
@pytest.mark.parametrize("op", FOLDS, ids=by_name)
def test_a_history_cut_anywhere(op: Known, way: Way) -> None:
    holds(op, way, Random(3), 35)
