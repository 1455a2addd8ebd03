"""One launch that merges: the last program of a tile to come finishes it, call after call."""

import itertools

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan_softmax import SoftmaxPlans, plan_softmax
from attncc.runtime import softmax
from attncc.runtime.arrivals import zeroed
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from tests.interpreter import test_caches, test_softmax
from tests.interpreter.test_states import check
from tests.strategies import randn

ATTENTION = ac.ops.attention


def inputs(batch, tokens, history, *, group=4, width=32, dtype=torch.bfloat16):
    """q, k, v with two key heads."""
    shapes = ((batch, tokens, 2 * group), (batch, history, 2), (batch, history, 2))
    return [randn(i, *shape, width, dtype=dtype) for i, shape in enumerate(shapes)]


def launched(op, *args, phase="decode", **kwargs):
    """The plans of a call."""
    call, _ = bind(op.declaration, args, kwargs)
    form = analyse(call.program).softmax
    plans = plan_softmax(call.program, form, spec_of(call), phase)
    assert isinstance(plans, SoftmaxPlans)
    return plans


def counters():
    """All counters that a launch here would find."""
    return zeroed(1, torch.device("cpu"))


def test_few_rows_are_merged_in_one_launch_and_many_are_not():
    plans = launched(ATTENTION, *inputs(2, 1, 300))
    assert plans.split.fused is not None and plans.merge is None
    plans = launched(ATTENTION, *inputs(2, 60, 300), phase="prefill")
    assert plans.split.fused is None and plans.merge is not None


@pytest.mark.parametrize("tokens", [1, 3])
def test_counters_are_zero_again_after_every_call(tokens):
    for splits in (3, 5, 2):
        test_softmax.check(ATTENTION, *inputs(2, tokens, 300), phase="decode", splits=splits)
        assert not counters().any()


def test_more_splits_than_blocks_leave_empty_partials():
    test_softmax.check(ATTENTION, *inputs(2, 1, 70), phase="decode", splits=7)
    test_softmax.check(ATTENTION, *inputs(2, 1, 1), phase="decode", splits=3)
    assert not counters().any()


def test_rows_of_several_tiles_and_groups_that_are_no_power_of_two():
    """70 rows a point: every tile has a counter of its own, and the last tile is not full."""
    test_softmax.check(ATTENTION, *inputs(1, 10, 150, group=7), phase="decode", splits=2)
    assert not counters().any()


@pytest.mark.parametrize("page", [16, 128])
def test_through_pages_with_sequences_of_no_token(page):
    counts, held = [2, 0, 1], [70, 5, 130]
    cache = test_caches.shuffled(ATTENTION, held, 192, page)
    total = sum(counts)
    q, k, v = (randn(i, total, h, 32, dtype=torch.bfloat16) for i, h in enumerate((8, 2, 2)))
    cu = torch.tensor([0, *itertools.accumulate(counts)])
    test_caches.check(ATTENTION, q, k, v, cache=cache, cu_seqlens=cu, phase="decode", splits=3)
    assert not counters().any()


def test_the_same_bits_every_time():
    args = inputs(2, 1, 400)
    found = []
    for _ in range(2):
        call, _ = bind(ATTENTION.declaration, args, {"return_lse": True})
        softmax.run(call, analyse(call.program).softmax, spec_of(call), "decode", splits=4)
        found.append((call.outputs["o"].clone(), call.lse.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("tokens", [67, 5])
def test_two_passes_of_a_prompt_are_merged_by_many_rows(tokens):
    shapes = ((1, tokens, 2, 16), *[(9, 1, 16)] * 2, *[(1, tokens, 1, 16)] * 2)
    args = [randn(i, *shape, dtype=torch.float32) for i, shape in enumerate(shapes)]
    plans = launched(ac.ops.cascade, *args, phase="prefill")
    assert [plan.phase for plan in plans.fewer] == (["merge_2"] if tokens > 32 else [])
    check(ac.ops.cascade, **dict(zip(("q", "pk", "pv", "k", "v"), args, strict=True)))
