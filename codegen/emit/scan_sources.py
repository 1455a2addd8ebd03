"""Which kernels of the scan family run a body: the choice between stepwise and chunked."""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen import plan_across, plan_running
from attncc.codegen.affine_checks import chunk_refusal
from attncc.codegen.affine_dialects import in_dialect
from attncc.codegen.forms import Analysis, Refusal
from attncc.codegen.loops_apart import loop_apart
from attncc.codegen.passes.split_rows import SplitRows
from attncc.codegen.pipeline import analyse, pointwise_source
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_affine import Choice, ChunkedPlans, plan_chunked
from attncc.codegen.plan_pointwise import plan_pointwise
from attncc.codegen.plan_scan import StepPlan, final_name, initial_name, plan_step
from attncc.codegen.plan_window import plan_window
from attncc.codegen.printers import source
from attncc.codegen.render import Source
from attncc.codegen.rows_apart import core_spec, numbers_ahead, rows_behind, rows_spec
from attncc.codegen.steps_apart import step_apart
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program

FEW_TOKENS = 8
"""Up to this many tokens a sequence the stepwise kernel is used: it moves the state once."""
IN_CHUNKS = (Dialect.GLUON, Dialect.CUTEDSL)
"""Dialects that have no stepwise kernel."""


def wants_chunks(spec: Spec, phase: str, tokens: float) -> bool:
    """Whether the chunked form is tried first; some dialects have no other.

    Args:
        spec: of the call.
        phase: ``prefill`` or ``decode``.
        tokens: of a sequence, on average.
    """
    if phase == "decode" or spec.token_slots:
        return False
    return tokens > FEW_TOKENS or spec.dialect in IN_CHUNKS


def choose_plans(
    program: Program,
    analysis: Analysis,
    spec: Spec,
    *,
    chunked: bool,
    choice: Choice | None = None,
) -> StepPlan | ChunkedPlans:
    """The plans of a call; each form stands in for the other where one is refused.

    Args:
        program: a scan.
        analysis: its forms.
        spec: dtypes, static sizes, alignment.
        chunked: the form to try first.
        choice: what the chunked kernels take instead of their own choice.

    Raises:
        RefusedError: both are refused; the message gives both reasons.
    """
    refused: list[Refusal] = []
    if spec.dialect in IN_CHUNKS and not chunked:
        raise RefusedError("steps are bound by bandwidth, and run in Triton", op=program.name)
    for want in (chunked,) if spec.dialect in IN_CHUNKS else (chunked, not chunked):
        found = _plan(program, analysis, spec, choice if want else None, chunked=want)
        if isinstance(found, StepPlan) and chunked:  # a loop: a token's way through it is the time
            return replace(found, ahead=True)
        if not isinstance(found, Refusal):
            return found
        refused.append(found)
    loc = next((r.loc for r in refused if r.loc.line), None)
    raise RefusedError("; ".join(map(str, refused)), op=program.name, loc=loc)


NUMBERS_AHEAD = True
"""Whether calls that name no dialect find sums of a row ahead, where that is what keeps a kernel of
chunks from being Gluon's."""


def in_parts(program: Program, spec: Spec, *, chunked: bool) -> SplitRows | None:
    """The parts of a call that runs as several programs, or None for one that does not.

    Args:
        program: a scan.
        spec: of the call.
        chunked: the call wants chunks (:func:`wants_chunks`).
    """
    if not chunked:
        return step_apart(program, spec)
    form = analyse(program).affine
    if spec.token_slots or form is None:
        return loop_apart(program, spec) if _chunks(program, spec) is None else None
    ahead = numbers_ahead(program)
    if isinstance(ahead, SplitRows) and _for_gluon(program, ahead, spec):
        return ahead
    if chunk_refusal(program, form) is None:
        return None
    for parts in (rows_behind(program), ahead):
        if isinstance(parts, SplitRows):
            triton = replace(core_spec(parts, spec), dialect=Dialect.TRITON)
            if _chunks(parts.core, triton) is not None and _has_rows(parts, spec):
                return parts
    return None


def _for_gluon(program: Program, ahead: SplitRows, spec: Spec) -> bool:
    """Whether sums found ahead bring a call to Gluon."""
    wanted = spec.dialect is Dialect.GLUON or (spec.dialect is None and NUMBERS_AHEAD)
    if not wanted or _in_gluon(program, spec):
        return False
    return _in_gluon(ahead.core, core_spec(ahead, spec)) and _has_rows(ahead, spec)


def _in_gluon(program: Program, spec: Spec) -> bool:
    """Whether all kernels of a scan in chunks would be Gluon's."""
    plans = _chunks(program, spec)
    each = () if plans is None else (plans.prepare, plans.mix, plans.state)
    return bool(each) and all(p is None or p.dialect is Dialect.GLUON for p in each)


def _chunks(program: Program, spec: Spec) -> ChunkedPlans | None:
    found = _plan(program, analyse(program), spec, None, chunked=True)
    return found if isinstance(found, ChunkedPlans) else None


def _has_rows(parts: SplitRows, spec: Spec) -> bool:
    own = rows_spec(parts, spec)
    each = (*parts.ahead, *([parts.rows] if parts.rows is not None else []))
    return not any(isinstance(plan_pointwise(p, own), Refusal) for p in each)


def _plan(
    program: Program, analysis: Analysis, spec: Spec, choice: Choice | None, *, chunked: bool
) -> StepPlan | ChunkedPlans | Refusal:
    if not chunked:
        return plan_step(program, spec)
    if analysis.across is not None and plan_across.BY_RULE:
        return plan_across.plan_across(program, analysis.across, spec, choice)
    if analysis.affine is None:
        return next(iter(analysis.refusals), Refusal("no affine form", program.loc))
    form = analysis.affine
    plans = plan_chunked(program, form, spec, choice)
    if isinstance(plans, Refusal) or choice is not None:
        return plans
    return in_dialect(plans, spec, lambda tiles: plan_chunked(program, form, spec, tiles))


def rows_sources(parts: SplitRows, spec: Spec) -> tuple[list[Source], list[Source]]:
    """The kernels of a call's parts ahead of the scan, and behind it."""
    own = rows_spec(parts, spec)
    behind = [] if parts.rows is None else [pointwise_source(parts.rows, own)]
    return [pointwise_source(p, own) for p in parts.ahead], behind


def sources_of(plans: StepPlan | ChunkedPlans) -> list[Source]:
    """The generated files of the plans, in launch order."""
    if isinstance(plans, StepPlan):
        return [source(plans)]
    return [source(plan) for plan in plans.kernels]


def split_sources(plans: ChunkedPlans, *, lead: bool = False) -> list[Source]:
    """The generated files where sequences are cut into segments, in launch order.

    Args:
        plans: of the call.
        lead: with the kernel for what is ahead of all segments, where there is one.
    """
    split, first = plans.split, [plans.split.lead] if lead and plans.split.lead else []
    last = (*first, split.summary, split.start, split.local)
    return [*sources_of(plans)[:-1], *(source(plan) for plan in last)]


def scan_sources(program: Program, analysis: Analysis, spec: Spec, phase: str) -> list[Source]:
    """The kernels that a call of this kind launches.

    Raises:
        RefusedError: no kernel covers the body.
    """
    states = [n for n in program.state_names if n in spec.aligned]
    named = {f(n) for n in states for f in (initial_name, final_name)}
    tokens = dict(spec.buckets).get("T", 0)
    if analysis.carries is not None:
        windows = plan_window(program, analysis.carries, spec)
        if not isinstance(windows, Refusal):
            return [source(windows)]
    full = replace(spec, aligned=spec.aligned | named, dense=spec.dense | named)
    if tokens == 1 and not spec.packed:
        full = replace(full, buckets=(*full.buckets, ("tokens", 1)))
    chunked = wants_chunks(full, phase, tokens)
    if chunked and analysis.carries is not None:
        running = plan_running.plan_running(program, analysis.carries, full)
        if not isinstance(running, Refusal):
            return [source(plan) for plan in running.kernels]
    parts = in_parts(program, full, chunked=chunked)
    if parts is not None:
        core, own = parts.core, core_spec(parts, full)
        plans = choose_plans(core, analyse(core), own, chunked=chunked)
        ahead, behind = rows_sources(parts, full)
        return [*ahead, *sources_of(plans), *behind]
    return sources_of(choose_plans(program, analysis, full, chunked=chunked))
