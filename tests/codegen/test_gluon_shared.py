"""The warp-specialised tile whose keys are its values too: its text on the CPU, and who gets it."""

import re
from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.codegen.forms import Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_shared import SharedChoice, SharedPlan, shared_plan
from attncc.codegen.plan_softmax import SoftmaxPlans, plan_softmax
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.codegen.printers import source
from attncc.runtime import dialects, softmax
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.eager.append import append
from attncc.runtime.eager.run import run as run_eager
from attncc.runtime.splits import even_splits
from tests.codegen import gluon_machine
from tests.codegen.test_gluon import flat
from tests.mla_ops import LATENT
from tests.tolerance import assert_close

BF16 = torch.bfloat16


def plans_of(call, dialect=Dialect.GLUON, **changed):
    """The plans of a decode step on Hopper."""
    spec = replace(spec_of(call), dialect=dialect, target="sm_90", **changed)
    return plan_softmax(call.program, analyse(call.program).softmax, spec, "decode")


def operands(batch, tokens, history, heads, dtype=BF16, width=512, rope=64):
    """Random queries and keys."""
    shapes = ((tokens, heads, width), (tokens, heads, rope), (history, width), (history, rope))
    return tuple(torch.randn(batch, *shape).to(dtype) for shape in shapes)


def cache_of(held, capacity, page, dtype=BF16):
    """Random rows where tokens are held, NaN elsewhere."""
    sizes = {"B": len(held), "R": 512, "P": 64}
    if page is None:
        cache = ac.DenseCache.allocate(LATENT, sizes=sizes, capacity=capacity, dtype=dtype)
    else:
        cache = ac.PagedCache.allocate(
            LATENT, sizes=sizes, capacity=capacity, page=page, dtype=dtype
        )
        cache.block_table.copy_(cache.block_table.flip(0).flip(1))
    for t in cache.tensors.values():
        t.fill_(torch.nan)
        for b, n in enumerate(held):
            new = torch.randn(n, t.shape[-1]).to(dtype)
            if page is None:
                t[b, :n] = new
                continue
            at = torch.arange(n)
            t[cache.block_table[b].long()[at // page], at % page] = new
    cache.lengths.copy_(torch.tensor(held))
    return cache


def merged(call, parts, grid, splits):
    """The op's output from partials, in fp64."""
    m, l, u = (parts[n].double() for n in ("m", "l", "u"))
    count = grid.points * grid.rows
    m, l = m[: count * splits].view(count, splits), l[: count * splits].view(count, splits)
    u = u[: count * splits * 512].view(count, splits, 512)
    high = m.amax(1, keepdim=True)
    share = torch.where(m == -torch.inf, 0.0, torch.exp2(m - high))
    total = (l * share).sum(1)
    out = torch.where(total[:, None] == 0, 0.0, (u * share[:, :, None]).sum(1) / total[:, None])
    o = call.outputs["o"]
    o.copy_(out.view(o.shape))


def check(q, q_rope, *history, splits=1, seed=0, choice=None, released=False, **kwargs):
    """One step by the generated text, held to the contract."""
    given = {"scale": 576**-0.5, **kwargs}
    args = (q, q_rope, *history)
    exact = LATENT.reference(*args, **given)
    copied = dict(given)
    if "cache" in given:
        own = given["cache"]
        tensors = {n: t.clone() for n, t in own.tensors.items()}
        copied["cache"] = (
            ac.DenseCache(tensors, own.lengths.clone())
            if isinstance(own, ac.DenseCache)
            else ac.PagedCache(tensors, own.block_table, own.lengths.clone())
        )
    rough, _ = bind(LATENT.declaration, args, copied)
    run_eager(rough, analyse(rough.program), round_operands=True)
    call, _ = bind(LATENT.declaration, args, given)
    plans = plans_of(call)
    assert isinstance(plans, SoftmaxPlans), plans
    plan = plans.whole if splits == 1 else plans.split
    assert isinstance(plan, SharedPlan) and plans.merge.dialect is Dialect.TRITON
    if choice is not None:
        spec = replace(spec_of(call), target="sm_90")
        plain = plans_of(call, Dialect.TRITON)
        plan = shared_plan(plain.whole if splits == 1 else plain.split, spec, choice=choice)
    plan = replace(plan, released=released)
    call.outputs["o"].fill_(torch.nan)
    if call.new_rows:
        append(call)
    grid = softmax._Grid.of(call, plan)
    values = softmax._arguments(call, plan, grid)
    parts = {}
    if splits > 1:
        parts = softmax.partials(call, plan, grid, splits)
        for part in parts.values():
            part.fill_(torch.nan)
        values |= {f"part_{n}": t for n, t in parts.items()}
        values |= {"splits": splits, "rows": grid.rows}
    text = source(plan)
    programs = grid.tiles * grid.points * splits
    gluon_machine.run(text.text, text.entry, programs, flat(plan, values), seed)
    if splits > 1:
        merged(call, parts, grid, splits)
    assert_close(call.outputs["o"], exact, rough.outputs["o"], call.dtype, "o")


# --- what the generated text computes --------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("tokens", "history", "heads"), [
    (1, 300, 64), (1, 1, 16), (3, 130, 40), (16, 64, 8), (2, 0, 64),
])  # fmt: skip
def test_steps_over_whole_histories(tokens, history, heads, splits):
    torch.manual_seed(tokens)
    check(*operands(2, tokens, history, heads), splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("page", [None, 8, 16, 32, 64, 128])
def test_steps_over_caches(page, splits):
    torch.manual_seed(1)
    cache = cache_of([150, 0, 63], 256, page)
    check(*operands(3, 2, 2, 32), cache=cache, splits=splits)


@pytest.mark.parametrize("history", [300, 0])
def test_partials_whose_merge_may_be_launched_early(history):
    torch.manual_seed(7)
    check(*operands(1, 1, history, 64), splits=3, seed=1, released=True)


def test_who_may_launch_the_merge_early():
    call, _ = bind(LATENT.declaration, operands(1, 1, 80, 64), {"scale": 0.1})
    for chained in (True, False):
        plans = plans_of(call, chained=chained)
        assert plans.split.released is chained and not plans.whole.released
        assert ("gdc_launch_dependents()" in source(plans.split).text) is chained


def test_fp16_and_a_program_of_another_order():
    torch.manual_seed(2)
    for seed in range(3):
        check(*operands(1, 1, 400, 64, torch.float16), seed=seed)


@pytest.mark.parametrize("choice", [
    SharedChoice(late=True), SharedChoice(block_n=32, stages=4, late=True),
    SharedChoice(ahead=True), SharedChoice(block_n=32, stages=4, ahead=True),
])  # fmt: skip
def test_other_choices(choice):
    torch.manual_seed(3)
    check(*operands(1, 2, 450, 33), seed=1, choice=choice)
    check(*operands(1, 1, 333, 64), splits=2, choice=choice)


@ac.op(out="B T (G J) R")
def capped(
    q=ac.Activation("B T (G J) R"), c=ac.Cache("B S G R"), slope=ac.Param("(G J)"),
    sink=ac.Param("(G J)"), weight=ac.Cache("B S"), width=ac.param(),
):  # fmt: skip
    """One product, several heads of keys, a window, a sink, and terms of positions and keys."""
    t, s = ac.index("T"), ac.index("S")
    score = ac.tanh(ac.dot(q, c, "R") * 0.05) * 4 + slope * (t - s) + weight
    where = ac.causal & (t - s < width)
    return ac.dot(ac.softmax(score, "S", where=where, sink=sink), c, "S") * 2


def test_other_scores_and_masks():
    torch.manual_seed(4)
    q, c = torch.randn(2, 3, 40, 512).to(BF16), torch.randn(2, 210, 2, 512).to(BF16)
    more = {"slope": torch.rand(40), "sink": torch.randn(40), "weight": torch.randn(2, 210)}
    given = {**more, "width": 150}
    exact = capped.reference(q, c, **given)
    rough, _ = bind(capped.declaration, (q, c), given)
    run_eager(rough, analyse(rough.program), round_operands=True)
    call, _ = bind(capped.declaration, (q, c), given)
    plan = plans_of(call).whole
    assert isinstance(plan, SharedPlan)
    grid = softmax._Grid.of(call, plan)
    values = flat(plan, softmax._arguments(call, plan, grid))
    text = source(plan)
    gluon_machine.run(text.text, text.entry, grid.tiles * grid.points, values, 0)
    assert_close(call.outputs["o"], exact, rough.outputs["o"], BF16, "o")


# --- whether its warps keep in step ----------------------------------------------------------


@pytest.mark.parametrize("missing", [
    "mbarrier.wait(free_0_0", "mbarrier.wait(full_0_1", "mbarrier.wait(weights_free",
    "mbarrier.wait(weights_full", "mbarrier.arrive(free_0_1", "mbarrier.arrive(free_1_0",
])  # fmt: skip
def test_a_step_that_is_left_out_is_noticed(missing):
    torch.manual_seed(5)
    call, _ = bind(LATENT.declaration, operands(1, 1, 450, 64), {"scale": 576**-0.5})
    plan = plans_of(call).whole
    values = flat(plan, softmax._arguments(call, plan, softmax._Grid.of(call, plan)))
    text = source(plan)
    cut = re.sub(rf"{re.escape(missing)}.*", "pass", text.text)
    assert cut != text.text
    gluon_machine.run(text.text, text.entry, 1, values, 0)
    right = call.outputs["o"].clone()
    for seed in range(10):
        call.outputs["o"].fill_(torch.nan)
        try:
            gluon_machine.run(cut, text.entry, 1, values, seed)
        except gluon_machine.ProtocolError:
            return
        if not torch.equal(call.outputs["o"], right):
            return
    pytest.fail("ten orders, and nothing was seen")


# --- who gets it -----------------------------------------------------------------------------


@pytest.mark.parametrize(("changed", "why"), [
    ({"target": "sm_100"}, "sm_90"), ({"dtype": torch.float32}, "16-bit"),
    ({"width": 256}, "256 columns"), ({"rope": 128}, "further products"),
])  # fmt: skip
def test_what_has_no_such_form(changed, why):
    changed = dict(changed)
    target = {"target": changed.pop("target")} if "target" in changed else {}
    call, _ = bind(LATENT.declaration, operands(1, 1, 80, 64, **changed), {"scale": 0.1})
    spec = replace(spec_of(call), dialect=Dialect.GLUON, **{"target": "sm_90", **target})
    found = plan_softmax(call.program, analyse(call.program).softmax, spec, "decode")
    assert isinstance(found, Refusal) and why in found.reason, found


def test_pages_that_are_no_blocks_are_refused():
    cache = cache_of([20], 64, 4)
    call, _ = bind(LATENT.declaration, operands(1, 1, 1, 64), {"scale": 0.1, "cache": cache})
    found = plans_of(call)
    assert isinstance(found, Refusal) and "a page of 4 keys" in found.reason


@pytest.mark.parametrize("asked", ["return_lse", "return_partial"])
def test_a_call_that_wants_its_lse_is_left_to_triton(asked):
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    entry = TableEntry("by-test", Family.WARP, (), (), (("late", True),), measured)
    args = operands(1, 1, 80, 64)
    plain, _ = bind(LATENT.declaration, args, {"scale": 0.1})
    call, _ = bind(LATENT.declaration, args, {"scale": 0.1, asked: True})
    found = plans_of(call)
    assert isinstance(found, Refusal) and "it writes no lse" in found.reason
    tuned = PlanTable((entry,), "by-test")
    assert isinstance(plans_of(plain, None, tuned=tuned).whole, SharedPlan)
    plans = plans_of(call, None, tuned=tuned)
    for plan in (plans.whole, *plans.parts):
        assert plan.dialect is Dialect.TRITON and not isinstance(plan, SharedPlan)


def test_a_table_chooses_it_for_whole_and_split():
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    choose = (("ahead", True), ("block_n", 32), ("late", True), ("stages", 4))
    entry = TableEntry(
        "by-test", Family.WARP, (("dots", "512+64"), ("phase", "decode")), (("rows", 64, 1e9),),
        choose, measured,
    )  # fmt: skip
    for heads, taken in ((64, True), (128, True), (8, False)):
        call, _ = bind(LATENT.declaration, operands(1, 1, 80, heads), {"scale": 0.1})
        plans = plans_of(call, None, tuned=PlanTable((entry,), "by-test"))
        for plan in (plans.whole, plans.split):
            assert isinstance(plan, SharedPlan) is taken
            if taken:
                assert (plan.block_n, plan.num_stages, plan.late, plan.ahead) == (32, 4, True, True)
                assert plan.chosen == "by-test"


def test_where_gluon_is_not_a_table_leaves_it_to_triton(monkeypatch):
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    entry = TableEntry("by-test", Family.WARP, (), (), (("block_n", 64),), measured)
    call, _ = bind(LATENT.declaration, operands(1, 1, 80, 64), {"scale": 0.1})
    for tuned in (PlanTable((entry,), "one"), PlanTable((entry,), "two")):
        spec = replace(spec_of(call), target="sm_90", tuned=tuned)
        form = analyse(call.program).softmax
        kernels = softmax.prepare(call.program, form, spec, "decode")
        assert isinstance(kernels.whole.plan, SharedPlan) is (tuned.name == "one")
        monkeypatch.setattr(dialects, "gluon_problem", lambda: "it is not there")


@pytest.mark.parametrize(("programs", "blocks", "splits"), [
    (2, 512, 64), (64, 128, 2), (80, 128, 3), (128, 128, 1), (256, 64, 1), (2, 3, 1), (0, 0, 1),
])  # fmt: skip
def test_the_last_wave_of_programs_is_not_left_empty(programs, blocks, splits):
    assert even_splits(programs, blocks, 132) == splits
