"""The generated kernels that a bound call would launch, found without launching anything."""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.emit import window
from attncc.codegen.emit.scan_sources import (
    FEW_TOKENS,
    choose_plans,
    sources_of,
    split_sources,
)
from attncc.codegen.emit.softmax import softmax_sources
from attncc.codegen.forms import Analysis, Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.plan_affine import ChunkedPlans
from attncc.codegen.plan_window import plan_window
from attncc.codegen.render import Source
from attncc.dsl.errors import RefusedError
from attncc.runtime.affine import completed
from attncc.runtime.backends import spec_of
from attncc.runtime.call import Call
from attncc.runtime.tuned import local_table


def call_sources(
    call: Call, phase: str, target: str | None = None, *, spec: Spec | None = None
) -> list[Source]:
    """Every kernel that calls of this kind launch, whatever their lengths.

    Args:
        call: a bound call; only its dtypes, layouts and sizes count.
        phase: ``prefill`` or ``decode``.
        target: the GPU's name, such as ``sm_90``; the call's own device's when None.
        spec: what selects the kernels, instead of what the call and the target say.

    Raises:
        RefusedError: no kernel covers the program; the message says why.
    """
    analysis = analyse(call.program)
    if spec is None:
        spec = spec_of(call)
        if target is not None:
            spec = replace(spec, target=target, tuned=local_table(target))
    if analysis.softmax is not None:
        return softmax_sources(call.program, analysis.softmax, spec, phase)
    if call.program.scan is not None:
        return _scan(call, analysis, spec, phase)
    raise RefusedError("; ".join(map(str, analysis.refusals)), op=call.program.name)


def _scan(call: Call, analysis: Analysis, spec: Spec, phase: str) -> list[Source]:
    full = completed(call, spec)
    if analysis.carries is not None:
        plan = plan_window(call.program, analysis.carries, full)
        if not isinstance(plan, Refusal):
            return [window.source(plan)]
    tokens = call.sizes.get("T", 1)
    each = tokens / max(call.sizes["B"], 1) if call.packed else tokens
    chunked = phase != "decode" and each > FEW_TOKENS and not spec.token_slots
    plans = choose_plans(call.program, analysis, full, chunked=chunked)
    found = sources_of(plans)
    if isinstance(plans, ChunkedPlans):  # sequences are cut into segments where they are few
        found += [s for s in split_sources(plans) if s not in found]
    return found
