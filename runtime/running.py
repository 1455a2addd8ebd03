"""Runs element-wise scans over many tokens (:mod:`attncc.codegen.plan_running`).

Nothing here reads device memory, so a warmed-up call can be captured.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from attncc.codegen.emit.scan_sources import wants_chunks
from attncc.codegen.forms import Analysis, Refusal
from attncc.codegen.plan import Spec
from attncc.codegen.plan_running import (
    COLUMN_BUCKET,
    RunningChoice,
    RunningPlan,
    RunningPlans,
    plan_running,
    segments_for,
)
from attncc.codegen.printers import source
from attncc.dsl.ir import Program
from attncc.runtime.affine import common, completed, launch, points, tokens_each
from attncc.runtime.call import Call
from attncc.runtime.kernels import Kernel, load, make_ready
from attncc.runtime.recorder import workspace

_PLANS: dict[object, tuple[Program, RunningPlans | None]] = {}
_FOUND: dict[object, tuple[Kernel, ...]] = {}


def plans_of(
    call: Call, analysis: Analysis, spec: Spec, phase: str, choice: RunningChoice | None = None
) -> RunningPlans | None:
    """The plans of a call that is an element-wise scan over many tokens, else None.

    Args:
        call: a bound call of a scan.
        analysis: its program's forms.
        spec: what the call fixes.
        phase: ``prefill`` or ``decode``.
        choice: what to take instead of the rule's.
    """
    if analysis.carries is None or analysis.affine is not None:
        return None
    full = running_spec(call, spec)
    if not wants_chunks(full, phase, tokens_each(call)):
        return None
    key = (id(call.program), full, choice)  # the program stays in the table
    if key not in _PLANS:
        made = plan_running(call.program, analysis.carries, full, choice)
        _PLANS[key] = (call.program, None if isinstance(made, Refusal) else made)
    return _PLANS[key][1]


def running_spec(call: Call, spec: Spec) -> Spec:
    """What selects the kernels of a call: its number of columns steers how many a thread has.

    The number is the call's, unless the spec says another one's: a trial's.
    """
    axes = {a for n in call.program.state_names for a in call.program.tensor(n).pattern.axes}
    states = prod(call.sizes[a] for a in axes)
    columns = dict(spec.buckets).get(COLUMN_BUCKET, 1 << max(states - 1, 0).bit_length())
    return replace(completed(call, spec), buckets=((COLUMN_BUCKET, columns),))


def run(
    call: Call, analysis: Analysis, spec: Spec, phase: str, segments: int | None = None,
    choice: RunningChoice | None = None,
) -> bool:  # fmt: skip
    """Run a call if it is an element-wise scan over many tokens.

    Args:
        call: a bound call; a final state may be the given initial one itself.
        analysis: its program's forms.
        spec: what the call fixes.
        phase: ``prefill`` or ``decode``.
        segments: parts of each sequence that are worked on at once; None lets sizes decide.
        choice: what to take instead of the rule's.

    Returns:
        Whether the call was run; where it was not, nothing was written.
    """
    plans = plans_of(call, analysis, spec, phase, choice)
    if plans is None:
        return False
    programs = call.sizes["B"] * points(call, plans.whole)
    parts = segments or segments_for(programs, int(tokens_each(call)))
    if parts == 1:
        [whole] = _loaded(call, spec, plans.whole)
        launch(whole, programs, _values(call, plans.whole))
        return True
    summary, local = _loaded(call, spec, plans.summary, plans.local)
    numbers = 2 * programs * parts * plans.local.axis(plans.local.blocked).block
    more: dict[str, torch.Tensor | float] = {
        "summaries": workspace(numbers, torch.float32, call.device), "segments": parts,
    }  # fmt: skip
    launch(summary, programs * parts, _values(call, plans.summary) | more)
    launch(local, programs * parts, _values(call, plans.local) | more)
    return True


def _loaded(call: Call, spec: Spec, *plans: RunningPlan) -> tuple[Kernel, ...]:
    key = tuple(map(id, plans))  # they stay in the table of plans
    if key not in _FOUND:
        _FOUND[key] = tuple(load(source(p)).ensure(spec.target) for p in plans)
    make_ready(_FOUND[key], call.device, spec.target)
    return _FOUND[key]


def _values(call: Call, plan: RunningPlan) -> dict[str, torch.Tensor | float]:
    return common(call, plan) | {"tokens": call.sizes.get("T", 1)}
