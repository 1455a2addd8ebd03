"""A step of the delta rule in each order of loads, sums and stores that the tables name."""

import pytest
import torch

import attncc as ac
from attncc.codegen import plan_scan
from attncc.runtime import affine
from attncc.runtime.bind import bind
from attncc.runtime.sources import call_sources
from tests.gpu.checking import DEVICE, check, unit

pytestmark = pytest.mark.gpu
DELTA = ac.ops.gated_delta_rule


def delta(batch, dtype=torch.bfloat16):
    torch.manual_seed(batch)
    g = torch.nn.functional.logsigmoid(torch.randn(batch, 1, 32, device=DEVICE) + 2)
    return {
        "q": unit(batch, 1, 16, 128, dtype=dtype), "k": unit(batch, 1, 16, 128, dtype=dtype),
        "v": torch.randn(batch, 1, 32, 128, device=DEVICE).to(dtype), "g": g,
        "beta": 2 * torch.rand(batch, 1, 32, device=DEVICE),
        "s": torch.randn(batch, 32, 128, 128, device=DEVICE),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [(1, torch.bfloat16), (33, torch.bfloat16), (33, torch.float16), (33, torch.float32)],
    ids=str,
)
def test_few_and_many_states(batch, dtype):
    args = delta(batch, dtype)
    call, _ = bind(DELTA.declaration, (), args)
    plan = call_sources(call, "decode")[0].plan
    assert plan.own_loads == (batch > 1) == (not plan.states_first)
    assert plan.joint == (batch > 1 and dtype is not torch.float32)
    check(DELTA, **args, phase="decode")


def test_in_a_pool_with_sequences_that_have_no_slot():
    args = delta(40)
    pool = torch.randn(50, 32, 128, 128, device=DEVICE)
    slots = torch.randperm(50, device=DEVICE)[:40].int()
    start = pool[slots.long()]
    start[7] = 0
    want = DELTA.decode(**{**args, "s": start}, backend="triton")
    slots[7] = -1
    before = pool.clone()
    o = DELTA.decode(**{**args, "s": ac.StatePool(pool, slots)}, backend="triton")
    assert torch.equal(o, want.o)
    used = slots >= 0
    assert torch.equal(pool[slots[used].long()], want.s[used])
    others = torch.ones(50, dtype=torch.bool, device=DEVICE)
    others[slots[used].long()] = False
    assert torch.equal(pool[others], before[others])


def test_more_sequences_than_a_grids_second_axis_holds(monkeypatch):
    monkeypatch.setattr(plan_scan, "MOST_APART", 32)
    monkeypatch.setattr(affine, "_PLANS", {})
    monkeypatch.setattr(affine, "_FOUND", {})
    check(DELTA, **delta(33), phase="decode")
