"""The warp-specialised state pass on the GPU, against the fp64 interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.codegen.plan_gluon_systems import SystemsPlan
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.dsl.errors import BackendError
from attncc.runtime import affine, backends
from attncc.runtime.backends import run_kernels, spec_of
from attncc.runtime.bind import bind
from attncc.runtime.recording import KEPT
from attncc.runtime.sources import call_sources
from tests.gpu.checking import DEVICE, check, check_parts, offsets
from tests.state_pass_ops import OPS, arguments

pytestmark = [pytest.mark.gpu, pytest.mark.gluon]
GDR = ac.ops.gated_delta_rule
PROPERTY = settings(
    max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
LENGTHS = st.sampled_from([0, 1, 2, 33, 63, 64, 65, 128, 200, 500])


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")


def delta(batch, tokens, heads=2, key=128, value=128, dtype=torch.bfloat16):
    """Random arguments of a gated delta rule with two value heads a key head, and a state."""
    return arguments("delta", batch, tokens, heads, key, value, dtype, DEVICE)


def run(op, *args, **kwargs):
    """Run with the state pass in Gluon and hold every result to the contract."""
    return check(op, *args, backend="gluon", **kwargs)


def test_the_plan_is_the_warp_specialised_one():
    args, state = delta(1, 200)
    call, _ = bind(GDR.declaration, args, {"s": state})
    spec = replace(spec_of(call), dialect=Dialect.GLUON)
    found = call_sources(call, "prefill", spec=spec)
    plans = {s.plan.phase: s.plan for s in found}
    assert all(isinstance(plans[p], WarpStatePlan) for p in ("state", "summary", "local"))
    assert isinstance(plans["systems"], SystemsPlan) and "prepare" not in plans


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(st.data())
@PROPERTY
def test_any_length_with_or_without_a_state(dtype, data):
    tokens, batch = data.draw(LENGTHS), data.draw(st.sampled_from([1, 3]))
    args, state = delta(batch, tokens, dtype=dtype)
    run(GDR, *args, s=state if data.draw(st.booleans()) else None)


@given(st.lists(LENGTHS, min_size=1, max_size=6))
@PROPERTY
def test_packed_sequences_keep_empty_states_bit_for_bit(lengths):
    args, _ = delta(1, sum(lengths))
    state = torch.randn(len(lengths), 4, 128, 128, device=DEVICE)
    result = run(GDR, *(x[0] for x in args), s=state, cu_seqlens=offsets(lengths))
    for b, n in enumerate(lengths):
        assert n or torch.equal(result["s"][b], state[b])


TABLES = [*((name, (64, 64)) for name in OPS), ("two_rows", (128, 128)), ("linear", (128, 128))]


@pytest.mark.parametrize(("name", "sizes"), TABLES)
def test_other_tables(name, sizes):
    for tokens in (1, 33, 200):
        args, state = arguments(name, 2, tokens, 3, *sizes, device=DEVICE)
        run(OPS[name], *args, s=state)


TWO = OPS["two_rows"]


def several(rows, batch, tokens, value=128, heads=2, dtype=torch.bfloat16):
    """Random arguments of an op with some rows a token, and a state."""
    return arguments("two_rows", batch, tokens, heads, 128, value, dtype, DEVICE, rows)


@pytest.mark.parametrize("value", [64, 128])
@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_rows_of_a_token(rows, value):
    each = 64 // rows
    for tokens in (1, each - 1, each, each + 1, 7 * each, 333):
        args, state = several(rows, 2, tokens, value, 3)
        run(TWO, *args, s=state)
    args, state = several(rows, 1, 2 * each + 3, value, dtype=torch.float16)
    run(TWO, *args)


@pytest.mark.parametrize("rows", [2, 3, 4])
@given(st.lists(st.sampled_from([0, 1, 15, 16, 17, 21, 22, 42, 64, 200]), min_size=1, max_size=6))
@PROPERTY
def test_packed_rows_of_a_token(rows, lengths):
    args, _ = several(rows, 1, sum(lengths), 64)
    q, k, v, g, beta = (x[0] for x in args)
    state = torch.randn(len(lengths), 2, 128, 64, device=DEVICE)
    cu = offsets(lengths)  # strong gates, and updates that overshoot
    named = {"s": state, "cu_seqlens": cu, "sizes": {"N": rows}}  # no token fixes N
    result = run(TWO, q, k, v, 20 * g, 2 * beta, **named)
    for b, n in enumerate(lengths):
        assert n or torch.equal(result["s"][b], state[b])


@pytest.mark.parametrize("rows", [2, 3])
def test_long_sequences_with_rows_of_a_token_are_cut(rows):
    args, state = several(rows, 1, 2500, 64)
    run(TWO, *args, s=state)
    states = torch.randn(3, 2, 128, 64, device=DEVICE)
    cu = offsets([0, 2400, 100])
    result = run(TWO, *(x[0] for x in args), s=states, cu_seqlens=cu)
    assert torch.equal(result["s"][0], states[0])


@pytest.mark.parametrize("rows", [3, 4])
def test_rows_of_a_bad_sequence_stay_alone(rows):
    lengths = [20, 43, 137]
    args, _ = several(rows, 1, 200)
    args, cu = [x[0] for x in args], offsets(lengths)
    good = TWO(*args, cu_seqlens=cu, backend="gluon")
    for x in args:
        each = len(x) // 200
        x[20 * each : 63 * each] = torch.nan
    bad = TWO(*args, cu_seqlens=cu, backend="gluon")
    assert torch.equal(bad.o[:20], good.o[:20]) and torch.equal(bad.o[63:], good.o[63:])
    assert torch.equal(bad.s[[0, 2]], good.s[[0, 2]])


def test_one_row_a_token_is_the_gated_delta_rule_bit_for_bit():
    (q, k, v, g, beta), state = several(1, 2, 300)
    one = TWO(q, k, v, g, beta, s=state, backend="gluon")
    rule = GDR(q, k, v, g, beta, s=state, backend="gluon")
    assert torch.equal(one.o, rule.o) and torch.equal(one.s, rule.s)


@pytest.mark.parametrize(("key", "value"), [(128, 64), (64, 256)])
def test_head_dims(key, value):
    args, state = delta(1, 200, key=key, value=value)
    run(GDR, *args, s=state)


@pytest.mark.parametrize("heads", [1, 3, 32])
def test_without_gate_or_beta(heads):
    (q, k, v, _, beta), _ = delta(1, 150, heads)
    run(GDR, q, k, v, beta=beta)
    run(GDR, q, k, v)


def test_states_of_16_bits():
    args, state = delta(2, 100)
    run(GDR, *args, s=state.bfloat16())


def test_keys_that_are_nearly_one_and_a_beta_of_two():
    (q, _, v, g, beta), state = delta(1, 300)
    near = torch.randn(1, 1, 2, 128, device=DEVICE) + 0.25 * torch.randn_like(q.float())
    k = torch.nn.functional.normalize(near, dim=-1).to(q.dtype)
    run(GDR, q, k, v, 0.01 * g, torch.full_like(beta, 2.0), s=state)


def test_pools_keep_what_nobody_names():
    args, _ = delta(3, 100)
    pool = torch.randn(6, 4, 128, 128, device=DEVICE)
    before = pool.clone()
    slots = torch.tensor([4, -1, 1], device=DEVICE, dtype=torch.int32)
    o = GDR(*args, s=ac.StatePool(pool, slots), backend="gluon")
    given_state = before[[4, 0, 1]].clone()
    given_state[1] = 0
    exact = GDR.reference(*args, s=given_state)
    assert (o.double() - exact.o).abs().max() < 2e-2 * exact.o.abs().max()
    assert (pool[[4, 1]].double() - exact.s[[0, 2]]).abs().max() < 2e-2 * exact.s.abs().max()
    assert torch.equal(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


@pytest.mark.parametrize("name", ["delta", "linear"])
@pytest.mark.parametrize("segments", [2, 5])
def test_segments(name, segments):
    args, state = arguments(name, 1, 700, 2, 128, 128, device=DEVICE)
    check_parts(OPS[name], args, state, segments)


def test_long_sequences_of_few_heads_are_cut():
    args, state = delta(1, 2500)
    run(GDR, *args, s=state)
    states = torch.randn(3, 4, 128, 128, device=DEVICE)
    cu = offsets([0, 2400, 100])
    result = run(GDR, *(x[0] for x in args), s=states, cu_seqlens=cu)
    assert torch.equal(result["s"][0], states[0])


def entry(**choose):
    """A table that fixes choices of the state pass."""
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    made = TableEntry("by-test", Family.WARP_STATE, (), (), tuple(choose.items()), measured)
    return PlanTable((made,), "by-test")


def by_choice(args, state, **choose):
    """Results with one choice of the state pass."""
    call, _ = bind(GDR.declaration, args, {"s": state})
    spec = replace(spec_of(call), tuned=entry(**choose))
    run_kernels(call, analyse(call.program), spec, "prefill", parts=1)
    held = [c for c in affine._FOUND.values() if isinstance(c, affine.Chunked)]
    assert any(c.plans.state.chosen == "by-test" for c in held)
    return call.outputs["o"], call.final_states["s"]


@pytest.mark.parametrize("choose", [
    {"consumers": 2}, {"consumers": 1, "stages": 1}, {"consumers": 1, "reader": True},
    {"loaders": 4}, {"chained": True},
    {"blockwise": True}, {"consumers": 2, "resident": True},
])  # fmt: skip
def test_choices_of_a_table_give_the_same_bits(choose):
    args, state = delta(2, 400)
    found = by_choice(args, state, **choose)
    blocks = choose.get("blockwise", False)  # such systems have bits of their own
    usual = by_choice(args, state, systems=True, blockwise=blocks)
    assert all(torch.equal(a, b) for a, b in zip(found, usual, strict=True))


@pytest.fixture
def choose(monkeypatch):
    """Makes calls take a choice of the state pass."""

    def take(**fixed):
        made = entry(**fixed)
        monkeypatch.setattr(backends, "local_table", lambda target: made)
        KEPT.choose_again()

    yield take
    KEPT.choose_again()


READER = {"reader": True, "consumers": 1}
TOGETHER = READER | {
    "columnwise": True, "leaf": 16, "loaders": 3, "chained": True, "summary_consumers": 2,
}  # fmt: skip


@pytest.mark.parametrize("fixed", [
    READER, {"columnwise": True}, {"columnwise": True, "leaf": 16}, {"loaders": 4, "consumers": 2},
    {"chained": True}, TOGETHER, {"system_registers": 168}, {"system_registers": 168} | TOGETHER,
    {"blockwise": True}, READER | {"blockwise": True, "chained": True},
])  # fmt: skip
def test_other_choices_hold_the_contract(fixed, choose):
    choose(**fixed)
    for name in ("delta", "two_rows", "linear", "gated_output"):
        for tokens in (1, 33, 200):
            args, state = arguments(name, 2, tokens, 3, 128, 128, device=DEVICE)
            run(OPS[name], *args, s=state)
    args, state = several(3, 2, 150)
    run(TWO, *args, s=state)
    args, state = delta(1, 2500)  # cut into segments
    run(GDR, *args, s=state)
    args, state = delta(1, 200, dtype=torch.float16)
    run(GDR, *args, s=state)
    args, _ = delta(1, 330)
    state = torch.randn(4, 4, 128, 128, device=DEVICE)
    cu = offsets([0, 65, 0, 265])
    result = run(GDR, *(x[0] for x in args), s=state, cu_seqlens=cu)
    assert torch.equal(result["s"][[0, 2]], state[[0, 2]])


def test_programs_go_from_sequence_to_sequence(choose):
    lengths = [130, 0, 1, 64, 200]
    args, one = arguments("delta", 1, sum(lengths), 30, 128, 128, device=DEVICE)
    state, cu = torch.randn(5, *one.shape[1:], device=DEVICE), offsets(lengths)
    more = {"resident": True, "consumers": 2, "blockwise": True}
    found = []
    for fixed in (more, {"consumers": 2, "blockwise": True}):
        choose(**fixed)
        found.append(GDR(*(x[0] for x in args), s=state, cu_seqlens=cu, backend="gluon"))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(found[0][0][1], state[1])


def test_launched_early_they_still_wait_for_each_other(choose):
    choose(**TOGETHER)
    for shape in [(2, 3000, 8), (1, 6000, 2)]:
        args, state = delta(*shape)
        first = GDR(*args, s=state, backend="gluon")
        for _ in range(10):
            again = GDR(*args, s=state, backend="gluon")
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("fixed", [
    {"columnwise": True, "leaf": 16}, {"columnwise": True, "leaf": 32}, {"blockwise": True},
])  # fmt: skip
def test_other_inverses_of_keys_that_are_nearly_one(fixed, choose):
    choose(**fixed)
    test_keys_that_are_nearly_one_and_a_beta_of_two()


def test_a_bad_sequence_stays_alone():
    args, _ = delta(1, 370)
    args = [x[0] for x in args]
    cu = offsets([100, 70, 200])
    good = GDR(*args, cu_seqlens=cu, backend="gluon")
    for x in args:
        x[100:170] = torch.nan
    bad = GDR(*args, cu_seqlens=cu, backend="gluon")
    assert bad.o[100:170].isnan().all()
    assert torch.equal(bad.o[:100], good.o[:100]) and torch.equal(bad.o[170:], good.o[170:])
    assert torch.equal(bad.s[[0, 2]], good.s[[0, 2]])


def test_repeated_runs_are_bitwise_equal():
    args, state = delta(2, 3000, 8)
    first = GDR(*args, s=state, backend="gluon")
    for _ in range(10):
        again = GDR(*args, s=state, backend="gluon")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_gate_of_minus_infinity_forgets_everything():
    (q, k, v, g, beta), _ = delta(1, 130)
    g[:, 70] = -torch.inf
    result = run(GDR, q, k, v, g, beta)
    assert all(t.isfinite().all() for t in result.values())


def test_strides_of_a_fused_projection():
    wide = torch.randn(2, 150, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    wide = torch.nn.functional.normalize(wide.float(), dim=-1).bfloat16()
    (_, _, _, g, beta), state = delta(2, 150)
    run(GDR, wide[:, :, :2], wide[:, :, 2:4], wide[:, :, 4:], g, beta, s=state)


def test_a_captured_graph_replays_with_other_cuts():
    args, _ = delta(1, 300)
    args = [x[0] for x in args]
    cu = offsets([100, 200])
    out = {"o": torch.empty_like(args[2]), "s": torch.empty(2, 4, 128, 128, device=DEVICE)}

    def step():
        GDR(*args, cu_seqlens=cu, out=out, backend="gluon")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([100, 200], [0, 300], [299, 1]):
        cu.copy_(offsets(lengths))
        graph.replay()
        exact = GDR.reference(*args, cu_seqlens=cu)
        assert (out["o"].double() - exact.o).abs().max() < 2e-2 * exact.o.abs().max() + 1e-3
        assert (out["s"].double() - exact.s).abs().max() < 2e-2 * exact.s.abs().max()


def test_what_has_no_such_form_says_why():
    args, _ = delta(1, 100, key=128, value=80)
    with pytest.raises(BackendError, match="80 is no multiple of 64"):
        GDR(*args, backend="gluon")
    args, _ = delta(1, 100, dtype=torch.float32)
    with pytest.raises(BackendError, match="operands of fp32"):
        GDR(*args, backend="gluon")
