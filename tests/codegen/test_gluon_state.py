"""Which chunked scans have a warp-specialised state pass, and what is said of the others."""

from dataclasses import replace

import pytest

import attncc as ac
from attncc.codegen import affine_dialects
from attncc.codegen.emit.scan_sources import choose_plans
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.codegen.plan_gluon_systems import SystemsPlan
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.dsl.errors import RefusedError
from tests.state_pass_ops import OPS

DELTA = ac.ops.gated_delta_rule.declaration


@ac.op(scan="T", out="B T H V")
def decays_per_key(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H K"), s=ac.State("B H K V"),
):  # fmt: skip
    s = ac.exp(g) * s + k * v
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def scaled_keys(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    s=ac.State("B H K V"),
):  # fmt: skip
    s = s + (2 * k) * (v - ac.dot(s, k, "K"))
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def gated_columns(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    g=ac.Activation("B T H"), z=ac.Activation("B T H V"), s=ac.State("B H K V"),
):  # fmt: skip
    s = ac.exp(g) * s
    s = s + k * (v - ac.dot(s, k, "K"))
    return s, ac.dot(s, q, "K") * ac.silu(z)


def spec_of(program, sizes, dtype="bf16", **options):
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    dtypes = {n: "fp32" if n in ("g", "beta", "s") else dtype for n in sorted(names)}
    axes = {a for t in program.tensors for a in t.pattern.axes}
    given = {
        "dtypes": tuple(dtypes.items()), "target": "sm_90", "dialect": Dialect.GLUON,
        "static": tuple((a, n) for a, n in {"G": 2, **sizes}.items() if a in axes),
        "aligned": frozenset(names), "buckets": (("systems", 32),),
    }  # fmt: skip
    return Spec(**given | options)


def plans_of(op=DELTA, sizes=(128, 128), rows=2, **options):
    named = {"K": sizes[0], "V": sizes[1], "N": rows}
    program = op.trace(None, {"N": rows} if op is OPS["two_rows"].declaration else {})
    spec = spec_of(program, named, **options)
    return choose_plans(program, analyse(program), spec, chunked=True)


@pytest.mark.parametrize(("reason", "options"), [
    ("operands of fp32", {"dtype": "fp32"}),
    ("V of 80 is no multiple of 64", {"sizes": (128, 80)}),
    ("K of 32 is not 64 or 128", {"sizes": (32, 64)}),
    ("not sm_100", {"target": "sm_100"}),
    ("v is not aligned", {"aligned": frozenset({"q", "k", "o"})}),
    ("operands of fp32", {"op": decays_per_key.declaration, "dtype": "fp32"}),
    ("operand const is computed", {"op": scaled_keys.declaration}),
    ("output o loads z along V", {"op": gated_columns.declaration}),
])  # fmt: skip
def test_what_has_none_says_why_and_stays_with_triton(reason, options):
    with pytest.raises(RefusedError, match=reason):
        plans_of(**options)
    plans = plans_of(**options, dialect=None)
    assert plans.state.dialect is Dialect.TRITON


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_rows_of_a_token_follow_each_other(rows):
    found = plans_of(OPS["two_rows"].declaration, rows=rows, packed=True)
    held = (found.prepare, found.state, found.split.summary, found.split.start, found.split.local)
    assert {p.tokens for p in (*held, found.table)} == {64 // rows}
    assert all(p.gathered for p in held) and found.state.places == 32
    assert isinstance(found.prepare, SystemsPlan) and isinstance(found.state, WarpStatePlan)


def test_the_rule_takes_them_where_it_is_told_to(monkeypatch):
    named = {"op": OPS["two_rows"].declaration, "rows": 4, "dialect": None}
    found = plans_of(**named)
    assert isinstance(found.state, WarpStatePlan) and found.state.reader
    assert isinstance(found.prepare, SystemsPlan) and found.prepare.blockwise
    assert plans_of(dialect=None, target="sm_100").state.dialect is Dialect.TRITON
    for other in ({"dtype": "fp32"}, {"sizes": (128, 80)}, {"target": "sm_100"}):
        assert plans_of(**named, **other).state.dialect is Dialect.TRITON
    one = plans_of(dialect=None, sizes=(64, 64)).state
    assert isinstance(one, WarpStatePlan) and one.reader and one.chosen == "rule"
    plain = plans_of(OPS["linear"].declaration, dialect=None)
    assert plain.state.mixing and plain.prepare is None and not plain.mix.squares
    monkeypatch.setattr(affine_dialects, "ROWS_BY_RULE", False)
    assert plans_of(**named).state.dialect is Dialect.TRITON


def test_without_systems_in_gluon_their_blocks_stay_and_some_do_not_fit():
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    entry = TableEntry("by-test", Family.WARP_STATE, (), (), (("systems", False),), measured)
    table = PlanTable((entry,), "by-test")
    found = plans_of(OPS["two_rows"].declaration, rows=2, tuned=table)
    assert not found.state.gathered and found.mix is not None
    with pytest.raises(RefusedError, match="3 rows a token"):
        plans_of(OPS["two_rows"].declaration, rows=3, tuned=table)


@pytest.mark.parametrize("name", list(OPS))
def test_every_part_of_the_pass_is_one(name):
    plans = plans_of(OPS[name].declaration)
    parts = (plans.state, plans.split.summary, plans.split.local)
    assert all(isinstance(p, WarpStatePlan) for p in parts)
    assert isinstance(plans.prepare, SystemsPlan) == (name != "linear")


def test_steps_are_refused_by_name():
    program = DELTA.trace()
    spec = spec_of(program, {"K": 128, "V": 128})
    with pytest.raises(RefusedError, match="steps are bound by bandwidth"):
        choose_plans(program, analyse(program), spec, chunked=False)


def test_an_entry_of_a_table_makes_it_the_default():
    measured = Measured("a test", (), "", "", (Time("none", 1.0),))
    choose = (("consumers", 2), ("stages", 2), ("systems", False))
    entry = TableEntry("by-test", Family.WARP_STATE, (("dtype", "bf16"),), (), choose, measured)
    tuned = PlanTable((entry,), "by-test")
    plans = plans_of(tuned=tuned, dialect=None)
    assert plans.state.consumers == 2 and plans.state.num_stages == 2
    assert plans.state.chosen == "by-test" and not isinstance(plans.prepare, SystemsPlan)
    many = replace(entry, choose=(("stages", 9),))
    with pytest.raises(RefusedError, match="9 chunks do not fit in shared memory"):
        plans_of(tuned=PlanTable((many,), "by-test"))
    other = plans_of(tuned=tuned, dialect=None, dtype="fp16")
    assert other.state.chosen == "rule"
    kept = plans_of(tuned=tuned, dialect=Dialect.TRITON)
    assert kept.state.dialect is Dialect.TRITON


@pytest.mark.parametrize(("options", "dialect", "measured"), [
    ({}, Dialect.GLUON, True),
    ({"packed": True, "given_states": frozenset({"s"})}, Dialect.GLUON, True),
    ({"op": OPS["read_first"].declaration}, Dialect.GLUON, True),
    ({"op": gated_columns.declaration}, Dialect.TRITON, False),
    ({"op": OPS["gated_output"].declaration}, Dialect.GLUON, False),
    ({"dtype": "fp16"}, Dialect.GLUON, False),
    ({"sizes": (128, 64)}, Dialect.GLUON, False),
    ({"buckets": (("systems", 1 << 14),)}, Dialect.GLUON, False),
])  # fmt: skip
def test_the_committed_entry_is_the_default_where_it_was_measured(options, dialect, measured):
    plans = plans_of(**options, dialect=None)
    assert plans.state.dialect is dialect
    assert plans.state.chosen.startswith("warp-state-bf16-128x128") == measured
