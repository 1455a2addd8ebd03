"""Outputs that read an affine state across its updates' axis, beside the fp64 oracle."""

import pytest
import torch

import attncc as ac
from attncc.runtime.bind import bind
from attncc.runtime.sources import call_sources
from tests.across_ops import OJA, oja, queries, two_queries
from tests.gpu.checking import DEVICE, check, eager, offsets
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.gluon
@pytest.mark.parametrize(("side", "gate"), [(128, 8.0), (64, 1.0)])
def test_systems_in_gluon(side, gate):
    args, s = oja(200, 1, 2, side, side, batch=2, gate=gate, device=DEVICE)
    call, _ = bind(OJA.declaration, (), {**args, "s": s})
    assert [x.plan.phase for x in call_sources(call, "prefill")][-1] == "across"
    check(OJA, **args, s=s, backend="auto")


@pytest.mark.gluon
def test_packed_sequences_in_a_pool():
    args, _ = oja(200, 2, 1, 128, 64, gate=0.1, dtype=torch.float16, device=DEVICE)
    own = {n: x[0] for n, x in args.items()} | {"cu_seqlens": offsets([0, 130, 1, 69])}
    start = torch.randn(4, 2, 128, 64, device=DEVICE)
    pool = torch.full((6, 2, 128, 64), 7.5, device=DEVICE)
    slots = torch.tensor([4, 0, 2, 5], device=DEVICE)
    pool[slots] = start
    exact_s, exact_o = OJA.reference(**own, s=start)
    rough = eager(OJA, (), {**own, "s": start})
    o = OJA(**own, s=ac.StatePool(pool, slots.int()))
    assert_close(o, exact_o, rough["o"], o.dtype, "o")
    assert_close(pool[slots], exact_s, rough["s"], torch.float32, "s")
    assert torch.equal(pool[4], start[0]) and bool((pool[[1, 3]] == 7.5).all())


def test_two_reads_and_a_norm_over_them():
    args, s = queries(130, 2, 64, 64, device=DEVICE)
    check(two_queries, **args, s=s)
