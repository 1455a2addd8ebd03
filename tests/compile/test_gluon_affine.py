"""The warp-specialised state pass compiled for sm_90 without a GPU: wgmma, registers, warnings."""

import re
from dataclasses import replace

import pytest
import triton

from attncc.codegen.emit.scan_sources import choose_plans, sources_of, split_sources
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.codegen.plan_gluon_systems import CrowdedSystemsPlan, SystemsPlan
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.codegen.printers import source
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load
from tests.compile import assembled, sass
from tests.compile.test_gluon import without_switch
from tests.state_pass_ops import MORE, OPS

pytestmark = pytest.mark.gluon
NUMBERS = {"g": "fp32", "beta": "fp32"}
OLDER = triton.__version__.startswith("3.6.")  # its assembler puts a few registers more away


def spec_of(program, key, value, *, dtype="bf16", systems=32, packed=True, pooled=False, rows=2):
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    dtypes = {n: NUMBERS.get(n, dtype) for n in sorted(names)} | {"s": "fp32", "s_initial": "fp32"}
    axes = {a for t in program.tensors for a in t.pattern.axes}
    sizes = {"G": 2, "K": key, "V": value, "N": rows}
    states = frozenset({"s"})
    return Spec(
        dtypes=tuple(dtypes.items()),
        static=tuple((a, n) for a, n in sizes.items() if a in axes),
        packed=packed,
        aligned=frozenset([*dtypes, "s_final"]) - set(NUMBERS),
        given_states=states,
        pools=states if pooled else frozenset(),
        target="sm_90",
        dialect=Dialect.GLUON,
        buckets=(("systems", systems),),
    )


def plans_of(name, key, value, choose=(), **options):
    sizes = {"N": options.get("rows", 2)} if name == "two_rows" else {}
    program = (OPS | MORE)[name].declaration.trace(None, sizes)
    spec = spec_of(program, key, value, **options)
    if choose:
        measured = Measured("a test", (), "", "", (Time("none", 1.0),))
        entry = TableEntry("by-test", Family.WARP_STATE, (), (), tuple(choose), measured)
        spec = replace(spec, tuned=PlanTable((entry,), "by-test"), chained=True)
    return choose_plans(program, analyse(program), spec, chunked=True)


def built(plan, tmp_path):
    """Compiled for sm_90, and what the assembler says of it."""
    generated = source(plan)
    compiled = compile_source(generated, load(generated).function, 90)
    return compiled, assembled.said(compiled, tmp_path)


def hold(plan, tmp_path, spills=0):
    """What every state pass has: wgmma that nothing serialises, warps of two kinds, no spills."""
    assert isinstance(plan, WarpStatePlan)
    compiled, said = built(plan, tmp_path)
    text = compiled.asm["ptx"]
    for used in ("wgmma.mma_async", "setmaxnreg", "cp.async.bulk.tensor", "mbarrier.try_wait"):
        assert used in text, used
    assert not re.search(r"C75\d\d", said), said  # serialised wgmma, or an injected wait
    found = resources(compiled, "sm_90")
    assert found.spill_store_bytes <= spills, said
    assert found.shared_bytes <= 227 * 1024
    assert found.num_warps == 4 * (plan.consumers + plan.reader + plan.mixing + 1)
    faults = sass.faults(without_switch(sass.disassemble(compiled.asm["cubin"])))
    if plan.resident:  # lengths that are read say how many chunks, and so places, have passed
        faults = [f for f in faults if any(x.startswith("the constant c[0x") for x in f.origins)]
    assert not faults, sass.report(faults)


@pytest.mark.parametrize(("name", "totals"), [("linear", False), ("skipped", True)])
def test_a_warpgroup_that_mixes(name, totals, tmp_path):
    plans = plans_of(name, 128, 128, (("mixing", True), ("loaders", 4), ("totals", totals)))
    assert plans.prepare is None and plans.state.mixing
    hold(plans.state, tmp_path)
    hold(plans.split.summary, tmp_path)


@pytest.mark.parametrize("rows", [1, 2])
def test_kernels_that_run_beside_each_other(rows, tmp_path):
    choose = (("reader", True), ("consumers", 1))
    plans = plans_of("delta" if rows == 1 else "two_rows", 128, 128, choose).together
    hold(plans.state, tmp_path)
    compiled, _ = built(plans.state, tmp_path)
    awaited = compiled.asm["ptx"].index("ld.acquire.gpu.global.b32")
    fence = compiled.asm["ptx"].index("fence.proxy.async;", awaited)
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"][fence:]
    compiled, _ = built(plans.systems, tmp_path)
    stores, _, flag = compiled.asm["ptx"].rpartition("bar.sync 0;")
    assert "st.global" in stores and "st.global" not in flag
    assert flag.index("fence.acq_rel.gpu") < flag.index("st.relaxed.gpu.global.b32")


@pytest.mark.parametrize(("name", "consumers"), [("delta", 2), ("two_rows", 1)])
def test_programs_that_stay(name, consumers, tmp_path):
    choose = {"resident": True, "blockwise": True}
    choose |= {"consumers": consumers, "loaders": 4}
    plan = plans_of(name, 128, 128, tuple(choose.items()), rows=3).state
    assert plan.resident and plan.halves
    hold(plan, tmp_path)


@pytest.mark.parametrize("name", list(OPS))
def test_nothing_is_serialised_or_spilled(name, tmp_path):
    hold(plans_of(name, 128, 128).state, tmp_path)


@pytest.mark.parametrize("name", ["delta", "two_rows", "read_first", "gated_output"])
def test_systems_are_solved_without_spills(name, tmp_path):
    plan = plans_of(name, 128, 128, (("blockwise", False),)).prepare
    assert isinstance(plan, SystemsPlan) and not plan.blockwise
    compiled, said = built(plan, tmp_path)
    assert "mma.sync" in compiled.asm["ptx"]
    found = resources(compiled, "sm_90")
    # A lane holds a column of three squares; tables with more of them put a few addresses away.
    assert found.spill_store_bytes <= (0 if name == "delta" else 64), said
    assert found.num_warps == 2
    # Four programs a multiprocessor, as registers allow; three with another vector a row.
    assert (3 if name == "gated_output" else 4) * (found.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(("name", "rows"), [("delta", 1), ("two_rows", 3)])
def test_eight_warps_that_solve_in_blocks_share_a_multiprocessor(name, rows, tmp_path):
    plan = plans_of(name, 128, 64, (("blockwise", True),), rows=rows).prepare
    assert isinstance(plan, SystemsPlan) and plan.blockwise
    compiled, said = built(plan, tmp_path)
    found = resources(compiled, "sm_90")
    assert found.num_warps == plan.chunks == 2
    # addresses of what comes before a loop over heads
    assert found.spill_store_bytes <= 56 * (name == "delta"), said
    assert 8 // plan.chunks * (found.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_six_programs_of_systems_with_rows_of_a_token_share_a_multiprocessor(rows, tmp_path):
    plan = plans_of("two_rows", 128, 64, (("system_registers", 168),), rows=rows).prepare
    assert isinstance(plan, CrowdedSystemsPlan) and plan.gathered
    compiled, said = built(plan, tmp_path)
    found = resources(compiled, "sm_90")
    assert found.spill_store_bytes <= 8 and found.registers <= 168, said
    assert 6 * (found.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(("rows", "value", "choose"), [
    (3, 64, {"reader": True}), (3, 128, {"consumers": 2}), (4, 64, {"reader": True, "loaders": 4}),
])  # fmt: skip
def test_rows_of_a_token(rows, value, choose, tmp_path):
    plans = plans_of("two_rows", 128, value, tuple(choose.items()), rows=rows)
    assert plans.state.gathered and plans.state.tokens == 64 // rows
    hold(plans.state, tmp_path, spills=8 * OLDER)  # 4 with two warpgroups
    if choose.get("reader"):
        hold(plans.split.summary, tmp_path)


@pytest.mark.parametrize(("key", "value"), [(64, 64), (64, 256)])
def test_sizes(key, value, tmp_path):
    hold(plans_of("delta", key, value, packed=False, dtype="fp16").state, tmp_path)


def test_many_systems_share_what_two_warpgroups_load(tmp_path):
    plan = plans_of("delta", 128, 128, (("systems", True),), systems=512).state
    assert plan.consumers == 2 and plan.num_stages == 3
    hold(plan, tmp_path)


READER = (("reader", True), ("loaders", 4), ("columnwise", True), ("chained", True))


@pytest.mark.parametrize("name", ["delta", "two_rows", "gated_output"])
def test_a_warpgroup_that_reads_and_warps_that_load(name, tmp_path):
    plan = plans_of(name, 128, 128, READER).state
    assert plan.reader and plan.consumers == 1 and plan.num_stages >= 2
    hold(plan, tmp_path)


def test_two_warpgroups_sum_up_a_segment(tmp_path):
    plans = plans_of("delta", 128, 128, (*READER, ("summary_consumers", 2)))
    assert plans.split.summary.consumers == 2 and not plans.split.summary.reader
    assert plans.split.local.consumers == 1 and plans.split.local.reader
    hold(plans.split.summary, tmp_path)


def test_what_is_ahead_of_the_segments_leaves_their_first_state(tmp_path):
    plans = plans_of("delta", 128, 128, READER)
    lead = plans.split.lead
    assert lead.reader and plans.split.local.chained and not lead.chained  # another stream
    hold(lead, tmp_path)


def test_three_warpgroups_sum_up_a_segment_of_64_columns(tmp_path):
    choose = (*READER, ("summary_consumers", 3))
    plan = plans_of("two_rows", 128, 64, choose).split.summary
    assert plan.consumers == plan.column_blocks == 3
    hold(plan, tmp_path)


@pytest.mark.parametrize("leaf", [16, 32])
def test_squares_column_by_column(leaf, tmp_path):
    choose = (("columnwise", True), ("leaf", leaf), ("chained", True))
    plans = plans_of("delta", 128, 128, choose)
    assert plans.prepare.columnwise and plans.state.columnwise
    compiled, said = built(plans.prepare, tmp_path)
    assert "griddepcontrol.wait" in compiled.asm["ptx"]
    assert resources(compiled, "sm_90").spill_store_bytes == 0, said


@pytest.mark.parametrize("rows", [2, 3])
def test_inverses_column_by_column_of_rows_of_a_token(rows, tmp_path):
    choose = (("columnwise", True), ("leaf", 16), ("system_registers", 168))
    plans = plans_of("two_rows", 128, 128, choose, rows=rows)
    assert plans.prepare.columnwise and plans.state.columnwise
    compiled, said = built(plans.prepare, tmp_path)
    assert resources(compiled, "sm_90").spill_store_bytes == 0, said


def test_pools(tmp_path):
    hold(plans_of("delta", 128, 128, pooled=True).state, tmp_path)


@pytest.mark.parametrize("name", ["delta", "linear"])
def test_segments(name, tmp_path):
    plans = plans_of(name, 128, 128)
    summary, _, local = (s.plan for s in split_sources(plans)[len(sources_of(plans)) - 1 :])
    hold(summary, tmp_path)
    # three addresses of the warps that load, beside squares that the pass makes itself
    hold(local, tmp_path, spills=12 * local.mixing * (not OLDER))
