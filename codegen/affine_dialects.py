"""Which dialect carries the states of a chunked scan: Triton, Gluon or CuTe-DSL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attncc.codegen.affine_choices import Choice
from attncc.codegen.affine_plans import ChunkedPlans, StatePlan
from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_choices import affine_wanted
from attncc.codegen.plan_cutedsl_state import cute_plans
from attncc.codegen.plan_gluon_state import COLUMNS, WarpStateChoice, warp_plans
from attncc.codegen.plan_gluon_systems import SystemsPlan, systems_plan
from attncc.codegen.plan_table import RULE, Family, decide


def in_dialect(
    plans: ChunkedPlans, spec: Spec, tiles: Callable[[Choice], ChunkedPlans | Refusal]
) -> ChunkedPlans | Refusal:
    """The plans in the dialect that the call names, or that the table of measured plans names.

    Args:
        plans: the Triton plans.
        spec: of the call.
        tiles: makes Triton plans with tiles of another choice.

    Returns:
        The given plans, those with warp-specialised state passes, or the reason why a dialect that
        was asked for by name cannot have them.
    """
    if spec.dialect is Dialect.TRITON:
        return plans
    choice, chosen = _chosen(plans.state, spec)
    if spec.dialect is None and chosen == RULE:
        return plans
    if spec.dialect not in (None, choice.dialect):  # the entry is about the other one
        choice, chosen = WarpStateChoice(dialect=spec.dialect), RULE
    base = tiles(Choice(width=COLUMNS, transposed=True, stages=1, warps=4))
    systems: SystemsPlan | Refusal = Refusal("not chosen")
    if choice.systems:
        gluon = (spec.dialect or choice.dialect) is Dialect.GLUON
        systems = systems_plan(
            plans, spec, columnwise=choice.columnwise and gluon, leaf=choice.leaf
        )
    if isinstance(systems, SystemsPlan):
        systems = replace(systems, chained=choice.chained and spec.chained)
    turned = not isinstance(systems, Refusal) and systems.columnwise
    choice = replace(choice, columnwise=turned)
    found = base if isinstance(base, Refusal) else _written(base, spec, choice, chosen)
    if isinstance(found, Refusal):
        return plans if spec.dialect is None else found
    if isinstance(systems, Refusal):
        return replace(found, prepare=plans.prepare, mix=plans.mix)
    return replace(found, prepare=systems, mix=None)


def _chosen(plan: StatePlan, spec: Spec) -> tuple[WarpStateChoice, str]:
    """The nearest entry's choice, and its name: an entry makes the dialect the default."""
    key, value = (plan.axis(t.axis).size for t in plan.tile)
    wanted = replace(affine_wanted(plan.form, spec, key, value), family=Family.WARP_STATE)
    chosen, fixed = decide(wanted, spec.target, spec.tuned)
    values: dict[str, Any] = dict(fixed)
    if "dialect" in values:
        values["dialect"] = Dialect(values["dialect"])
    return WarpStateChoice(**values), chosen


def _written(
    base: ChunkedPlans, spec: Spec, choice: WarpStateChoice, chosen: str
) -> ChunkedPlans | Refusal:
    """The plans in the call's dialect, or in the entry's."""
    dialect = spec.dialect or choice.dialect
    make = cute_plans if dialect is Dialect.CUTEDSL else warp_plans
    return make(base, spec, choice, chosen)
