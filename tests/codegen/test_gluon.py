"""Warp-specialised softmax prefill: its plans, its text, and what the text computes on the CPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen.emit.gluon import gluon_text
from attncc.codegen.forms import Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, TensorArg
from attncc.codegen.plan_gluon import WarpChoice, WarpPlan, warp_plan
from attncc.codegen.plan_softmax import SoftmaxPlans, plan_softmax
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.codegen.printers import source
from attncc.codegen.warp_forms import Forms, Tanh
from attncc.dsl.errors import RefusedError
from attncc.runtime import softmax
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.eager.run import run as run_eager
from tests import score_ops
from tests.codegen import gluon_machine
from tests.gluon_ops import CASES, CROWDED, apart, extras, from_a_key_on, learned
from tests.tolerance import assert_close

PROPERTY = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
LENGTHS = st.sampled_from([0, 1, 63, 128, 130, 300])
OLDER = WarpChoice(
    forms=Forms(query_places=1, wide_stores=False, edges=False, linear=False, tanh=Tanh.QUOTIENT)
)
NEWER = WarpChoice(forms=Forms(query_places=2, wide_stores=True, edges=True))


def whole(call, dialect=Dialect.GLUON):
    """The plan of a bound call's tile, or the refusal."""
    spec = replace(spec_of(call), dialect=dialect)
    plans = plan_softmax(call.program, analyse(call.program).softmax, spec, "prefill")
    return plans.whole if isinstance(plans, SoftmaxPlans) else plans


def flat(plan, args):
    """Arguments in the order of the kernel's parameters, as a launch passes them."""
    found = []
    for arg in plan.args:
        found.append(args[arg.name])
        if isinstance(arg, TensorArg):
            found.extend(args[arg.name].stride()[:-1])
    return found


def eager(op, args, kwargs):
    """The contract's eager reference."""
    call, _ = bind(op.declaration, args, {**kwargs, "return_lse": True})
    run_eager(call, analyse(call.program), round_operands=True)
    return {**call.outputs, "lse": call.lse}


def check(op, *args, programs=3, seed=0, lse=True, choice=None, **kwargs):
    """Run the generated text on the CPU and hold its results to the contract."""
    torch.manual_seed(seed)
    call, _ = bind(op.declaration, args, {**kwargs, "return_lse": lse})
    plan = whole(call)
    if choice is not None:
        spec = replace(spec_of(call), target="sm_90")
        plan = warp_plan(whole(call, Dialect.TRITON), spec, choice)
    assert isinstance(plan, WarpPlan), plan
    grid = softmax._Grid.of(call, plan)
    named = {**call.outputs, **({"lse": call.lse} if lse else {})}
    for tensor in named.values():
        tensor.fill_(torch.nan)
    generated = source(plan)
    values = flat(plan, softmax._arguments(call, plan, grid))
    if grid.tiles * grid.points:
        gluon_machine.run(generated.text, generated.entry, programs, values, seed)
    exact = op.reference(*args, **kwargs, return_lse=True)._asdict()
    rough = eager(op, args, kwargs)
    for name, tensor in named.items():
        assert_close(tensor, exact[name], rough[name], tensor.dtype, f"{call.program.name}.{name}")
    return named


def qkv(batch, tokens, history, heads, group, dim, dtype=torch.bfloat16):
    """Random operands."""
    q = torch.randn(batch, tokens, heads * group, dim, dtype=dtype)
    k = torch.randn(batch, history, heads, dim, dtype=dtype)
    return q, k, torch.randn(batch, history, heads, dim, dtype=dtype)


def crowd(name, q, history):
    """What a crowded case takes besides q, k and v."""
    if name == "biased":
        return {"bias": torch.randn(q.shape[2], q.shape[1], history, dtype=q.dtype)}
    if name == "many_bands":
        return {"width": 40}
    more = {"weight": torch.randn(1, history), "slope": -torch.rand(q.shape[2])}
    return extras("documents", q, history) | more


# --- what the generated text computes --------------------------------------------------------


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("tokens", "history"), [(130, 300), (300, 130), (65, 0)])
def test_scores_and_masks(name, tokens, history):
    if name == "documents" and tokens > history:
        tokens, history = history or 1, tokens
    q, k, v = qkv(1, tokens, history, 1, 2, 64)
    check(CASES[name], q, k, v, **extras(name, q, history))


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("choice", [None, OLDER])
def test_without_an_lse_scores_have_forms_of_their_own(name, choice):
    q, k, v = qkv(1, 140, 290, 1, 2, 64)
    check(CASES[name], q, k, v, lse=False, choice=choice, **extras(name, q, 290))


@ac.op(out="B T (Hkv G) E")
def sloped(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    slope=ac.Param("(Hkv G)"), row=ac.Activation("B T (Hkv G)"), by=ac.param(default=0.1),
):  # fmt: skip
    """Several terms in a key's position, terms of a row, and a factor that a call chooses."""
    t, s = ac.index("T"), ac.index("S")
    score = (ac.dot(q, k, "D") + 2 * slope * (t - 3 * s + 5)) * by + row - by * slope * s / 7
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def leaning(q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E")):
    """One slope, without a mask."""
    score = ac.dot(q, k, "D") * ac.rsqrt("D") - 0.01 * (ac.index("T") - ac.index("S"))
    return ac.dot(ac.softmax(score, "S"), v, "S")


@ac.op(out="B T (Hkv G) E")
def curved(q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E")):
    """Not linear in the distance."""
    far = ac.index("T") - ac.index("S")
    score = ac.dot(q, k, "D") * ac.rsqrt("D") - 0.001 * (far * far)
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@pytest.mark.parametrize("by", [0.1, -0.05, 0.0])
def test_terms_in_a_keys_position(by):
    q, k, v = qkv(1, 140, 290, 1, 2, 64)
    row = torch.randn(q.shape[:3], dtype=q.dtype)
    check(sloped, q, k, v, slope=torch.tensor([0.02, -0.01]), row=row, by=by, lse=False)


def test_one_slope_for_all_and_terms_that_are_not_linear():
    q, k, v = qkv(1, 140, 290, 1, 2, 64)
    check(leaning, q, k, v, lse=False)
    check(curved, q, k, v, lse=False)
    fused = "gl.fma(slope"
    for op, linear in ((leaning, True), (curved, False)):
        call, _ = bind(op.declaration, (q, k, v), {})
        assert (fused in source(whole(call)).text) is linear
        call, _ = bind(op.declaration, (q, k, v), {"return_lse": True})
        assert fused not in source(whole(call)).text  # an lse is held to fp32


@pytest.mark.parametrize(("cap", "scale"), [(20.0, 0.2), (-20.0, 0.2), (20.0, -0.2)])
def test_caps_and_scales_of_either_sign(cap, scale):
    q, k, v = qkv(1, 130, 290, 1, 2, 64)
    check(ac.ops.soft_cap, q * 4, k, v, cap=cap, scale=scale, lse=False)


@ac.op(out="B T (Hkv G) E")
def gated_score(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    gate=ac.Activation("B T (Hkv G)"),
):  # fmt: skip
    """A tanh that may be small beside what it is multiplied by."""
    score = ac.dot(q, k, "D") * ac.tanh(gate)
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_a_small_tanh_keeps_its_relative_accuracy(size):
    q, k, v = qkv(1, 130, 290, 1, 2, 64)
    gate = (size * torch.rand(q.shape[:3])).to(q.dtype)
    check(gated_score, q / size, k, v, gate=gate, lse=False)
    check(ac.ops.soft_cap, q, k, v, cap=10.0 / size, scale=0.125, lse=False)


@pytest.mark.parametrize("lse", [False, True])
def test_rows_whose_last_key_is_the_historys(lse):
    q, k, v = qkv(1, 140, 290, 1, 2, 64)
    slope, choice = torch.tensor([0.1, 0.02]), WarpChoice(forms=Forms(edges=True))
    check(from_a_key_on, q, k, v, slope=slope, lse=lse, choice=choice)


def test_forms_are_the_rules_where_registers_and_memory_allow():
    call, _ = bind(CASES["capped"].declaration, qkv(1, 64, 64, 1, 1, 128), {})
    plan = whole(call)
    assert (plan.query_places, plan.wide_stores, plan.edges) == (2, True, True)
    assert plan.tanh is Tanh.SERIES
    half = bind(CASES["capped"].declaration, qkv(1, 64, 64, 1, 1, 128, torch.float16), {})[0]
    assert whole(half).tanh is Tanh.QUOTIENT  # 1e-5 of a cap is not lost in fp16's rounding
    tile, spec = whole(call, Dialect.TRITON), replace(spec_of(call), target="sm_90")
    full = warp_plan(tile, spec, WarpChoice(stages=3))
    assert (full.query_places, full.wide_stores) == (1, False)
    call, _ = bind(CASES["capped"].declaration, qkv(1, 64, 64, 1, 1, 128), {"return_lse": True})
    plan = whole(call)
    assert (plan.query_places, plan.wide_stores, plan.edges) == (1, False, False)
    assert plan.tanh is Tanh.QUOTIENT


@pytest.mark.parametrize("size", [3.0, 40.0])
def test_the_short_form_of_tanh_is_within_the_contract(size):
    q, k, v = qkv(1, 130, 400, 1, 2, 64)
    short = WarpChoice(forms=Forms(tanh=Tanh.SERIES))
    check(CASES["capped"], q * size, k, v, lse=False, choice=short)


@pytest.mark.parametrize("group", [1, 4, 6])
def test_groups_in_a_tile_or_beside_each_other(group):
    check(ac.ops.attention, *qkv(2, 70, 200, 2, group, 128, torch.float16), lse=group == 6)


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
    check(CASES["windowed"], *args, width=150, programs=programs, seed=seed, lse=bool(seed % 2))


@given(st.integers(0, 2**32), st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=4))
@PROPERTY
def test_packed_sequences(seed, lengths):
    torch.manual_seed(seed)
    cu = [torch.tensor([0, *(x[i] for x in lengths)]).cumsum(0) for i in (0, 1)]
    q, _, _ = (x[0] for x in qkv(1, int(cu[0][-1]), 0, 1, 2, 64))
    _, k, v = (x[0] for x in qkv(1, 0, int(cu[1][-1]), 1, 2, 64))
    lse = bool(seed % 2)
    check(ac.ops.attention, q, k, v, cu_seqlens=cu[0], cu_seqlens_k=cu[1], seed=seed, lse=lse)


def test_a_bad_sequence_stays_alone():
    q, k, v = (x[0] for x in qkv(1, 230, 230, 1, 2, 64))
    for x in (q, k, v):
        x[100:170] = torch.nan
    cu = torch.tensor([0, 100, 170, 230])
    named = check(ac.ops.attention, q, k, v, cu_seqlens=cu, choice=NEWER)
    assert named["o"][100:170].isnan().all() and named["o"][170:].isfinite().all()


def test_strides_of_other_layouts():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(2, 70, 130, 2, 2, 64))
    check(ac.ops.attention, q, k.expand(2, -1, -1, -1), v, lse=False)


@pytest.mark.parametrize(("right", "wrong"), [
    (
        "mbarrier.wait(query_free.index(here), ((items // 2) & 1) ^ 1)",
        "mbarrier.wait(query_free.index(here), (items // 2) & 1)",
    ),
    ("mbarrier.wait(value_free.index(at), ((count // 2) & 1) ^ 1)", "pass"),
    ("mbarrier.wait(key_free.index(at), ((count // 2) & 1) ^ 1)", "pass"),
    ("mbarrier.wait(key_full.index(ahead), ((count + 1) // 2) & 1)", "pass"),
    ("mbarrier.arrive(key_free.index(ahead), count=1)", "pass"),
    ("mbarrier.arrive(query_free.index(here), count=1)", "pass"),
])  # fmt: skip
def test_the_machine_sees_mistakes(right, wrong):
    call, _ = bind(ac.ops.attention.declaration, qkv(1, 600, 600, 1, 1, 128), {})
    plan = whole(call)
    generated = source(plan)
    values = flat(plan, softmax._arguments(call, plan, softmax._Grid.of(call, plan)))
    gluon_machine.run(generated.text, generated.entry, 1, values, 0)
    found = call.outputs["o"].clone()
    assert right in generated.text
    text = generated.text.replace(right, wrong)
    for seed in range(10):
        call.outputs["o"].fill_(torch.nan)
        try:
            gluon_machine.run(text, generated.entry, 1, values, seed)
        except gluon_machine.ProtocolError:
            return
        if not torch.equal(call.outputs["o"], found):
            return
    pytest.fail("ten orders, and nothing was seen")


# --- plans and text --------------------------------------------------------------------------


def refusal(op, args, **kwargs):
    """Why a call has no Gluon kernel."""
    call, _ = bind(op.declaration, args, kwargs)
    found = whole(call)
    assert isinstance(found, Refusal)
    return found.reason


def test_what_is_not_covered_is_refused_with_the_reason():
    attention = ac.ops.attention
    assert "rows of 80" in refusal(attention, qkv(1, 64, 64, 1, 1, 80))
    gate = torch.randn(1, 64, 1, dtype=torch.bfloat16)
    q, k, v = qkv(1, 64, 64, 1, 1, 64)
    assert "q has no axis T" in refusal(learned, (q[0, 0], k, v, gate))
    assert "16-bit" in refusal(attention, qkv(1, 64, 64, 1, 1, 64, torch.float32))
    q, _, v = qkv(1, 64, 64, 1, 1, 64)
    _, odd, _ = qkv(1, 64, 64, 1, 1, 65)
    assert "k is not aligned" in refusal(attention, (q, odd[..., :64], v))
    for name, why in (
        ("differential", "several"), ("rectified", "plain sum"), ("forgetting", "last block"),
        ("indexed", "several products"),
    ):  # fmt: skip
        case = score_ops.CASES[name][0]
        given_ = score_ops.arguments(name, 1, 64, 64, torch.bfloat16, "cpu")
        assert why in refusal(case, (), **given_), name


def test_a_cache_and_a_step_keep_the_triton_kernels():
    cache = ac.DenseCache.allocate(
        ac.ops.attention, sizes={"B": 1, "Hkv": 1, "D": 64, "E": 64}, capacity=64, device="cpu"
    )
    assert "cache" in refusal(ac.ops.attention, qkv(1, 8, 8, 1, 1, 64), cache=cache)
    call, _ = bind(ac.ops.attention.declaration, qkv(1, 1, 64, 1, 1, 64), {})
    spec = replace(spec_of(call), dialect=Dialect.GLUON)
    found = plan_softmax(call.program, analyse(call.program).softmax, spec, "decode")
    assert isinstance(found, Refusal) and "decode" in found.reason


def test_other_targets_are_refused():
    call, _ = bind(ac.ops.attention.declaration, qkv(1, 64, 64, 1, 1, 64), {})
    plain = whole(call, Dialect.TRITON)
    assert not isinstance(plain, WarpPlan)
    found = warp_plan(plain, replace(spec_of(call), target="sm_100"))
    assert isinstance(found, Refusal) and "sm_100" in found.reason


def test_without_an_entry_of_a_table_the_dialect_is_triton():
    call, _ = bind(ac.ops.attention.declaration, qkv(1, 64, 64, 1, 1, 64), {})
    assert whole(call, None) == whole(call, Dialect.TRITON)


def test_an_entry_of_a_table_makes_the_dialect_the_default_and_fixes_its_choices():
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    fixed = (("block_n", 64), ("packed_rows", False), ("stages", 3))
    entry = TableEntry("by-test", Family.WARP, (("phase", "prefill"),), (), fixed, measured)
    call, _ = bind(ac.ops.attention.declaration, qkv(1, 64, 64, 1, 4, 64), {})
    spec = replace(spec_of(call), tuned=PlanTable((entry,), "by-test"))
    plans = plan_softmax(call.program, analyse(call.program).softmax, spec, "prefill")
    plan = plans.whole
    assert isinstance(plan, WarpPlan) and plan.chosen == "by-test" and plans.parts
    assert (plan.block_n, plan.num_stages, plan.tile_axes) == (64, 3, ("T",))
    # where the entry's kernel cannot be, the tile stays
    call, _ = bind(ac.ops.attention.declaration, qkv(1, 64, 64, 1, 4, 80), {})
    spec = replace(spec_of(call), tuned=spec.tuned)
    plans = plan_softmax(call.program, analyse(call.program).softmax, spec, "prefill")
    assert not isinstance(plans.whole, WarpPlan)


def test_the_committed_table_leaves_crowded_scores_to_the_tile():
    long = (("B", 1), ("T", 8192), ("S", 8192))
    for name, op in {**CASES, **CROWDED}.items():
        q, k, v = qkv(1, 200, 200, 2, 4, 128)
        more = crowd(name, q, 200) if name in CROWDED else extras(name, q, 200)
        call, _ = bind(op.declaration, (q, k, v), more)
        spec = replace(spec_of(call), buckets=long)
        found = plan_softmax(call.program, analyse(call.program).softmax, spec, "prefill").whole
        assert isinstance(found, WarpPlan) is (name in CASES), name
        by_name = plan_softmax(
            call.program, analyse(call.program).softmax, replace(spec, dialect=Dialect.GLUON),
            "prefill",
        ).whole  # fmt: skip
        assert by_name.block_n == (64 if name in CROWDED else 128), name
    q, k, v = qkv(1, 200, 200, 2, 4, 128)
    ids = extras("documents", q, 200)["document"].long()  # two registers each
    call, _ = bind(CASES["documents"].declaration, (q, k, v), {"document": ids})
    spec = replace(spec_of(call), buckets=long)
    plans = plan_softmax(call.program, analyse(call.program).softmax, spec, "prefill")
    assert not isinstance(plans.whole, WarpPlan)


def test_a_word_without_translation_is_refused():
    assert gluon_text("x = tl.where(a, tl.arange(0, 64), 0)", "KEYS") == (
        "x = gl.where(a, gl.arange(0, 64, layout=KEYS), 0)"
    )
    with pytest.raises(RefusedError, match=r"tl\.cumsum"):
        gluon_text("x = tl.cumsum(a, 1)", "ROWS")
