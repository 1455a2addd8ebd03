"""State passes that weigh read-outs themselves: folds in which no row reads the state.

With nothing to solve, all that a kernel before the state pass would leave of a chunk is what its
rows add to its own read-outs: a square that is written, and read again by every block of columns.
A third warpgroup makes it instead, from the vectors that are in shared memory anyway. It needs no
state, so it works ahead of the other two. What is left before the state pass is the products of
decays, a few hundred bytes a chunk; nothing at all where nothing decays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attncc.codegen.affine_checks import plain_split
from attncc.codegen.affine_choices import ROWS
from attncc.codegen.affine_plans import ChunkedPlans, MixPlan, StatePlan
from attncc.codegen.plan import Spec
from attncc.codegen.plan_scan import input_args
from attncc.dsl.ir import Input, Node

DECAY = "decay"
"""The line of a chunk's decays themselves, from which products over intervals are made."""
SCALE = "scale"
"""The line of factors that all columns of a row's constants share."""
MIXED = 2
"""Chunks whose squares are held."""
REGISTERS = 136
"""32-bit registers of a thread of the two warpgroups beside the carrying one, which has 200."""


def mixable(plan: StatePlan) -> bool:
    """Whether a state pass in Gluon can make the square of its read-out by itself.

    One row a token, written behind the token's decay and read by one read-out behind it: an
    interval is then a product of whole tokens' decays.
    """
    form = plan.form
    if plan.solve or plan.each or len(form.rows) != 1 or len(form.reads) != 1:
        return False
    [row], [read] = form.rows, form.reads
    return read.rows_visible == 1 and (not form.decays or bool(row.write_slot and read.slot))


def without_squares(plans: ChunkedPlans, spec: Spec) -> ChunkedPlans:
    """The Triton plans with products of decays for all that a kernel leaves to the state pass.

    Args:
        plans: of a fold that is :func:`mixable`.
        spec: of the call.
    """
    squares = {f"mix_{read.name}" for read in plans.state.form.reads}

    def changed(plan: StatePlan) -> StatePlan:
        args = tuple(a for a in plan.args if a.name not in squares)
        return replace(plan, args=args, **_lines(plan))

    split, lead = plans.split, plans.split.lead
    mix = plans.mix
    if isinstance(mix, MixPlan):  # without decays there is nothing to leave
        mix = _weighs(mix, squares, spec) if mix.form.decays else None
    return replace(
        plans, mix=mix, state=changed(plans.state),
        split=replace(
            split, summary=changed(split.summary), local=changed(split.local),
            lead=None if lead is None else changed(lead),
        ),
    )  # fmt: skip


def scale_of(plan: StatePlan | MixPlan) -> Node | None:
    """What the columns of a row's constants share, where that is left to the state pass."""
    [row] = plan.form.rows
    split = plain_split(row, plan.form.passive)
    apart = plan.form.decays and split.const is not None and not isinstance(row.const, Input)
    return split.scale if apart else None


def _lines(plan: StatePlan | MixPlan) -> dict[str, Any]:
    if not plan.form.decays:
        return {}
    more = (DECAY, SCALE) if scale_of(plan) is not None else (DECAY,)
    return {"lines": (*plan.lines, *more), "line_stride": plan.line_stride + ROWS * len(more)}


def _weighs(mix: MixPlan, squares: set[str], spec: Spec) -> MixPlan:
    """The kernel that leaves products of decays."""
    scale = scale_of(mix)
    roots = [*mix.form.decays, *([] if scale is None else [scale])]
    inputs = {t.name for t in mix.program.tensors}
    others = [a for a in mix.args if a.name not in inputs | squares]
    return replace(
        mix, args=(*input_args(roots, mix.program, spec), *others), squares=False, num_warps=1,
        shared_axis="", shared=1, **_lines(mix),
    )  # fmt: skip
