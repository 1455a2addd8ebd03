"""Which dialect carries the states of a chunked scan: Triton, Gluon or CuTe-DSL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attncc.codegen.affine_checks import decays_each
from attncc.codegen.affine_choices import ROWS, Choice
from attncc.codegen.affine_plans import ChunkedPlans, SplitPlans, StatePlan
from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_choices import affine_wanted
from attncc.codegen.plan_cutedsl_state import cute_plans
from attncc.codegen.plan_gluon_keys import keys_plans
from attncc.codegen.plan_gluon_mixing import mixable, without_squares
from attncc.codegen.plan_gluon_resident import resident_plan
from attncc.codegen.plan_gluon_state import COLUMNS, WarpStateChoice, readable, warp_plans
from attncc.codegen.plan_gluon_systems import SystemsPlan, systems_plan
from attncc.codegen.plan_gluon_together import together_plans
from attncc.codegen.plan_table import RULE, Family, decide

KEYS_BY_RULE = True
"""Whether calls that name no dialect take the Gluon kernels for decays along the active axis."""
ROWS_BY_RULE = True
"""Whether they take the Gluon state pass, where no entry names another choice."""


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
    if decays_each(plans.state.form) and spec.dialect is not Dialect.CUTEDSL:
        return _with_keys(plans, spec, tiles)
    decided = _decided(plans.state, spec)
    if decided is None:
        return plans
    choice, chosen = decided
    base = tiles(Choice(width=COLUMNS, transposed=True, stages=1, warps=4))
    if isinstance(base, Refusal):
        return plans if spec.dialect is None else base
    if choice.mixing and mixable(base.state) and readable(base.state):
        choice = replace(choice, reader=True, consumers=1)
        found = _written(without_squares(base, spec), spec, choice, chosen)
        return plans if isinstance(found, Refusal) and spec.dialect is None else found
    choice = replace(choice, mixing=False)
    systems = _systems(plans, spec, choice)
    if isinstance(systems, SystemsPlan):
        choice = replace(choice, columnwise=systems.columnwise, halves=systems.blockwise)
        base = _gathered(base) if systems.gathered else base
    else:
        choice = replace(choice, columnwise=False, halves=False)
    found = _written(base, spec, choice, chosen)
    if isinstance(found, Refusal):
        return plans if spec.dialect is None else found
    if isinstance(systems, Refusal):
        return replace(found, prepare=plans.prepare, mix=plans.mix)
    both, state = together_plans(systems, found.state, spec.target), found.state
    if choice.resident:
        state = resident_plan(state, spec.target)
    return replace(found, state=state, prepare=systems, mix=None, together=both)


def _systems(plans: ChunkedPlans, spec: Spec, choice: WarpStateChoice) -> SystemsPlan | Refusal:
    """The kernel in the place of ``prepare`` and ``mix``."""
    if not choice.systems:
        return Refusal("not chosen")
    gluon = (spec.dialect or choice.dialect) is Dialect.GLUON
    found = systems_plan(
        plans, spec, columnwise=choice.columnwise and gluon, leaf=choice.leaf, gathered=gluon,
        blockwise=choice.blockwise and gluon, registers=choice.system_registers,
    )  # fmt: skip
    if isinstance(found, Refusal):
        return found
    return replace(found, chained=choice.chained and spec.chained)


def _decided(plan: StatePlan, spec: Spec) -> tuple[WarpStateChoice, str] | None:
    """What the call's dialect takes, and who decided; None where the call stays with Triton."""
    choice, chosen = _chosen(plan, spec)
    if spec.dialect is None and chosen == RULE and not ROWS_BY_RULE:
        return None
    if spec.dialect not in (None, choice.dialect):  # the entry is about the other one
        choice, chosen = WarpStateChoice(dialect=spec.dialect), RULE
    if chosen != RULE or choice.dialect is not Dialect.GLUON:
        return choice, chosen
    choice = replace(choice, reader=True, loaders=4, blockwise=True)
    if len(plan.form.rows) > 1:
        choice = replace(choice, summary_consumers=2, system_registers=168)
    elif plan.solve:
        choice = replace(choice, summary_consumers=2)
    else:
        choice = replace(choice, mixing=True)
    return choice, chosen


def _with_keys(
    plans: ChunkedPlans, spec: Spec, tiles: Callable[[Choice], ChunkedPlans | Refusal]
) -> ChunkedPlans | Refusal:
    """The plans in Gluon where every element of the active axis has a decay of its own."""
    choice, chosen = _chosen(plans.state, spec)
    choice = replace(choice, columnwise=False, halves=False)  # squares lie row by row, whole
    if spec.dialect is None and not KEYS_BY_RULE:
        return plans
    if chosen == RULE:
        choice = replace(choice, reader=True, summary_consumers=2)
    keys = keys_plans(plans, spec)
    if isinstance(keys, Refusal):
        return plans if spec.dialect is None else keys
    base = tiles(Choice(width=COLUMNS, transposed=True, stages=1, warps=4))
    found = base if isinstance(base, Refusal) else warp_plans(base, spec, choice, chosen)
    if isinstance(found, Refusal):
        if spec.dialect is not None:
            return found
        found = plans  # the systems alone are in Gluon
    return replace(found, prepare=keys[0], mix=keys[1])


def _gathered(plans: ChunkedPlans) -> ChunkedPlans:
    """The plans with the rows of a chunk one behind the other, as many whole tokens as fit."""
    n, split, table = ROWS // len(plans.state.form.rows), plans.split, plans.table
    assert split.lead is not None

    def gathered(plan: StatePlan) -> StatePlan:
        return replace(plan, tokens=n, block_tokens=n)

    summary, local, lead = map(gathered, (split.summary, split.local, split.lead))
    start = replace(split.start, tokens=n, block_tokens=n)
    return replace(
        plans, state=gathered(plans.state), split=SplitPlans(summary, start, local, lead),
        table=None if table is None else replace(table, tokens=n),
    )  # fmt: skip


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
