"""Which chunked scans have a state pass in CuTe-DSL, and what is said of the others."""

from dataclasses import replace

import pytest

from attncc.codegen.emit.cutedsl_state import cute_state_code
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_affine import Part
from attncc.codegen.plan_cutedsl_state import (
    MAP_BYTES,
    CuteStatePlan,
    beside_bytes,
    place_bytes,
)
from attncc.codegen.plan_gluon_systems import SystemsPlan
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.codegen.printers import source
from attncc.codegen.target import SHARED
from attncc.dsl.errors import RefusedError
from tests.codegen.test_gluon_state import decays_per_key, gated_columns, plans_of, scaled_keys
from tests.state_pass_ops import OPS

TWO_ROWS = OPS["two_rows"].declaration


def cute(**options):
    """The plans of a call that names the dialect."""
    return plans_of(**{"dialect": Dialect.CUTEDSL, **options})


@pytest.mark.parametrize(("reason", "options"), [
    ("operands of fp32", {"dtype": "fp32"}),
    ("V of 80 is no multiple of 64", {"sizes": (128, 80)}),
    ("K of 32 is not 64 or 128", {"sizes": (32, 64)}),
    ("it is written for sm_90, not sm_100", {"target": "sm_100"}),
    ("v is not aligned", {"aligned": frozenset({"q", "k", "o"})}),
    ("decays along K are inside", {"op": decays_per_key.declaration}),
    ("operand const is computed", {"op": scaled_keys.declaration}),
    ("output o loads z along V", {"op": gated_columns.declaration}),
])  # fmt: skip
def test_what_has_none_says_why(reason, options):
    with pytest.raises(RefusedError, match=reason):
        cute(**options)


@pytest.mark.parametrize("name", list(OPS))
def test_every_part_of_the_pass_is_one(name):
    plans = cute(op=OPS[name].declaration)
    parts = (plans.state, plans.split.summary, plans.split.local)
    assert all(isinstance(p, CuteStatePlan) and p.dialect is Dialect.CUTEDSL for p in parts)
    assert isinstance(plans.prepare, SystemsPlan) == (name != "linear")


@pytest.mark.parametrize(("rows", "places", "columns", "zeroed"), [
    (1, 64, 64, False), (2, 32, 32, False), (3, 20, 24, True), (4, 16, 16, False),
    (5, 12, 16, True),
])  # fmt: skip
def test_any_rows_a_token(rows, places, columns, zeroed):
    op = TWO_ROWS if rows > 1 else OPS["delta"].declaration
    plan = cute(op=op, rows=rows).state
    assert (plan.tokens, plan.places) == (places, places)
    assert plan.columns_read == columns and plan.zeroed == zeroed
    held = plan.num_stages * sum(place_bytes(plan).values()) + beside_bytes(plan)
    assert held <= SHARED["sm_90"] and f"{columns}, OperandMajorMode.K" in source(plan).text


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("name", list(OPS))
def test_every_warp_has_room_for_its_outputs_and_their_map(name, consumers):
    """Of shared memory and of the program's scratch; the maps of what is loaded have their own."""
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    choose = (("consumers", consumers), ("dialect", "cutedsl"))
    entry = TableEntry("by-test", Family.WARP_STATE, (), (), choose, measured)
    plans = cute(op=OPS[name].declaration, tuned=PlanTable((entry,), "by-test"))
    for plan in (plans.state, plans.split.summary, plans.split.local):
        code, warps = cute_state_code(plan), plan.consumers * plan.num_warps
        shown = plan.part is not Part.SUMMARY
        assert (code.out_map is not None) == shown
        assert code.scratch_bytes == MAP_BYTES * (len(code.maps) + warps * shown)
        room = code.room
        assert room.out_bytes == plan.columns_read * 32  # 16 columns of 16 bits
        assert room.outs + warps * room.out_bytes <= room.maps
        assert room.maps + MAP_BYTES * (1 + warps) <= room.barriers
        assert room.barriers + 16 * plan.num_stages <= room.bytes <= SHARED["sm_90"]
        assert plan.consumers == (consumers if plan.column_blocks % consumers == 0 else 1)


def test_steps_are_refused_by_name():
    from attncc.codegen.emit.scan_sources import choose_plans
    from attncc.codegen.pipeline import analyse
    from tests.codegen.test_gluon_state import DELTA, spec_of

    program = DELTA.trace()
    spec = spec_of(program, {"K": 128, "V": 128}, dialect=Dialect.CUTEDSL)
    with pytest.raises(RefusedError, match="steps are bound by bandwidth"):
        choose_plans(program, analyse(program), spec, chunked=False)


def test_an_entry_of_a_table_may_name_the_dialect():
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    choose = (("consumers", 2), ("stages", 2), ("systems", False), ("dialect", "cutedsl"))
    entry = TableEntry("by-test", Family.WARP_STATE, (("dtype", "bf16"),), (), choose, measured)
    tuned = PlanTable((entry,), "by-test")
    state = plans_of(tuned=tuned, dialect=None).state
    assert isinstance(state, CuteStatePlan)
    assert (state.consumers, state.num_stages, state.chosen) == (2, 2, "by-test")
    other = plans_of(tuned=tuned).state  # Gluon by name, which the entry says nothing of
    assert not isinstance(other, CuteStatePlan) and other.chosen == "rule"
    many = replace(entry, choose=(("stages", 9), ("dialect", "cutedsl")))
    with pytest.raises(RefusedError, match="9 chunks do not fit in shared memory"):
        cute(tuned=PlanTable((many,), "by-test"))
