"""Warp-specialised softmax prefill on the GPU, against the fp64 interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_gluon import WarpPlan
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.runtime.backends import run_kernels, spec_of
from attncc.runtime.bind import bind
from attncc.runtime.softmax import prepare
from tests.gluon_ops import CASES, extras
from tests.gpu.checking import DEVICE, check, offsets

pytestmark = [pytest.mark.gpu, pytest.mark.gluon]
PROPERTY = settings(
    max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
LENGTHS = st.sampled_from([0, 1, 2, 31, 33, 64, 127, 128, 129, 200, 500])
SHAPES = [(128, 128), (200, 200), (130, 700), (700, 130), (1, 300), (512, 0)]


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")


def qkv(batch, tokens, history, heads, group, dim, dtype):
    """Random operands."""
    q = torch.randn(batch, tokens, heads * group, dim, device=DEVICE, dtype=dtype)
    k = torch.randn(batch, history, heads, dim, device=DEVICE, dtype=dtype)
    v = torch.randn(batch, history, heads, dim, device=DEVICE, dtype=dtype)
    return q, k, v


def test_the_plan_is_the_warp_specialised_one():
    call, _ = bind(ac.ops.attention.declaration, qkv(2, 256, 256, 2, 4, 128, torch.bfloat16), {})
    spec = replace(spec_of(call), dialect=Dialect.GLUON)
    kernels = prepare(call.program, analyse(call.program).softmax, spec, "prefill")
    assert isinstance(kernels.whole.plan, WarpPlan) and not kernels.parts


KINDS = [(name, 128, torch.bfloat16) for name in CASES]
KINDS += [(name, 64, torch.float16) for name in ("causal", "windowed", "capped", "documents")]


@pytest.mark.parametrize(("name", "dim", "dtype"), KINDS)
def test_scores_and_masks(name, dim, dtype):
    for tokens, history in SHAPES:
        if name == "documents" and (not history or tokens > history):
            continue
        args = qkv(2, tokens, history, 2, 4, dim, dtype)
        more = extras(name, args[0], history)
        check(CASES[name], *args, **more, return_lse=True, backend="gluon")


@pytest.mark.parametrize(("name", "dim", "dtype"), KINDS)
def test_forms_without_an_lse(name, dim, dtype):
    """Scores linear in positions, tanh as a series, wide stores, two tiles of queries."""
    for tokens, history in [*SHAPES, (3000, 3000)]:
        if name == "documents" and (not history or tokens > history):
            continue
        args = qkv(2, tokens, history, 2, 4, dim, dtype)
        check(CASES[name], *args, **extras(name, args[0], history), backend="gluon")


@pytest.mark.parametrize("size", [4.0, 40.0])
def test_scores_that_a_cap_saturates(size):
    q, k, v = qkv(1, 300, 2048, 2, 4, 128, torch.bfloat16)
    for cap in (30.0, 50.0, -30.0):
        check(ac.ops.soft_cap, q * size, k, v, cap=cap, backend="gluon")


@pytest.mark.parametrize(("name", "group"), [
    ("causal", 1), ("causal", 6), ("alibi", 6), ("alibi", 8),
])  # fmt: skip
def test_groups(name, group):
    args = qkv(2, 300, 400, 2, group, 128, torch.bfloat16)
    check(CASES[name], *args, **extras(name, args[0], 400), return_lse=True, backend="gluon")


@pytest.mark.parametrize("dim", [64, 128])
@given(st.data())
@PROPERTY
def test_any_lengths(dim, data):
    tokens, past = data.draw(LENGTHS), data.draw(LENGTHS)
    batch = data.draw(st.sampled_from([1, 3]))
    args = qkv(batch, tokens, tokens + past, 2, 4, dim, torch.bfloat16)
    lse = data.draw(st.booleans())
    check(ac.ops.attention, *args, return_lse=lse, backend="gluon")


@given(st.lists(LENGTHS, min_size=1, max_size=7))
@PROPERTY
def test_packed_sequences_with_empty_ones(lengths):
    total = sum(lengths)
    q, k, v = (x[0] for x in qkv(1, total, total, 2, 4, 128, torch.bfloat16))
    cu = offsets(lengths)
    check(ac.ops.attention, q, k, v, cu_seqlens=cu, return_lse=True, backend="gluon")


@given(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=5))
@PROPERTY
def test_packed_histories_of_other_lengths(lengths):
    queries, keys = ([a for a, _ in lengths], [b for _, b in lengths])
    q, _, _ = (x[0] for x in qkv(1, sum(queries), 0, 2, 4, 128, torch.bfloat16))
    _, k, v = (x[0] for x in qkv(1, 0, sum(keys), 2, 4, 128, torch.bfloat16))
    where = {"cu_seqlens": offsets(queries), "cu_seqlens_k": offsets(keys)}
    check(ac.ops.attention, q, k, v, **where, return_lse=True, backend="gluon")


@pytest.mark.parametrize(("name", "group"), [
    ("windowed", 1), ("windowed", 6), ("gated", 4), ("documents", 4), ("full", 6),
])  # fmt: skip
def test_masks_of_packed_sequences(name, group):
    lengths = [0, 300, 1, 64, 0, 135, 128]
    total = sum(lengths)
    args = qkv(1, total, total, 2, group, 128, torch.bfloat16)
    more = extras(name, args[0], total)
    own = {n: x[0] if isinstance(x, torch.Tensor) and x.dim() > 1 else x for n, x in more.items()}
    q, k, v = (x[0] for x in args)
    cu = offsets(lengths)
    for lse in (True, False):
        check(CASES[name], q, k, v, cu_seqlens=cu, **own, return_lse=lse, backend="gluon")


def test_a_bad_sequence_stays_alone():
    lengths = [100, 70, 200]
    q, k, v = (x[0] for x in qkv(1, 370, 370, 2, 4, 128, torch.bfloat16))
    cu = offsets(lengths)
    good = ac.ops.attention(q, k, v, cu_seqlens=cu, backend="gluon")
    for x in (q, k, v):
        x[100:170] = torch.nan
    bad = ac.ops.attention(q, k, v, cu_seqlens=cu, backend="gluon")
    assert bad[100:170].isnan().all()
    assert torch.equal(bad[:100], good[:100]) and torch.equal(bad[170:], good[170:])


@pytest.mark.parametrize("name", ["causal", "documents", "windowed"])
def test_repeated_runs_are_bitwise_equal(name):
    args = qkv(2, 3000, 3000, 4, 4, 128, torch.bfloat16)
    more = extras(name, args[0], 3000)
    first = CASES[name](*args, **more, return_lse=True, backend="gluon")
    for _ in range(20):
        again = CASES[name](*args, **more, return_lse=True, backend="gluon")
        assert torch.equal(again.o, first.o) and torch.equal(again.lse, first.lse)


def test_many_more_tiles_than_programs():
    check(ac.ops.attention, *qkv(3, 2000, 2000, 8, 4, 64, torch.bfloat16), backend="gluon")


def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity():
    q, k, v = qkv(1, 300, 100, 1, 1, 128, torch.bfloat16)
    o, lse = ac.ops.attention(q, k, v, return_lse=True, backend="gluon")
    assert not o[0, :200].any() and torch.isneginf(lse[0, :200]).all()
    assert torch.isfinite(lse[0, 200:]).all()
    o, lse = ac.ops.attention(q, k[:, :0], v[:, :0], return_lse=True, backend="gluon")
    assert not o.any() and torch.isneginf(lse).all()


def test_huge_negative_scores_have_an_exact_softmax():
    q = torch.full((1, 128, 1, 128), 64.0, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.full_like(q, -64.0), torch.ones_like(q)
    o, lse = ac.ops.attention(q, k, v, return_lse=True, backend="gluon")
    assert (o == 1).all()
    counts = torch.arange(1, 129, device=DEVICE, dtype=torch.float32)
    exact = -524288 / 128**0.5 + counts.log()
    assert torch.allclose(lse.flatten(), exact, rtol=1e-6)


def test_strides_and_expanded_batches():
    q, k, v = qkv(2, 260, 260, 2, 4, 128, torch.bfloat16)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check(ac.ops.attention, *turned, backend="gluon")
    shared = [x[:1].expand(2, -1, -1, -1) for x in (k, v)]
    check(ac.ops.attention, q, *shared, backend="gluon")
    wide = torch.randn(2, 260, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    check(ac.ops.attention, wide[:, :, :8], wide[:, :, 8:10], wide[:, :, 10:12], backend="gluon")


def test_a_captured_graph_replays():
    q, k, v = qkv(2, 300, 300, 2, 4, 128, torch.bfloat16)
    out = torch.empty_like(q)
    ac.ops.attention(q, k, v, out=out, backend="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ac.ops.attention(q, k, v, out=out, backend="gluon")
    for x in (q, k, v):
        x.normal_()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, ac.ops.attention(q, k, v, backend="gluon"))


def entry(**choose):
    """A table's entry for causal prefill of 128."""
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    facts = (("phase", "prefill"), ("rows", "many"))
    return TableEntry("by-test", Family.WARP, facts, (), tuple(choose.items()), measured)


@pytest.mark.parametrize("choose", [
    {"block_n": 64, "stages": 3}, {"block_n": 128, "stages": 3}, {"packed_rows": False},
])  # fmt: skip
def test_choices_of_a_table_give_the_same_answer(choose):
    q, k, v = qkv(2, 700, 700, 2, 4, 128, torch.bfloat16)
    call, _ = bind(ac.ops.attention.declaration, (q, k, v), {})
    spec = replace(spec_of(call), tuned=PlanTable((entry(**choose),), "by-test"))
    run_kernels(call, analyse(call.program), spec, "prefill")
    kernels = prepare(call.program, analyse(call.program).softmax, spec, "prefill")
    assert isinstance(kernels.whole.plan, WarpPlan) and kernels.whole.plan.chosen == "by-test"
    usual = ac.ops.attention(q, k, v, backend="triton")
    assert (call.outputs["o"].float() - usual.float()).abs().max() < 2e-2
