"""The warp-specialised tile over picked rows: its text on the CPU, and who gets it."""

import functools
from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.codegen.forms import Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_gathered import plan_selected
from attncc.codegen.plan_picked import PickedPlan, picked_plan, shared_out
from attncc.codegen.plan_shared import SharedChoice
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.codegen.printers import source
from attncc.runtime import dialects, selected
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from tests.codegen import gluon_machine
from tests.codegen.test_gluon import flat
from tests.tolerance import assert_close

BF16 = torch.bfloat16
SPARSE = ac.ops.sparse_mla


def given(batch, tokens, history, heads, held, *, dtype=BF16, page=0):
    """A call over picked rows, all others NaN; its picks, and its answer in fp64 and in fp32."""
    torch.manual_seed(batch + history)
    qc, qr = (torch.randn(batch, tokens, heads, n).to(dtype) for n in (512, 64))
    kv = torch.full((batch, history, 576), torch.nan, dtype=dtype)
    places = torch.full((batch, tokens, 2048), -1, dtype=torch.int32)
    exact, rough = (torch.zeros(batch, tokens, heads, 512, dtype=torch.float64) for _ in range(2))
    for b in range(batch):
        for t in range(tokens):
            own = torch.randperm(history)[: held[(b + t) % len(held)]].sort().values
            fresh = own[kv[b, own, 0].isnan()]
            kv[b, fresh] = torch.randn(len(fresh), 576).to(dtype)
            places[b, t, : len(own)] = own.int()
            if len(own):
                q = torch.cat([qc[b, t], qr[b, t]], -1)
                for out, high in ((exact, torch.float64), (rough, torch.float32)):
                    rows = kv[b, own].to(high)
                    weight = (q.to(high) @ rows.T * 0.1).softmax(-1)
                    weight = weight if high == torch.float64 else weight.to(dtype).float()
                    out[b, t] = weight @ rows[:, :512]
    zeros = functools.partial(torch.zeros, dtype=dtype)
    index = {"qi": zeros(batch, tokens, 1, 16), "w": zeros(batch, tokens, 1)}
    args = {"qc": qc, "qr": qr, "scale": 0.1, **index}
    history_of = {"ki": zeros(batch, history, 16), "c": kv[..., :512], "r": kv[..., 512:]}
    if page:
        cache = ac.PagedCache.allocate(
            SPARSE, sizes={"B": batch, "R": 512, "P": 64, "Di": 16}, page=page, dtype=dtype,
            capacity=-(-history // page) * page,
        )  # fmt: skip
        cache.block_table.copy_(cache.block_table.flip(0).flip(1))
        at = torch.arange(history)
        for name, rows in history_of.items():
            cache.tensors[name].fill_(torch.nan)
            for b in range(batch):
                table = cache.block_table[b].long()
                cache.tensors[name][table[at // page], at % page] = rows[b]
        cache.lengths.fill_(history - tokens)
        history_of = {n: x[:, -tokens:].contiguous() for n, x in history_of.items()}
        args["cache"] = cache
    call, _ = bind(SPARSE.declaration, (), {**args, **history_of})
    return call, places, exact, rough


def gluon(call, *, split=False, **choice):
    """The plan of the tile, whatever the tables say."""
    spec = replace(spec_of(call), target="sm_90", dialect=Dialect.TRITON)
    plans = plan_selected(analyse(call.program).selected, spec, "decode")
    found = picked_plan(plans.part if split else plans.whole, spec, choice=SharedChoice(**choice))
    return found


def check(*case, splits=1, seed=0, choice=None, forms=None, **more):
    """The generated text, run and held to the contract."""
    call, places, exact, rough = given(*case, **more)
    plan = gluon(call, split=splits > 1, **(choice or {}))
    assert isinstance(plan, PickedPlan), plan
    plan = replace(plan, **(forms or {}))
    plan = shared_out(plan) or plan
    args = {**selected._arguments(call), "picked": places, "first_tile": 0, "splits": splits}
    selected._tiles(call, 1, args)
    group, out = selected._group(call, plan), call.outputs["o"]
    out.fill_(torch.nan)
    rows = call.sizes["B"] * call.sizes["T"] * group
    parts = {"m": torch.full((rows * splits,), torch.nan)}
    parts |= {"l": parts["m"].clone(), "u": torch.full((rows * splits * 512,), torch.nan)}
    args |= {f"part_{n}": x for n, x in parts.items()}
    args |= {"row_tiles": -(-group // 64), "rows": call.sizes["T"] * group}
    text = source(plan)
    programs = selected._fold_programs(call, plan) * splits * plan.shares
    gluon_machine.run(text.text, text.entry, programs, flat(plan, args), seed)
    if splits > 1:
        m, l = (parts[n].double().view(rows, splits) for n in "ml")
        share = torch.where(l == 0, 0.0, torch.exp2(m - m.amax(1, keepdim=True)))
        u = torch.where(l[..., None] == 0, 0.0, parts["u"].double().view(rows, splits, 512))
        total = (l * share).sum(1)[:, None]
        o = torch.where(total == 0, 0.0, (u * share[..., None]).sum(1) / total)
        out.copy_(o.view(out.shape))
    assert_close(out, exact, rough.to(call.dtype), call.dtype, "o")


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "case",
    [
        (1, 1, 300, 64, [300]), (2, 1, 200, 40, [1, 0]), (1, 2, 260, 128, [192, 65]),
        (1, 1, 1, 64, [1]),
    ],
)  # fmt: skip
def test_rows_are_read_where_the_picks_say(case, splits):
    check(*case, splits=splits)


@pytest.mark.parametrize("page", [16, 64])
def test_rows_in_pages(page):
    check(2, 1, 200, 40, [130, 7], page=page, splits=2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("choice", [{}, {"late": False}, {"late": False, "ahead": True}])
def test_warps_keep_in_step_in_any_order(seed, choice):
    check(1, 1, 330, 40, [330], seed=seed, choice=choice)


def test_short_blocks_and_other_types():
    check(1, 1, 150, 40, [150], choice={"block_n": 32, "stages": 4})
    check(1, 1, 150, 40, [150], dtype=torch.float16)


def test_a_merge_may_start_behind_partials():
    check(1, 1, 200, 70, [200], splits=2, forms={"released": True})


def test_partials_leave_through_the_place_of_their_keys():
    call, *_ = given(1, 1, 90, 40, [90])
    for staged, choice in (
        (True, {}), (True, {"block_n": 32, "stages": 4}), (False, {"staged": False}),
        (False, {"block_n": 32, "stages": 2}),  # they would not fit there
    ):  # fmt: skip
        assert gluon(call, split=True, **choice).staged == staged
        assert not gluon(call, **choice).staged
    check(1, 1, 90, 40, [90], splits=2, choice={"staged": False})


@pytest.mark.parametrize(("shares", "seed"), [(2, 0), (2, 1), (4, 2)])
def test_programs_share_the_columns_of_a_row(shares, seed):
    check(1, 1, 200, 40, [200], splits=2, seed=seed, choice={"shares": shares})


# --- who gets it -----------------------------------------------------------------------------

ENTRY = TableEntry(
    "by-test", Family.WARP, (("phase", "decode_picked"),), (), (("block_n", 64), ("late", False)),
    Measured("a test", (), "", "", (Time("none", 1.0),)),
)  # fmt: skip


def planned(call, dialect=None, **changed):
    """The plans of a call on Hopper, by a table of one entry."""
    table = PlanTable((ENTRY,), "one")
    spec = replace(spec_of(call), target="sm_90", dialect=dialect, tuned=table)
    return plan_selected(analyse(call.program).selected, replace(spec, **changed), "decode")


def test_an_entry_gives_it_to_the_calls_that_it_covers():
    call, *_ = given(1, 1, 80, 64, [70])
    plans = planned(call, chained=True)
    for plan in (plans.whole, plans.part):
        assert isinstance(plan, PickedPlan) and plan.chosen == "by-test"
        assert not plan.late and not plan.chained
    assert [m.phase for m in (plans.merge, *plans.fewer)] == ["merge", "merge_4", "merge_16"]
    aligned = spec_of(call).aligned - {"c"}
    for refused in ({"return_lse": True}, {"target": "sm_100"}, {"aligned": aligned}):
        assert not isinstance(planned(call, **refused).whole, PickedPlan)
        found = planned(call, Dialect.GLUON, **refused)
        assert isinstance(found, Refusal), refused
    assert not isinstance(planned(call, Dialect.TRITON).whole, PickedPlan)
    few, *_ = given(1, 1, 80, 16, [70])
    assert not isinstance(planned(few).whole, PickedPlan)
    assert "half of a tile's rows" in planned(few, Dialect.GLUON).reason


@pytest.mark.parametrize(
    ("phase", "tokens", "heads", "page", "chosen"),
    [
        ("decode", 1, 128, 0, "shared-512-64-picked"), ("decode", 2, 64, 0, "shared-512-64-picked"),
        ("decode", 1, 128, 16, "shared-512-64-picked-pages"),
        ("prefill", 20, 128, 0, "shared-512-64-picked-prefill"),
        ("prefill", 20, 128, 16, "rule"), ("decode", 1, 16, 0, "rule"),
    ],
)  # fmt: skip
def test_the_measured_table_gives_it_to_64_rows_and_more(phase, tokens, heads, page, chosen):
    call, *_ = given(1, tokens, 80, heads, [70], page=page)
    spec = replace(spec_of(call), target="sm_90")
    plans = plan_selected(analyse(call.program).selected, spec, phase)
    assert plans.whole.chosen == plans.part.chosen == chosen
    assert isinstance(plans.whole, PickedPlan) is (chosen != "rule")


def test_without_gluon_it_is_left_to_triton(monkeypatch):
    call, *_ = given(1, 1, 80, 64, [70])
    form = analyse(call.program).selected
    for there in (True, False):
        table = PlanTable((ENTRY,), str(there))
        spec = replace(spec_of(call), target="sm_90", tuned=table)
        kernels = selected.prepare(call.program, form, spec, "decode")
        assert isinstance(kernels.whole.plan, PickedPlan) is there
        monkeypatch.setattr(dialects, "gluon_problem", lambda: "it is not there")


@pytest.mark.parametrize(("batch", "ranges"), [(1, 32), (16, 4), (32, 2), (40, 3), (66, 1)])
def test_picks_are_cut_so_that_the_last_wave_is_not_left_empty(batch, ranges):
    call, *_ = given(batch, 1, 2100, 128, [0])
    spec = replace(spec_of(call), target="sm_90", tuned=PlanTable((ENTRY,), "ranges"))
    kernels = selected.prepare(call.program, analyse(call.program).selected, spec, "decode")
    assert selected._ranges(call, kernels, None) == ranges


@pytest.mark.parametrize(("batch", "shares"), [(1, 2), (4, 1), (70, 1)])
def test_columns_are_shared_out_where_multiprocessors_would_be_idle(batch, shares):
    entry = replace(ENTRY, choose=(*ENTRY.choose, ("shares", 2)))
    call, *_ = given(batch, 1, 2100, 128, [0])
    spec = replace(spec_of(call), target="sm_90", tuned=PlanTable((entry,), "shares"))
    kernels = selected.prepare(call.program, analyse(call.program).selected, spec, "decode")
    assert kernels.idle in kernels.all and kernels.idle.plan.part_e == 128
    part, found = selected._part(call, kernels, selected._ranges(call, kernels, None))
    assert found == shares and part is (kernels.idle if shares == 2 else kernels.part)
