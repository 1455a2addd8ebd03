"""Which kernels of the scan family run a body: the choice between stepwise and chunked."""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.affine_dialects import in_dialect
from attncc.codegen.forms import Analysis, Refusal
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_affine import Choice, ChunkedPlans, plan_chunked
from attncc.codegen.plan_scan import StepPlan, final_name, initial_name, plan_step
from attncc.codegen.plan_window import plan_window
from attncc.codegen.printers import source
from attncc.codegen.render import Source
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
        if not isinstance(found, Refusal):
            return found
        refused.append(found)
    loc = next((r.loc for r in refused if r.loc.line), None)
    raise RefusedError("; ".join(map(str, refused)), op=program.name, loc=loc)


def _plan(
    program: Program, analysis: Analysis, spec: Spec, choice: Choice | None, *, chunked: bool
) -> StepPlan | ChunkedPlans | Refusal:
    if not chunked:
        return plan_step(program, spec)
    if analysis.affine is None:
        return next(iter(analysis.refusals), Refusal("no affine form", program.loc))
    form = analysis.affine
    plans = plan_chunked(program, form, spec, choice)
    if isinstance(plans, Refusal) or choice is not None:
        return plans
    return in_dialect(plans, spec, lambda tiles: plan_chunked(program, form, spec, tiles))


def sources_of(plans: StepPlan | ChunkedPlans) -> list[Source]:
    """The generated files of the plans, in launch order."""
    if isinstance(plans, StepPlan):
        return [source(plans)]
    return [source(plan) for plan in plans.kernels]


def split_sources(plans: ChunkedPlans) -> list[Source]:
    """The generated files where sequences are cut into segments, in launch order."""
    split = plans.split
    last = (split.summary, split.start, split.local)
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
    full = replace(spec, aligned=spec.aligned | named)
    if tokens == 1 and not spec.packed:
        full = replace(full, buckets=(*full.buckets, ("tokens", 1)))
    chunked = wants_chunks(full, phase, tokens)
    return sources_of(choose_plans(program, analysis, full, chunked=chunked))
