"""Plan of element-wise scans over many tokens: rows on their way to shared memory ahead of use.

No element of such a state needs another, so a program is one warp with a few columns of it, and the
tokens are worked through in groups whose loads are all asked for some groups ahead. Where columns
alone leave the device idle, sequences are cut into segments: the (a, b) of ``s' = a s + b`` of
each is found first, and each is run from the state that those before it leave, composed in order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from attncc.codegen.affine_choices import MULTIPROCESSORS
from attncc.codegen.affine_plans import Part
from attncc.codegen.forms import Carries, DiagonalForm, Refusal
from attncc.codegen.plan import Arg, ScalarArg, Spec
from attncc.codegen.plan_scan import (
    StepPlan,
    flat_arg,
    initial_name,
    input_args,
    plan_step,
    size_args,
    state_args,
)
from attncc.codegen.scan_tiles import power, tile_body
from attncc.codegen.terms import is_number
from attncc.dsl.ir import Program

LANES = 32
GROUP = 8
"""Tokens whose rows are asked for together."""
STAGES = 8
"""Stages of the loop over groups: one is worked on, the others are on their way."""
COLUMNS = 2
"""Of a thread, where columns are few: 4 bytes of a 16-bit row, the least of an asynchronous copy.
"""
MOST_COLUMNS = 8
"""Of a thread: 16 bytes of a 16-bit row."""
WARPS = 8
"""Of a multiprocessor that segments should fill: their loads in flight take its shared memory."""
LEAST_TOKENS = 256
"""Of a segment."""
COLUMN_BUCKET = "columns"
"""The bucket with the number of states' elements of a call, all sequences together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningChoice:
    """What may be chosen freely; None leaves it to the rule.

    Attributes:
        columns: of a thread.
        group: see :data:`GROUP`.
        stages: see :data:`STAGES`.
    """

    columns: int | None = None
    group: int | None = None
    stages: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPlan(StepPlan):
    """An element-wise scan over many tokens, or a part of the work on segments.

    Attributes:
        form: the state, where it is one: what a summary is made of.
        part: ``SUMMARY`` finds each segment's (a, b), ``LOCAL`` runs it.
        group: tokens whose rows are asked for together.
        stages: of the loop over groups.
        exact: element-wise functions at fp32's own accuracy.
    """

    form: DiagonalForm
    part: Part
    group: int
    stages: int
    exact: bool


@dataclass(frozen=True, slots=True)
class RunningPlans:
    """The kernel of whole sequences; what takes its place where they are cut, in order."""

    whole: RunningPlan
    summary: RunningPlan
    local: RunningPlan

    @property
    def kernels(self) -> tuple[RunningPlan, ...]:
        """All of them."""
        return (self.whole, self.summary, self.local)


def plan_running(
    program: Program, carries: Carries, spec: Spec, choice: RunningChoice | None = None
) -> RunningPlans | Refusal:
    """The kernels of an element-wise scan over many tokens.

    Args:
        program: the scan.
        carries: what it carries.
        spec: dtypes and static sizes; the bucket :data:`COLUMN_BUCKET` steers how many columns a
            thread has.
        choice: what to take instead of the rule's.

    Returns:
        The plans, or why the body is none of these.
    """
    match carries.forms:
        case (DiagonalForm() as form,) if not is_number(form.decay, 0):
            pass
        case _:
            return Refusal("the body carries other than one element-wise state", program.loc)
    if spec.token_slots:
        return Refusal("a state stored after every token is stepped", program.loc)
    tiled = tile_body(program, spec)
    if isinstance(tiled, Refusal):
        return tiled
    if not tiled.blocked or [t.axis for t in tiled.tile] != [tiled.blocked]:
        return Refusal("a token's values span more than one axis of the state", program.loc)
    step = plan_step(program, replace(spec, buckets=(), chained=False))
    if isinstance(step, Refusal):
        return step
    choice = choice or RunningChoice()
    size = spec.size(tiled.blocked)
    columns = choice.columns or _columns(_states(program, form, spec))
    tile = tiled.cut(min(LANES * columns, power(size, LANES)))
    held: dict[str, Any] = {f.name: getattr(step, f.name) for f in fields(StepPlan)}
    own = held | {
        "phase": "running", "template": "triton/scan_running.py.jinja", "num_warps": 1,
        "tile": tile, "args": _sized(step.args, step, spec, ()), "ahead": False, "registers": 0,
    }  # fmt: skip
    whole = RunningPlan(
        **own, form=form, part=Part.WHOLE, group=choice.group or GROUP,
        stages=choice.stages or STAGES,
        exact=any(spec.dtype(o.name) == "fp32" for o in program.outputs),
    )  # fmt: skip
    return RunningPlans(whole, _summary(whole, spec), _local(whole, spec))


def _states(program: Program, form: DiagonalForm, spec: Spec) -> int:
    """Elements of a call's states, in all; of a kind of call what its sizes say."""
    said, sizes = dict(spec.buckets), dict(spec.static)
    axes = program.tensor(form.state).pattern.axes
    return said.get(COLUMN_BUCKET) or prod(said.get(a, sizes.get(a, 1)) for a in axes)


def _columns(states: int) -> int:
    """Columns of a thread: as many as leave each part of a multiprocessor a warp."""
    columns = MOST_COLUMNS
    while columns > COLUMNS and states < 4 * MULTIPROCESSORS * LANES * columns:
        columns //= 2
    return columns


def _sized(
    args: tuple[Arg, ...], plan: StepPlan, spec: Spec, more: tuple[Arg, ...]
) -> tuple[Arg, ...]:
    """Arguments, and the sizes that they need."""
    kept = [a for a in args if not (isinstance(a, ScalarArg) and a.name.startswith("n_"))]
    kept += more
    return (*kept, *size_args(kept, plan.tile, plan.grid_axes, spec))


def _summary(whole: RunningPlan, spec: Spec) -> RunningPlan:
    """The first segment's is its last state, behind the one that it starts with."""
    program, form = whole.program, whole.form
    roots = [n for n in (form.decay, form.add) if n is not None]
    args: list[Arg] = [*input_args(roots, program, spec)]
    args += [a for a in state_args(program, spec) if not a.written]
    names = {f"{n}_slots" for n in whole.pooled} | {"cu_seqlens", "tokens"}
    args += [a for a in whole.args if a.name in names]
    more = (flat_arg("summaries", "fp32", written=True), ScalarArg("segments", "i32"))
    return replace(
        whole, phase="running_summary", part=Part.SUMMARY,
        args=_sized(tuple(args), whole, spec, more),
    )  # fmt: skip


def _local(whole: RunningPlan, spec: Spec) -> RunningPlan:
    initial = {initial_name(n) for n in whole.given} | {f"{n}_slots" for n in whole.pooled}
    args = tuple(a for a in whole.args if a.name not in initial)
    more = (flat_arg("summaries", "fp32"), ScalarArg("segments", "i32"))
    return replace(
        whole, phase="running_local", part=Part.LOCAL, given=(),
        args=_sized(args, whole, spec, more),
    )  # fmt: skip


def segments_for(programs: int, tokens: int) -> int:
    """Into how many segments sequences are cut.

    Args:
        programs: of one segment of every sequence.
        tokens: of a sequence, on average.
    """
    if programs >= MULTIPROCESSORS:
        return 1
    wanted = WARPS * MULTIPROCESSORS // max(programs, 1)
    return max(1, min(wanted, tokens // LEAST_TOKENS))
