"""Which kernels calls get whose decay has a value for each key element."""

import pytest

from attncc.codegen import affine_dialects
from attncc.codegen.affine_plans import MixPlan, PreparePlan, StatePlan
from attncc.codegen.emit.scan_sources import choose_plans
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_gluon_keys import InversePlan, KeysPlan
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.dsl.errors import RefusedError
from tests.key_decay_ops import SYSTEMS

NUMBERS = dict.fromkeys(("g", "beta", "bias"), "fp32")


def plans_of(name, key=128, dtype="bf16", target="sm_90", dialect=Dialect.GLUON):
    program = SYSTEMS[name].declaration.trace(None, {})
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    dtypes = {n: NUMBERS.get(n, dtype) for n in sorted(names)} | {"s": "fp32", "s_initial": "fp32"}
    axes = {a for t in program.tensors for a in t.pattern.axes}
    spec = Spec(
        dtypes=tuple(dtypes.items()),
        static=tuple((a, n) for a, n in {"G": 2, "K": key, "V": 128}.items() if a in axes),
        aligned=frozenset([*dtypes, "s_final"]),
        given_states=frozenset({"s"}),
        target=target,
        dialect=dialect,
        buckets=(("systems", 32),),
    )
    return choose_plans(program, analyse(program), spec, chunked=True)


@pytest.mark.parametrize("name", ["kda", "gla", "two_vectors"])
def test_a_named_dialect_has_all_of_its_kernels(name):
    plans = plans_of(name)
    assert isinstance(plans.prepare, KeysPlan) and isinstance(plans.state, WarpStatePlan)
    assert isinstance(plans.mix, InversePlan) == plans.state.solve
    # two warpgroups for 128 elements of the key: half of the rows in a thread
    assert plans.prepare.num_warps == 8 and plans_of(name, key=64).prepare.num_warps == 4


@pytest.mark.parametrize(("reason", "options"), [
    ("operands of fp32", {"dtype": "fp32"}),
    ("K of 96", {"key": 96}),
    ("it is written for sm_90", {"target": "sm_100"}),
])  # fmt: skip
def test_what_has_none_says_why_and_stays_with_triton(reason, options):
    with pytest.raises(RefusedError, match=reason):
        plans_of("kda", **options)
    plans = plans_of("kda", **options, dialect=None)
    assert isinstance(plans.prepare, PreparePlan) and isinstance(plans.mix, MixPlan)


def test_by_rule_the_systems_alone_may_be_in_gluon(monkeypatch):
    with pytest.raises(RefusedError, match="not computed element by element"):
        plans_of("normalised")
    plans = plans_of("normalised", dialect=None)
    assert isinstance(plans.prepare, KeysPlan) and isinstance(plans.mix, InversePlan)
    assert isinstance(plans.state, StatePlan) and plans.state.dialect is Dialect.TRITON
    assert isinstance(plans_of("kda", dialect=None).state, WarpStatePlan)
    monkeypatch.setattr(affine_dialects, "KEYS_BY_RULE", False)
    assert isinstance(plans_of("kda", dialect=None).prepare, PreparePlan)
