"""Runs scans in parts: numbers of rows, the scan in chunks, and the rows behind its read-outs.

The parts leave each other fp32 in workspaces (:mod:`attncc.codegen.rows_apart` says where a scan is
taken apart). Nothing here reads device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch

from attncc.codegen.emit.scan_sources import in_parts, rows_sources, wants_chunks
from attncc.codegen.passes.split_rows import SplitRows
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.render import Source
from attncc.codegen.rows_apart import core_spec, rows_spec
from attncc.dsl.ir import Program
from attncc.runtime import affine, pointwise, selfcheck
from attncc.runtime.call import Call
from attncc.runtime.recorder import workspace

_PARTS: dict[object, tuple[Program, SplitRows | None]] = {}

PARTIAL_BYTES = 2 << 30
"""Most memory of the partial sums of a loop in parts; longer prompts run in one piece."""

Room = Callable[[int], torch.Tensor]
"""Makes room for so many fp32 numbers."""


@dataclass(frozen=True, slots=True)
class CallParts:
    """A call's parts, in order: each is a call of its own."""

    ahead: tuple[Call, ...]
    core: Call
    rows: Call | None


def parts_of(call: Call, spec: Spec, phase: str) -> SplitRows | None:
    """The scan and the rows of a call that runs as both, else None.

    Args:
        call: a bound call of a scan.
        spec: what the call fixes.
        phase: ``prefill`` or ``decode``.
    """
    full = affine.completed(call, spec)
    chunked = wants_chunks(full, phase, affine.tokens_each(call))
    key = (id(call.program), full, chunked)  # the program stays in the table
    if key not in _PARTS:
        _PARTS[key] = (call.program, in_parts(call.program, full, chunked=chunked))
    parts = _PARTS[key][1]
    return parts if parts is None or not parts.spread or _has_room(call, parts) else None


def _has_room(call: Call, parts: SplitRows) -> bool:
    """Whether partial sums, a few times the numbers of an output, take no more than they may."""
    sizes = {**call.sizes, **dict(parts.sizes), **({"B": 1} if call.packed else {})}
    made = [o.pattern.axes for o in parts.core.outputs if o.name in parts.read_outs]
    return 4 * sum(prod(sizes[a] for a in axes) for axes in made) <= PARTIAL_BYTES


def calls_of(call: Call, parts: SplitRows, room: Room) -> CallParts:
    """The calls of the parts, which leave each other what they make in new room."""
    made, patterns = {}, dict(call.patterns)
    if parts.sizes:  # an axis is two: the memory is the same
        call = replace(call, sizes={**call.sizes, **dict(parts.sizes)})
    for t in parts.between:
        patterns[t.name] = t.pattern.without("B") if call.packed else t.pattern
        shape = [prod(call.sizes[a] for a in dim) for dim in patterns[t.name].dims]
        made[t.name] = room(prod(shape)).view(shape)
    whole = replace(call, tensors={**call.tensors, **made}, patterns=patterns)
    held = {**call.outputs, **made}

    def part(program: Program) -> Call:
        names = {t.name for t in program.tensors}
        return replace(
            whole, program=program, outputs={o.name: held[o.name] for o in program.outputs},
            tensors={n: t for n, t in whole.tensors.items() if n in names},
            scalars={n: v for n, v in call.scalars.items() if n in names},
        )  # fmt: skip

    core = part(parts.core)
    if parts.sizes:
        own = {t.name: t.pattern for t in parts.core.tensors if t.name in patterns}
        core = replace(core, patterns={**patterns, **own})

    def plain(program: Program) -> Call:
        return replace(part(program), final_states={}, pools={})

    rows = None if parts.rows is None else plain(parts.rows)
    return CallParts(tuple(map(plain, parts.ahead)), core, rows)


def run(call: Call, spec: Spec, phase: str, segments: int | None) -> bool:
    """Run a call if it is a scan in parts.

    Args:
        call: a bound call of a scan.
        spec: what the call fixes.
        phase: ``prefill`` or ``decode``.
        segments: as of :func:`attncc.runtime.affine.run`.

    Returns:
        Whether the call was run; where it was not, nothing was written.

    Raises:
        RefusedError: a dialect that was asked for by name has no kernels of the scan, or there are
            too many rows; nothing was written.
    """
    parts = parts_of(call, spec, phase)
    if parts is None:
        return False
    calls = calls_of(call, parts, lambda size: workspace(size, torch.float32, call.device))
    rows = rows_spec(parts, affine.completed(call, spec))
    ahead = [(part, pointwise.ready(part, rows)) for part in calls.ahead]
    behind = [] if calls.rows is None else [(calls.rows, pointwise.ready(calls.rows, rows))]
    for part, kernel in ahead:
        pointwise.launch(part, kernel)
    own, analysis = core_spec(parts, spec), analyse(parts.core)
    with selfcheck.running(calls.core, analysis, own, phase):
        affine.run(calls.core, analysis, own, phase, segments=segments)
    for part, kernel in behind:
        pointwise.launch(part, kernel)
    return True


def meta_core(call: Call, parts: SplitRows) -> Call:
    """The call of the scan, without data: what says which kernels it needs."""
    return calls_of(call, parts, lambda size: torch.empty(size, device="meta")).core


def sources(call: Call, parts: SplitRows, spec: Spec) -> tuple[list[Source], list[Source]]:
    """The kernels ahead of the scan, and behind it."""
    return rows_sources(parts, affine.completed(call, spec))
