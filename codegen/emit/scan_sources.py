"""Which kernels of the scan family run a body: the choice between stepwise and chunked."""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.emit import carry, mix, segments, solve, step, window
from attncc.codegen.forms import Analysis, Refusal
from attncc.codegen.plan import Spec
from attncc.codegen.plan_affine import Choice, ChunkedPlans, plan_chunked
from attncc.codegen.plan_scan import StepPlan, final_name, initial_name, plan_step
from attncc.codegen.plan_window import plan_window
from attncc.codegen.render import Source
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program

FEW_TOKENS = 8
"""Up to this many tokens a sequence the stepwise kernel is used: it moves the state once."""


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
    for want in (chunked, not chunked):
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
    return plan_chunked(program, analysis.affine, spec, choice)


def sources_of(plans: StepPlan | ChunkedPlans) -> list[Source]:
    """The generated files of the plans, in launch order."""
    if isinstance(plans, StepPlan):
        return [step.source(plans)]
    sources = [solve.prepare_source(plans.prepare)] if plans.prepare else []
    sources += [mix.mix_source(plans.mix)] if plans.mix else []
    return [*sources, carry.state_source(plans.state)]


def split_sources(plans: ChunkedPlans) -> list[Source]:
    """The generated files where sequences are cut into segments, in launch order."""
    split = plans.split
    return [
        *sources_of(plans)[:-1], carry.state_source(split.summary),
        segments.start_source(split.start), carry.state_source(split.local),
    ]  # fmt: skip


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
            return [window.source(windows)]
    chunked = phase != "decode" and tokens > FEW_TOKENS
    full = replace(spec, aligned=spec.aligned | named)
    return sources_of(choose_plans(program, analysis, full, chunked=chunked))
