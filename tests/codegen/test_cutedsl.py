"""CuTe-DSL prefill: its plans, its text, and what the text computes on the CPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen.emit.cutedsl import Scalars
from attncc.codegen.emit.cutedsl_types import Known
from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_cutedsl import CutePlan
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.codegen.printers import source
from attncc.dsl.errors import RefusedError
from attncc.runtime import softmax
from attncc.runtime.bind import bind
from tests.codegen import cute_machine
from tests.codegen.gluon_machine import ProtocolError
from tests.codegen.test_gluon import crowd, eager, flat, qkv, whole
from tests.gluon_ops import CASES, CROWDED, apart, extras
from tests.tolerance import assert_close

PROPERTY = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
LENGTHS = st.sampled_from([0, 1, 63, 128, 130, 300])


def generated(op, args, kwargs):
    """A call, its plan, the text and the values of the kernel's parameters."""
    call, _ = bind(op.declaration, args, {**kwargs, "return_lse": True})
    plan = whole(call, Dialect.CUTEDSL)
    assert isinstance(plan, CutePlan), plan
    grid = softmax._Grid.of(call, plan)
    return call, grid, source(plan).text, flat(plan, softmax._arguments(call, plan, grid))


def check(op, *args, programs=3, seed=0, **kwargs):
    """Run the generated text on the CPU and hold its results to the contract."""
    torch.manual_seed(seed)
    call, grid, text, values = generated(op, args, kwargs)
    named = {**call.outputs, "lse": call.lse}
    for tensor in named.values():
        tensor.fill_(torch.nan)
    if grid.tiles * grid.points:
        cute_machine.run(text, programs, values, seed)
    exact = op.reference(*args, **kwargs, return_lse=True)._asdict()
    rough = eager(op, args, kwargs)
    for name, tensor in named.items():
        assert_close(tensor, exact[name], rough[name], tensor.dtype, f"{call.program.name}.{name}")
    return named


# --- what the generated text computes --------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("tokens", "history"), [(130, 300), (65, 0)])
def test_scores_and_masks(name, tokens, history):
    if name == "documents" and tokens > history:
        tokens, history = 1, tokens
    q, k, v = qkv(1, tokens, history, 1, 2, 64)
    check(CASES[name], q, k, v, **extras(name, q, history))


@pytest.mark.parametrize("group", [4, 6])
def test_groups_in_a_tile_or_beside_each_other(group):
    check(ac.ops.attention, *qkv(2, 70, 200, 2, group, 128, torch.float16))


@pytest.mark.parametrize("group", [3, 4])
def test_heads_of_a_group_on_a_memory_axis_of_their_own(group):
    q, k, v = qkv(1, 70, 200, 2, group, 64)
    check(apart, q.unflatten(2, (2, group)), k, v)


@pytest.mark.parametrize("name", list(CROWDED))
def test_more_values_a_key_mean_fewer_keys_a_block(name):
    q, k, v = qkv(1, 130, 200, 2, 2, 64)
    check(CROWDED[name], q, k, v, **crowd(name, q, 200))


@given(st.integers(0, 2**32), st.integers(1, 4), LENGTHS, LENGTHS)
@PROPERTY
def test_any_order_of_warps_and_copies(seed, programs, tokens, past):
    torch.manual_seed(seed)
    args = qkv(1, tokens, tokens + past, 2, 1, 64)
    check(CASES["windowed"], *args, width=150, programs=programs, seed=seed)


@given(st.integers(0, 2**32), st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=4))
@PROPERTY
def test_packed_sequences(seed, lengths):
    torch.manual_seed(seed)
    cu = [torch.tensor([0, *(x[i] for x in lengths)]).cumsum(0) for i in (0, 1)]
    q, _, _ = (x[0] for x in qkv(1, int(cu[0][-1]), 0, 1, 2, 64))
    _, k, v = (x[0] for x in qkv(1, 0, int(cu[1][-1]), 1, 2, 64))
    check(ac.ops.attention, q, k, v, cu_seqlens=cu[0], cu_seqlens_k=cu[1], seed=seed)


def test_a_bad_sequence_stays_alone():
    q, k, v = (x[0] for x in qkv(1, 300, 300, 1, 2, 64))
    cu = torch.tensor([0, 100, 170, 300])
    good = check(ac.ops.attention, q, k, v, cu_seqlens=cu)
    call, _, text, values = generated(ac.ops.attention, (q, k, v), {"cu_seqlens": cu})
    for x in (q, k, v):
        x[100:170] = torch.nan
    cute_machine.run(text, 2, values, 0)
    o = call.outputs["o"]
    assert o[100:170].isnan().all()
    assert torch.equal(o[:100], good["o"][:100]) and torch.equal(o[170:], good["o"][170:])


@pytest.mark.parametrize(("right", "wrong"), [
    ("release(value_free + 8 * at, lane)", "pass"),
    ("wait(value_full + 8 * at, parity_of(count, 2))", "pass"),
    ("wait(key_free + 8 * at, parity_of(count, 2) ^ 1)", "pass"),
    ("warpgroup.wait_group(1)", "pass"),
    ("wait(query_free, (items & 1) ^ 1)", "pass"),
])  # fmt: skip
def test_the_machine_sees_mistakes(right, wrong):
    """Each synchronisation is needed: without one, some order of warps and copies goes wrong."""
    args = qkv(1, 300, 700, 1, 1, 128)
    call, _, text, values = generated(ac.ops.attention, args, {})
    assert right in text
    cute_machine.run(text, 1, values, 0)
    good = call.outputs["o"].clone()
    for seed in range(12):
        call.outputs["o"].fill_(torch.nan)
        try:
            cute_machine.run(text.replace(right, wrong), 1, values, seed)
        except (ProtocolError, KeyError):
            return
        if not torch.equal(call.outputs["o"], good):
            return
    raise AssertionError("no order of warps and copies showed the mistake")


# --- which calls have one --------------------------------------------------------------------


@pytest.mark.parametrize(("args", "reason"), [
    (qkv(1, 130, 130, 1, 2, 32), "rows of 32, not of 64 or 128"),
    (qkv(1, 130, 130, 1, 2, 64, torch.float32), "not of one 16-bit type"),
])  # fmt: skip
def test_what_is_not_covered_is_refused_with_the_reason(args, reason):
    call, _ = bind(ac.ops.attention.declaration, args, {})
    found = whole(call, Dialect.CUTEDSL)
    assert isinstance(found, Refusal) and reason in found.reason


def test_other_targets_are_refused():
    from attncc.runtime.sources import call_sources

    call, _ = bind(ac.ops.attention.declaration, qkv(1, 130, 130, 1, 2, 64), {})
    with pytest.raises(RefusedError, match="written for sm_90, not sm_100"):
        call_sources(call, "prefill", "sm_100", dialect=Dialect.CUTEDSL)


def test_an_entry_of_a_table_may_name_the_dialect():
    from attncc.runtime.sources import call_sources

    call, _ = bind(ac.ops.attention.declaration, qkv(1, 130, 130, 1, 2, 64), {})
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    chosen = (("block_n", 64), ("dialect", "cutedsl"))
    entry = TableEntry("by-test", Family.WARP, (("phase", "prefill"),), (), chosen, measured)
    spec = replace(softmax_spec(call), tuned=PlanTable((entry,), "by-test"))
    found = [s.plan for s in call_sources(call, "prefill", spec=spec)]
    assert any(isinstance(p, CutePlan) and p.block_n == 64 for p in found)


def softmax_spec(call):
    """What selects a call's kernels."""
    from attncc.runtime.backends import spec_of

    return spec_of(call)


# --- translation -----------------------------------------------------------------------------

NAMES = {
    "a": Known("fp32", frozenset("m")), "n": Known("i32"), "w": Known("i64", frozenset("n")),
    "x_ptr": Known("*bf16"),
}  # fmt: skip


@pytest.mark.parametrize(("line", "text", "kind"), [
    ("y = a[:, None] * n", "a[r] * Float32(n)", "fp32"),
    ("y = w + n", "w + Int64(n)", "i64"),
    ("y = 1.0 / (1.0 + tl.exp(-a))", "divided(1.0, 1.0 + exp(-a[r]))", "fp32"),
    ("y = tl.load(x_ptr + w * 2 + n, mask=n > 0, other=0.0).to(tl.float32)",
     "Float32(load(BFloat16, x_ptr + ((w * 2) + Int64(n)) * 2, n > 0, 0.0))", "fp32"),
    ("y = tl.where(n > 0, a, float('-inf'))", "where(n > 0, a[r], float(\"-inf\"), Float32)",
     "fp32"),
])  # fmt: skip
def test_lines_become_scalar_code(line, text, kind):
    [step] = Scalars(dict(NAMES), {"m": "r"}).steps([line])
    assert (step.text, step.known.type) == (text, kind)


@pytest.mark.parametrize("line", ["y = tl.dot(a, a)", "y = missing + 1", "y = tl.cumsum(a, 0)",
                                  "y = a ** 2", "while n: pass"])  # fmt: skip
def test_what_has_no_translation_is_refused(line):
    with pytest.raises(RefusedError, match="no CuTe-DSL text"):
        Scalars(dict(NAMES), {"m": "r"}).steps([line])
