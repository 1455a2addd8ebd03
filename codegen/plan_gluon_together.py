"""The kernel of the systems and the state pass beside each other, in Gluon.

The state pass goes from chunk to chunk and leaves half of the device idle where heads are few; the
systems of a chunk depend on no state. So both run at once: a program of ``systems`` sets a flag
once its results are in memory (release, for the whole device), and what loads a chunk's results for
the state pass waits for the flag first (acquire, then a fence, as copies take another way to
memory). Programs of ``systems`` start in the order of chunks.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.affine_plans import StatePlan, TogetherPlans
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_gluon_state import WarpStatePlan, one_total, stages_that_fit
from attncc.codegen.plan_gluon_systems import SystemsPlan
from attncc.codegen.plan_scan import final_name, flat_arg, initial_name

FLAGS = "flags"
"""The buffer with a number for each program of ``systems``: not 0 once its results are there."""


def _starts_in_16_bits(plan: StatePlan) -> bool:
    """Whether states before the first token are given, and not in fp32."""
    states = {*map(initial_name, plan.given), *map(final_name, plan.given + plan.pooled)}
    held = (a for a in plan.args if isinstance(a, TensorArg) and a.name in states)
    return any(a.dtype != "fp32" for a in held)


def together_plans(systems: SystemsPlan, state: StatePlan, target: str) -> TogetherPlans | None:
    """Both kernels in the form that runs beside each other; None where the state pass has none.

    Args:
        systems: the kernel that solves and weighs.
        state: the state pass over whole sequences.
        target: ``sm_90``.
    """
    if not isinstance(state, WarpStatePlan) or state.chained:
        return None
    if _starts_in_16_bits(state):
        return None  # Triton 3.6 carries an assembler that crashes on it
    totals = one_total(state)  # nothing may be read ahead of a chunk
    awaiting = replace(
        state, args=(*state.args, flat_arg(FLAGS, "i32")), awaited=systems.shared, totals=totals
    )
    stages = min(awaiting.num_stages, stages_that_fit(awaiting, target))
    if not stages:
        return None
    awaiting = replace(awaiting, num_stages=stages)
    announcing = replace(
        systems, args=(*systems.args, flat_arg(FLAGS, "i32", written=True)), announced=True
    )
    return TogetherPlans(announcing, awaiting)
