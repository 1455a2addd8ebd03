"""The generated kernels that a bound call would launch, found without launching anything."""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.emit.scan_sources import (
    choose_plans,
    sources_of,
    split_sources,
    wants_chunks,
)
from attncc.codegen.emit.selected_sources import selected_sources
from attncc.codegen.emit.softmax_sources import softmax_sources
from attncc.codegen.forms import Analysis, Refusal
from attncc.codegen.passes.associate import is_open
from attncc.codegen.pipeline import analyse, pointwise_source
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_affine import ChunkedPlans, SystemPlan
from attncc.codegen.plan_append import AppendPlan
from attncc.codegen.plan_window import plan_window
from attncc.codegen.printers import source
from attncc.codegen.render import Source
from attncc.codegen.rows_apart import core_spec
from attncc.codegen.target import can_chain
from attncc.dsl.errors import RefusedError
from attncc.runtime import across, rows_apart, running, slices, stages
from attncc.runtime.affine import completed, tokens_each
from attncc.runtime.backends import spec_of
from attncc.runtime.call import Call
from attncc.runtime.dialects import need_form, printable
from attncc.runtime.tuned import local_table
from attncc.runtime.window import window_spec


def spec_for(call: Call, target: str) -> Spec:
    """What selects the kernels of a call as on a GPU, wherever the call's tensors are.

    Args:
        call: a bound call.
        target: the GPU's name, such as ``sm_90``.
    """
    return replace(
        spec_of(call), target=target, tuned=local_table(target), chained=can_chain(target)
    )


def call_sources(
    call: Call, phase: str, target: str | None = None, *, spec: Spec | None = None,
    dialect: Dialect | None = None,
) -> list[Source]:  # fmt: skip
    """Every kernel that calls of this kind launch; long prompts may have another one.

    Args:
        call: a bound call; only its dtypes, layouts and sizes count.
        phase: ``prefill`` or ``decode``.
        target: the GPU's name, such as ``sm_90``; the call's own device's when None.
        spec: what selects the kernels, instead of what the call and the target say.
        dialect: of a tiled prefill; the tables of plans decide when None.

    Raises:
        RefusedError: no kernel covers the program; the message says why.
    """
    if is_open(call.program):
        if dialect is None and spec is not None:
            dialect = spec.dialect
        return _open_sources(call, phase, target or (spec or spec_of(call)).target, dialect)
    analysis = analyse(call.program)
    if spec is None:
        spec = spec_of(call) if target is None else spec_for(call, target)
    if dialect is not None:
        spec = replace(spec, dialect=dialect)
    need_form(spec.dialect, analysis, call.program.name)
    return printable(call.program, spec, phase, lambda own: _family(call, analysis, own, phase))


def long_sources(
    call: Call, phase: str, target: str | None = None, *, dialect: Dialect | None = None
) -> list[Source]:
    """:func:`call_sources`, and what long prompts launch besides: later slices are given a state.

    Args:
        call: a bound call.
        phase: ``prefill`` or ``decode``.
        target: the GPU's name; the call's own device's when None.
        dialect: as there.

    Raises:
        RefusedError: no kernel covers the program.
    """
    found = call_sources(call, phase, target, dialect=dialect)
    if not any(isinstance(s.plan, SystemPlan) for s in found) or not slices.sliceable(call):
        return found
    more = call_sources(slices.with_states(call), phase, target, dialect=dialect)
    return found + [s for s in more if s.plan.phase == "state" and s not in found]


def _family(call: Call, analysis: Analysis, spec: Spec, phase: str) -> list[Source]:
    if analysis.softmax is not None:
        return softmax_sources(call.program, analysis.softmax, spec, phase)
    if analysis.selected is not None:
        return selected_sources(call.program, analysis.selected, spec, phase)
    if analysis.pointwise:
        return [pointwise_source(call.program, replace(spec, buckets=()))]
    if call.program.scan is not None:
        return _scan(call, analysis, spec, phase)
    raise RefusedError("; ".join(map(str, analysis.refusals)), op=call.program.name)


def _open_sources(call: Call, phase: str, target: str, dialect: Dialect | None) -> list[Source]:
    """The kernels of an open program's fold, and what appends where products read a history."""
    fold = stages.fold_of(call, phase)
    found = call_sources(fold, phase, target, dialect=dialect)
    if not fold.new_rows:  # nothing to append, or appended before the products
        found = [s for s in found if not isinstance(s.plan, AppendPlan)]
    return [*stages.append_sources(call, phase, target), *found]


def _scan(call: Call, analysis: Analysis, spec: Spec, phase: str) -> list[Source]:
    full = completed(call, spec)
    if analysis.carries is not None:
        ones = (False, True) if phase == "decode" else (False,)  # lengths are not known yet
        specs = [window_spec(call, spec, one_token=one) for one in ones]
        windows = [plan_window(call.program, analysis.carries, own) for own in specs]
        kernels = [source(plan) for plan in windows if not isinstance(plan, Refusal)]
        if kernels:
            return kernels
    running_plans = running.plans_of(call, analysis, spec, phase)
    if running_plans is not None:
        return [source(plan) for plan in running_plans.kernels]
    parts, behind = rows_apart.parts_of(call, spec, phase), []
    if parts is not None:
        core, own = rows_apart.meta_core(call, parts), core_spec(parts, spec)
        ahead, rows = rows_apart.sources(call, parts, spec)
        behind = [*ahead, *_scan(core, analyse(parts.core), own, phase), *rows]
        if phase != "decode":  # there several tokens are another kernel's
            return behind
    chunked = wants_chunks(full, phase, tokens_each(call)) and across.has_room(call, analysis)
    plans = choose_plans(call.program, analysis, full, chunked=chunked)
    found = sources_of(plans)
    if isinstance(plans, ChunkedPlans):  # sequences are cut into segments where they are few
        cut = split_sources(plans, lead=True) if not plans.across else []
        found += [s for s in cut if s not in found]
        both = plans.together
        found += [] if both is None else [source(both.systems), source(both.state)]
    elif phase == "decode" and not call.packed:  # one token a sequence, or several
        rest = tuple((name, n) for name, n in full.buckets if name != "tokens")
        for more in ((), (("tokens", 1),)):
            own = replace(full, buckets=rest + more)
            other = sources_of(choose_plans(call.program, analysis, own, chunked=False))
            found += [s for s in other if s not in found]
    return [*behind, *found]
