"""The warp-specialised state pass on the CPU: its text runs on a machine that plays the warps.

The kernels before it run through Triton's interpreter; its own file runs as the Python it is, in
any order of warps and copies (``tests/codegen/gluon_machine.py``).
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attncc import ops
from attncc.codegen.emit.scan_sources import choose_plans
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, TensorArg
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.runtime import affine
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.eager.run import run as run_eager
from tests.codegen import cute_machine, gluon_machine
from tests.one_key import weak_gate
from tests.runtime.eager_ops import as_kernels
from tests.state_pass_ops import MORE, OPS, arguments
from tests.tolerance import assert_close

pytestmark = pytest.mark.played
PROPERTY = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))


def flat(plan, args):
    """Arguments in the order of the kernel's parameters, as a launch passes them."""
    found = []
    for arg in plan.args:
        found.append(args[arg.name])
        if isinstance(arg, TensorArg):
            found.extend(args[arg.name].stride()[:-1])
    return found


def table(**choose):
    """A table that fixes choices of the state pass."""
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    entry = TableEntry("by-test", Family.WARP_STATE, (), (), tuple(choose.items()), measured)
    return PlanTable((entry,), "by-test")


def results(op, args, kwargs):
    call, _ = bind(op.declaration, args, kwargs)
    return call, {**call.final_states, **call.outputs}


def check(
    monkeypatch, op, args, seed=0, segments=None, choose=(), dialect=Dialect.GLUON, ahead=None,
    **kwargs,
):  # fmt: skip
    """Run a call with the state pass in a dialect, and hold its results to the contract."""
    launch, seen = affine.launch, []

    def played(kernel, programs, values):
        plan = kernel.plan
        text, entry = kernel.source.text, kernel.source.entry
        match plan.dialect:
            case Dialect.GLUON:
                gluon_machine.run(text, entry, programs, flat(plan, values), seed)
            case Dialect.CUTEDSL:
                cute_machine.run(text, programs, flat(plan, values), seed)
            case Dialect.TRITON:
                launch(kernel, programs, values)
        seen.append(plan)

    monkeypatch.setattr(affine, "launch", played)
    call, named = results(op, args, kwargs)
    exact = op.reference(*args, **kwargs)
    exact = {"o": exact} if isinstance(exact, torch.Tensor) else exact._asdict()
    rough_call, rough = results(op, args, kwargs)
    run_eager(rough_call, as_kernels(analyse(rough_call.program)), round_operands=True)
    for tensor in named.values():
        tensor.fill_(torch.nan)
    spec = replace(spec_of(call), dialect=dialect, target="sm_90")
    if choose:
        spec = replace(spec, tuned=table(**dict(choose)))
    affine.run(call, analyse(call.program), spec, "prefill", segments=segments, ahead=ahead)
    states = [plan for plan in seen if isinstance(plan, WarpStatePlan)]
    assert states and {plan.dialect for plan in states} == {dialect}
    for name, tensor in named.items():
        label = f"{call.program.name}.{name}"
        assert_close(tensor, exact[name], rough[name], tensor.dtype, label)
    return named


@pytest.mark.parametrize("name", list(OPS))
def test_tables_of_the_domain(name, monkeypatch):
    torch.manual_seed(0)
    args, state = arguments(name, 1, 70, 1, 64, 64)
    check(monkeypatch, OPS[name], args, s=state)


@pytest.mark.parametrize(("consumers", "stages"), [(1, 1), (2, 2)])
def test_warpgroups_and_stages(consumers, stages, monkeypatch):
    torch.manual_seed(1)
    args, state = arguments("delta", 1, 130, 1, 128, 128)
    choose = (("consumers", consumers), ("stages", stages), ("systems", stages == 1))
    choose += (("loaders", 2 * consumers),)
    check(monkeypatch, OPS["delta"], args, s=state, choose=choose)


@pytest.mark.parametrize(("name", "rows", "stages"), [
    ("delta", 130, 1), ("delta", 130, 2), ("two_rows", 70, 2), ("linear", 70, 2),
    ("gated_output", 70, 2),
])  # fmt: skip
def test_a_warpgroup_that_reads(name, rows, stages, monkeypatch):
    torch.manual_seed(4)
    args, state = arguments(name, 1, rows, 1, 64, 64)
    for seed in range(3):
        choose = (("reader", True), ("stages", stages), ("consumers", 1))
        check(monkeypatch, OPS[name], args, seed, s=state, choose=choose)


@pytest.mark.parametrize(("name", "key", "tokens", "more", "segments"), [
    ("linear", 64, 70, {"stages": 2}, None), ("linear", 128, 200, {"totals": True}, 3),
    ("skipped", 64, 130, {"totals": True, "loaders": 2}, None), ("skipped", 64, 200, {}, 2),
])  # fmt: skip
def test_a_warpgroup_that_mixes(name, key, tokens, more, segments, monkeypatch):
    torch.manual_seed(10)
    args, state = arguments(name, 1, tokens, 1, key, 64)
    choose = (("mixing", True), ("reader", True), *more.items())
    for seed in range(2):
        check(monkeypatch, (OPS | MORE)[name], args, seed, segments, choose, s=state)


def test_rows_that_are_mixed_stay_in_their_sequence(monkeypatch):
    torch.manual_seed(11)
    args, _ = arguments("linear", 1, 150, 1, 64, 64)
    args = [x[0] for x in args]
    args[3][70] = -torch.inf  # forgets everything
    for x in args:
        x[90:110] = torch.nan
    cu = torch.tensor([0, 0, 90, 110, 150])
    named = check(monkeypatch, OPS["linear"], args, cu_seqlens=cu)
    assert named["o"][:90].isfinite().all() and named["o"][110:].isfinite().all()


@pytest.mark.parametrize(("name", "choose"), [
    ("delta", {"consumers": 2, "totals": True}), ("delta", {"reader": True, "totals": True}),
    ("two_rows", {"reader": True, "totals": True, "loaders": 4}),
])  # fmt: skip
def test_total_decays_come_with_the_copies(name, choose, monkeypatch):
    torch.manual_seed(12)
    args, state = arguments(name, 1, 130, 1, 64, 128)
    check(monkeypatch, OPS[name], args, s=state, choose=tuple(choose.items()))


@pytest.mark.parametrize(("name", "lengths"), [("delta", [70, 0, 130]), ("two_rows", [33, 60])])
def test_a_state_pass_that_waits_for_the_systems(name, lengths, monkeypatch):
    torch.manual_seed(13)
    args, _ = arguments(name, 1, sum(lengths), 2, 64, 64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    monkeypatch.setattr(affine, "fits", lambda *_: True)
    choose = (("reader", True), ("loaders", 2))
    check(monkeypatch, OPS[name], [x[0] for x in args], cu_seqlens=cu, choose=choose)


@pytest.mark.parametrize(("name", "lengths", "segments", "ahead"), [
    ("delta", [330], 2, 300), ("delta", [70, 0, 400], 3, 300), ("two_rows", [130], 2, 512),
])  # fmt: skip
def test_what_is_ahead_of_the_segments(name, lengths, segments, ahead, monkeypatch):
    torch.manual_seed(14)
    args, state = arguments(name, 1, sum(lengths), 1, 64, 64)
    state = torch.randn(len(lengths), *state.shape[1:])
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v, g, beta = (x[0] for x in args)
    args = (q, k, v, g / 64, beta)  # states outlive a segment
    choose = (("reader", True), ("loaders", 2))
    check(monkeypatch, OPS[name], args, 0, segments, choose, ahead=ahead, cu_seqlens=cu, s=state)


@pytest.mark.parametrize(("name", "leaf"), [
    ("delta", 16), ("delta", 32), ("read_first", 16), ("gated_output", 16), ("two_rows", 16),
])  # fmt: skip
def test_squares_column_by_column(name, leaf, monkeypatch):
    torch.manual_seed(5)
    args, state = arguments(name, 1, 130 if leaf == 16 else 70, 1, 64, 64)
    choose = (("columnwise", True), ("leaf", leaf), ("reader", True), ("loaders", 4))
    check(monkeypatch, OPS[name], args, s=state, choose=choose)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_column_by_column_with_keys_that_are_nearly_one(dtype, monkeypatch):
    torch.manual_seed(6)
    (q, _, v, g, beta), state = arguments("delta", 1, 130, 1, 64, 64, dtype)
    near = torch.randn(1, 1, *q.shape[2:]) + 0.25 * torch.randn_like(q.float())
    k = torch.nn.functional.normalize(near, dim=-1).to(q.dtype)
    choose = (("columnwise", True), ("leaf", 16))
    args = (q, k, v, 0.01 * g, torch.full_like(beta, 2.0))
    check(monkeypatch, OPS["delta"], args, s=state, choose=choose)


@pytest.mark.parametrize(("name", "rows", "tokens"), [
    ("delta", 1, 130), ("gated_output", 1, 70), ("two_rows", 2, 33), ("two_rows", 3, 45),
    ("two_rows", 5, 13),
])  # fmt: skip
def test_one_warp_solves_in_blocks(name, rows, tokens, monkeypatch):
    torch.manual_seed(10)
    args, state = arguments(name, 1, tokens, 1, 64, 64, rows=rows)
    check(monkeypatch, OPS[name], args, s=state, choose=(("blockwise", True),))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_of_keys_that_are_nearly_one(dtype, monkeypatch):
    torch.manual_seed(11)
    (q, _, v, g, beta), state = arguments("delta", 1, 130, 1, 64, 64, dtype)
    near = torch.randn(1, 1, *q.shape[2:]) + 0.25 * torch.randn_like(q.float())
    k = torch.nn.functional.normalize(near, dim=-1).to(q.dtype)
    args = (q, k, v, 0.01 * g, torch.full_like(beta, 2.0))
    check(monkeypatch, OPS["delta"], args, s=state, choose=(("blockwise", True),))


@pytest.mark.parametrize("segments", [None, 3])
def test_one_key_for_all_tokens_under_a_weak_gate(segments, monkeypatch):  # a14
    torch.manual_seed(12)
    args = weak_gate(200, torch.bfloat16)
    choose = () if segments else (("blockwise", True),)
    check(monkeypatch, ops.gated_delta_rule, args, segments=segments, choose=choose)


@pytest.mark.parametrize("name", ["read_first", "read_early"])
def test_rows_that_read_ahead_of_their_decay_are_not_solved_in_blocks(name):
    args, state = arguments(name, 1, 70, 1, 64, 64)
    call, _ = bind(OPS[name].declaration, args, {"s": state})
    spec = replace(spec_of(call), dialect=Dialect.GLUON, target="sm_90")
    spec = affine.completed(call, replace(spec, tuned=table(blockwise=True)))
    plans = choose_plans(call.program, analyse(call.program), spec, chunked=True)
    assert not plans.prepare.blockwise and plans.prepare.num_warps == 2


@pytest.mark.parametrize(("rows", "tokens", "value", "choose"), [
    (2, 33, 64, {}), (3, 45, 64, {"reader": True, "stages": 2}), (3, 43, 128, {"consumers": 2}),
    (3, 45, 64, {"columnwise": True, "leaf": 16}), (4, 17, 64, {"stages": 1}),
    (5, 13, 64, {"reader": True, "loaders": 3}),
])  # fmt: skip
def test_rows_of_a_token_follow_each_other(rows, tokens, value, choose, monkeypatch):
    torch.manual_seed(7)
    args, state = arguments("two_rows", 2, tokens, 1, 64, value, rows=rows)
    named = check(monkeypatch, OPS["two_rows"], args, s=state, choose=tuple(choose.items()))
    assert named["o"].isfinite().all()


def test_rows_of_a_bad_sequence_stay_alone(monkeypatch):
    torch.manual_seed(8)
    args, _ = arguments("two_rows", 1, 64, 1, 64, 64, rows=3)
    args = [x[0] for x in args]
    cu = torch.tensor([0, 20, 22, 64])  # the first ends within a chunk, the last has two
    for x in args:
        each = len(x) // 64
        x[20 * each : 22 * each] = torch.nan
    named = check(monkeypatch, OPS["two_rows"], args, cu_seqlens=cu)
    assert named["o"][:20].isfinite().all() and named["o"][22:].isfinite().all()


@pytest.mark.parametrize(("rows", "segments"), [(2, None), (3, None), (3, 2), (4, None)])
def test_packed_rows_of_a_token(rows, segments, monkeypatch):
    torch.manual_seed(9)
    lengths = [0, 22, 1, 64, 0]
    args, _ = arguments("two_rows", 1, sum(lengths), 1, 64, 64, rows=rows)
    (q, k, v, g, beta), state = (x[0] for x in args), torch.randn(len(lengths), 1, 64, 64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    hard = (q, k, v, 20 * g, 2 * beta)  # strong gates, and updates that overshoot
    named = check(
        monkeypatch, OPS["two_rows"], hard, s=state, cu_seqlens=cu, segments=segments
    )  # fmt: skip
    assert torch.equal(named["s"][[0, 4]], state[[0, 4]])


LENGTHS = st.lists(st.sampled_from([0, 1, 64, 65, 130]), min_size=1, max_size=3)


@given(st.integers(0, 2**32), LENGTHS)
@PROPERTY
def test_packed_sequences_in_any_order_of_warps(seed, lengths):
    torch.manual_seed(seed)
    args, _ = arguments("delta", 1, sum(lengths), 1, 64, 64)
    state = torch.randn(len(lengths), 2, 64, 64)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    with pytest.MonkeyPatch.context() as patch:
        named = check(patch, OPS["delta"], [x[0] for x in args], seed, s=state, cu_seqlens=cu)
    for b, n in enumerate(lengths):
        assert n or torch.equal(named["s"][b], state[b])


@pytest.mark.parametrize("name", ["delta", "linear"])
def test_segments(name, monkeypatch):
    torch.manual_seed(2)
    args, state = arguments(name, 1, 200, 1, 64, 64)
    check(monkeypatch, OPS[name], args, s=state, segments=3)


def test_a_bad_sequence_stays_alone(monkeypatch):
    torch.manual_seed(3)
    args, _ = arguments("delta", 1, 150, 1, 64, 64)
    args = [x[0] for x in args]
    for x in args:
        x[40:100] = torch.nan
    cu = torch.tensor([0, 40, 100, 150])
    named = check(monkeypatch, OPS["delta"], args, cu_seqlens=cu)
    assert named["o"][:40].isfinite().all() and named["o"][100:].isfinite().all()


def test_keys_that_are_nearly_one_and_a_beta_of_two(monkeypatch):
    torch.manual_seed(4)
    (q, _, v, g, beta), state = arguments("delta", 1, 70, 1, 64, 64)
    near = torch.randn(1, 1, 1, 64) + 0.25 * torch.randn(1, 70, 1, 64)
    k = torch.nn.functional.normalize(near, dim=-1).bfloat16()
    check(monkeypatch, OPS["delta"], (q, k, v, 0.01 * g, torch.full_like(beta, 2.0)), s=state)


@pytest.mark.parametrize(("name", "lengths", "more"), [
    ("delta", [70, 0, 1], {"consumers": 2, "blockwise": True}),
    ("two_rows", [20, 23, 0], {"consumers": 1}),
])  # fmt: skip
def test_programs_that_go_from_sequence_to_sequence(name, lengths, more, monkeypatch):
    torch.manual_seed(16)
    wide = 64 * more["consumers"]
    args, state = arguments(name, 1, sum(lengths), 1, 64, wide)
    args, cu = [x[0] for x in args], torch.tensor([0, *lengths]).cumsum(0)
    named = {"s": torch.randn(len(lengths), *state.shape[1:]), "cu_seqlens": cu.int()}
    for seed in range(2):
        choose = (("resident", True), ("stages", 2), ("loaders", 2), *more.items())
        check(monkeypatch, OPS[name], args, seed, choose=choose, **named)
