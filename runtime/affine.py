"""Runs scans: chunked where a body's affine form allows and there are tokens enough, else stepwise.

A call's plans, kernels and grids follow from its program, dtypes, static sizes and alignment; they
are found once and kept. Nothing here reads device memory, so a warmed-up call can be captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch

from attncc.codegen.emit.scan_sources import (
    choose_plans,
    sources_of,
    split_sources,
    wants_chunks,
)
from attncc.codegen.forms import Analysis
from attncc.codegen.plan import Spec, TensorArg
from attncc.codegen.plan_affine import (
    ROWS,
    Choice,
    ChunkedPlans,
    ChunkPlan,
    Part,
    StatePlan,
    SystemPlan,
)
from attncc.codegen.plan_choices import chosen_segments
from attncc.codegen.plan_chunks import ChunkTablePlan
from attncc.codegen.plan_gluon_resident import CARRIED
from attncc.codegen.plan_gluon_state import WarpStatePlan, columns_a_program
from attncc.codegen.plan_gluon_systems import SystemsPlan, square_size
from attncc.codegen.plan_gluon_together import FLAGS
from attncc.codegen.plan_scan import ScanPlan, StepPlan, final_name, flat, initial_name
from attncc.dsl.ir import Program
from attncc.runtime import across, selfcheck
from attncc.runtime.call import Call, aligned, in_pieces
from attncc.runtime.kernels import Kernel, load, make_ready
from attncc.runtime.lead import ahead_of
from attncc.runtime.lead import run as run_lead
from attncc.runtime.recorder import workspace
from attncc.runtime.segments import segment_buffers, segments_of, systems_of
from attncc.runtime.slices import run as run_slices
from attncc.runtime.slices import slices_of, with_states
from attncc.runtime.tables import staying, tile_capacity
from attncc.runtime.together import fits
from attncc.runtime.together import run as run_together

_BITS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _BITS.items()}


@dataclass(frozen=True, slots=True)
class Stepwise:
    """A loaded ``step`` kernel."""

    plan: StepPlan
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Chunked:
    """The loaded kernels of the chunked form, in launch order."""

    plans: ChunkedPlans
    kernels: tuple[Kernel, ...]


_PLANS: dict[object, tuple[Program, StepPlan | ChunkedPlans]] = {}
_FOUND: dict[object, Stepwise | Chunked] = {}


def run(
    call: Call,
    analysis: Analysis,
    spec: Spec,
    phase: str,
    choice: Choice | None = None,
    *,
    segments: int | None = None,
    cuts: int | None = None,
    ahead: int | None = None,
) -> None:
    """Run a scan and write its outputs and final states.

    Args:
        call: a bound call; a final state may be the given initial state itself.
        analysis: the program's forms.
        spec: what the call fixes.
        phase: ``prefill`` takes the chunked form where it can; ``decode`` steps.
        choice: what the chunked kernels take instead of their own choice.
        segments: parts of each sequence that are worked on at once in the chunked form; None takes
            what :func:`segments_of` finds from the sizes.
        cuts: slices that run one after the other (:mod:`attncc.runtime.slices`), of a call with all
            its states; None takes what the sizes say, and segments leave no more than one.
        ahead: what :func:`attncc.runtime.lead.ahead_of` else says.

    Raises:
        RefusedError: no kernel covers the body; the message gives every reason.
    """
    full = completed(call, spec)
    chunked = wants_chunks(full, phase, tokens_each(call)) and across.has_room(call, analysis)
    # The program stays in the table, so its identity is not used again.
    key = (id(call.program), full, chunked, choice)
    if (plans := _PLANS.get(key)) is None:
        chosen = choose_plans(call.program, analysis, full, chunked=chunked, choice=choice)
        plans = _PLANS[key] = (call.program, chosen)
    parts = 1
    if isinstance(plans[1], ChunkedPlans):
        parts = segments or _segments(call, plans[1], full)
        carried = call.sizes["B"] * points(call, plans[1].state)
        if segments is None and parts == 1 and cuts is None and fits(call, plans[1], carried):
            run_together(call, _load_together(call, key, plans[1], full.target))
            return
        if segments is None and parts == 1 and cuts is None:
            cuts = slices_of(call, plans[1], carried)
            if cuts > 1:
                given = replace(spec, given_states=frozenset(call.program.state_names))
                call = with_states(call)
                with selfcheck.running(call, analysis, given, phase):  # its kernels take states
                    run(call, analysis, given, phase, choice, segments=1, cuts=cuts)
                return
    ahead = _ahead(call, plans[1], parts) if ahead is None else ahead
    found = _load(key, plans[1], full.target, split=parts > 1, lead=ahead > 0)
    if isinstance(found, Stepwise):
        _run_step(call, found)
    else:
        make_ready(found.kernels, call.device, full.target)
        if parts == 1 and cuts is not None and cuts > 1:
            run_slices(call, found, cuts)
        else:
            _run_chunked(call, found, parts, ahead)


def _load(
    key: object, plans: StepPlan | ChunkedPlans, target: str, *, split: bool, lead: bool
) -> Stepwise | Chunked:
    """The kernels of a call; kept for the next one of its kind."""
    found = _FOUND.get((key, split, lead))
    if found is not None:
        return found
    if isinstance(plans, StepPlan):
        found = Stepwise(plans, load(sources_of(plans)[0]).ensure(target))
    else:
        sources = split_sources(plans, lead=lead) if split else sources_of(plans)
        found = Chunked(plans, tuple(load(source).ensure(target) for source in sources))
    _FOUND[key, split, lead] = found
    return found


def _load_together(call: Call, key: object, plans: ChunkedPlans, target: str) -> Chunked:
    """The kernels that run beside each other, ready."""
    found = _FOUND.get((key, "together"))
    if not isinstance(found, Chunked):
        both = plans.together
        assert both is not None
        own = replace(plans, prepare=both.systems, state=both.state)
        found = Chunked(own, tuple(load(s).ensure(target) for s in sources_of(own)))
        _FOUND[key, "together"] = found
    make_ready(found.kernels, call.device, target)
    return found


def tokens_each(call: Call) -> float:
    """Tokens of a sequence, on average."""
    tokens = call.sizes.get("T", 1)
    return tokens / max(call.sizes["B"], 1) if call.packed else tokens


def completed(call: Call, spec: Spec) -> Spec:
    """The spec with the size of every axis a tile may hold, and the given states by themselves.

    Which systems plans are for is the call's number, unless the spec says another one's: a trial's.
    The bucket ``tokens`` is there where every sequence has one, ``flat`` where they are many.
    """
    given = {initial_name(n): call.tensors[n] for n in spec.given_states}
    states = given | {final_name(n): t for n, t in _finals(call).items()}
    axes = [call.patterns[n].axes for n in call.program.state_names]
    static = {a: call.sizes[a] for held in axes for a in held[-2:] if a not in ("B", "T")}
    systems = prod(call.sizes[axis] for axis in axes[0][:-2])
    said = dict(spec.buckets)
    bucket = said.get("systems", 1 << max(systems - 1, 0).bit_length())
    one = not call.packed and call.sizes.get("T") == 1
    one = one and ("tokens" in said or "systems" not in said)
    return replace(
        spec,
        dtypes=spec.dtypes + tuple((n, _NAMES[t.dtype]) for n, t in given.items()),
        static=tuple(sorted((static | dict(spec.static)).items())),
        aligned=spec.aligned.union(n for n, t in states.items() if aligned(t)),
        dense=spec.dense.union(n for n, t in states.items() if in_pieces(t)),
        buckets=(("systems", bucket), *((("tokens", 1),) if one else ()), *flat(call.sizes["B"])),
    )


def _finals(call: Call) -> dict[str, torch.Tensor]:
    """Where states after the last token go: tensors of their own, or the pools."""
    return {**call.final_states, **{n: pool.pool for n, pool in call.pools.items()}}


# --- launching ----------------------------------------------------------------------------------


def common(call: Call, plan: ScanPlan) -> dict[str, torch.Tensor | float]:
    """The call's own tensors, numbers and sizes by parameter name."""
    values: dict[str, torch.Tensor | float] = {**call.tensors, **call.outputs}
    values |= {initial_name(n): call.tensors[n] for n in plan.given}
    values |= {final_name(n): t for n, t in _finals(call).items()}
    for name, pool in call.pools.items():
        values |= {f"{name}_slots": pool.slots, f"{name}_out_slots": pool.written}
        values[f"{name}_out_width"] = pool.written.shape[-1]
    values |= {f"{n}_value": v for n, v in call.scalars.items()}
    values |= {f"n_{a}": n for a, n in call.sizes.items()}
    if call.cu_seqlens is not None:
        values["cu_seqlens"] = call.cu_seqlens
    return values


def points(call: Call, plan: ScanPlan) -> int:
    """Programs per sequence."""
    n = plan.axis(plan.blocked).blocks if plan.blocked else 1
    if isinstance(plan, StatePlan):
        n = plan.column_blocks // columns_a_program(plan)
    for axis in plan.grid_axes:
        n *= call.sizes[axis]
    return n


def launch(kernel: Kernel, programs: int, values: Mapping[str, torch.Tensor | float]) -> None:
    """Launch a kernel over some programs with what it takes of the values."""
    wanted = {a.name: values[a.name] for a in kernel.plan.args}
    kernel.launch((programs,), wanted)


def carry(
    kernel: Kernel, programs: int, values: Mapping[str, torch.Tensor | float], device: torch.device
) -> None:
    """Launch a kernel of the chunked form; where programs stay, as many as have a place at once."""
    if isinstance(kernel.plan, WarpStatePlan) and kernel.plan.resident:
        values, programs = {**values, CARRIED: programs}, staying(programs, device)
    launch(kernel, programs, values)


def _run_step(call: Call, chosen: Stepwise) -> None:
    values = common(call, chosen.plan)
    values["tokens"] = call.sizes.get("T", 1)
    grid = chosen.plan.grid(call.sizes["B"], points(call, chosen.plan))
    chosen.kernel.launch(grid, {a.name: values[a.name] for a in chosen.plan.args})


def _buffers(plans: ChunkedPlans, systems: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What ``prepare`` and ``mix`` leave; every place that is read is written before."""
    found: dict[str, torch.Tensor] = across.buffers(plans, systems, device)
    state = plans.state
    operand = ROWS * state.axis(state.form.active[0]).block
    if plans.prepare is not None and any(a.name == FLAGS for a in plans.prepare.args):
        found[FLAGS] = workspace(systems // plans.prepare.shared, torch.int32, device)
    for plan in (plans.prepare, plans.mix):
        for arg in plan.args if plan is not None else ():
            if isinstance(arg, TensorArg) and arg.written and arg.name not in found:
                each = state.line_stride if arg.name == "lines" else _square(plan, arg.name)
                each = operand if arg.name.startswith(("late_", "early_")) else each
                dtype = _BITS[arg.dtype]
                found[arg.name] = workspace(systems * each, dtype, device)
    return found


def _square(plan: SystemPlan | None, name: str) -> int:
    """Numbers of a chunk's square."""
    if isinstance(plan, SystemsPlan):
        return square_size(plan, name, halves=plan.blockwise)
    return ROWS * ROWS


def _chunks(call: Call, plan: ChunkPlan) -> tuple[int, dict[str, torch.Tensor | float]]:
    """The number of chunks (an upper bound for packed calls), and where each lies."""
    tokens = call.sizes["T"]
    if call.cu_seqlens is not None:
        sequences = call.cu_seqlens.numel() - 1
        capacity = tile_capacity(tokens, sequences, plan.tokens)
        table = workspace(2 * capacity, torch.int32, call.device)
        offsets = workspace(sequences + 1, torch.int32, call.device)
        return capacity, {"chunks": table, "first_chunks": offsets, "capacity": capacity}
    each = -(-tokens // plan.tokens)
    return call.sizes["B"] * each, {"tokens_given": tokens, "chunks_each": each}


def _segments(call: Call, plans: ChunkedPlans, spec: Spec) -> int:
    if plans.across:
        return 1
    local = plans.split.local
    own = systems_of(call, local)
    tokens = int(tokens_each(call))
    measured = chosen_segments(plans, spec, call.sizes["B"] * own, tokens)
    return measured or segments_of(plans, call.sizes["B"], own, tokens)


def _ahead(call: Call, plans: StepPlan | ChunkedPlans, segments: int) -> int:
    if not isinstance(plans, ChunkedPlans) or segments < 2:
        return 0
    own = systems_of(call, plans.split.local)
    return ahead_of(plans, call.sizes["B"], own, segments, int(tokens_each(call)))


def prepared(
    call: Call, plans: ChunkedPlans, segments: int = 1
) -> tuple[int, dict[str, torch.Tensor | float]]:
    """The number of systems of a call, and every value its kernels take; makes their buffers."""
    systems, places = _chunks(call, plans.state)
    for axis in plans.state.system_axes:
        systems *= call.sizes[axis]
    values = common(call, plans.state) | places | _buffers(plans, systems, call.device)
    if plans.prepare is not None:
        values["solved"] = systems // plans.prepare.shared
    if segments > 1:
        values |= segment_buffers(call, plans, segments)
    return systems, values


def _run_chunked(call: Call, chosen: Chunked, segments: int, ahead: int = 0) -> None:
    systems, values = prepared(call, chosen.plans, segments)
    values["ahead"] = ahead
    launching = partial(_launch_over, call, systems, values)
    if ahead:
        run_lead(call.device, chosen.kernels, launching)
        return
    for kernel in chosen.kernels:
        launching(kernel)


def _launch_over(
    call: Call, systems: int, values: Mapping[str, torch.Tensor | float], kernel: Kernel
) -> None:
    """Launch one kernel of the chunked form over the call."""
    plan = kernel.plan
    if isinstance(plan, SystemPlan):
        launch(kernel, plan.programs(systems), values)
        return
    if isinstance(plan, ChunkTablePlan):
        launch(kernel, -(-int(values["capacity"]) // plan.places), values)
        return
    assert isinstance(plan, ScanPlan)
    segments = int(values["segments"]) if "segments" in values else 1
    cut = {Part.SUMMARY: segments - 1, Part.LOCAL: segments}
    over = cut.get(plan.part, 1) if isinstance(plan, StatePlan) else 1
    carry(kernel, call.sizes["B"] * over * points(call, plan), values, call.device)
