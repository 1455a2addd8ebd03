"""The state pass of many sequences by programs that stay, in Gluon.

Where sequences are many, programs follow each other on a multiprocessor: each makes its tensor maps
and loads its first chunks while nothing multiplies. Programs that stay go from one sequence's
system to the next, and what loads is ahead of what multiplies there too.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.affine_plans import StatePlan
from attncc.codegen.plan import ScalarArg
from attncc.codegen.plan_gluon_state import WarpStatePlan, one_total, stages_that_fit

CARRIED = "carried"
"""Columns of sequences' systems that programs carry, one after the other."""
LEAST_STAGES = 2
"""The next chunk's total decay is waited for before a chunk's place is free."""


def resident_plan(state: StatePlan, target: str) -> StatePlan:
    """A state pass over whole sequences by programs that stay; as it is where it has no such form.

    Args:
        state: one whose programs have columns of one sequence's system each.
        target: ``sm_90``.
    """
    if not isinstance(state, WarpStatePlan) or state.reader or state.chained:
        return state
    args = (*state.args, ScalarArg(CARRIED, "i32"))
    made = replace(state, args=args, resident=True, totals=one_total(state))
    stages = min(made.num_stages, stages_that_fit(made, target))
    return replace(made, num_stages=stages) if stages >= LEAST_STAGES else state
