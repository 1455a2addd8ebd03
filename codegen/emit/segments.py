"""Triton text of what happens between the segments of a sequence.

A segment is a run of whole chunks, as many in each but the last ones; what is ahead of all of them
is one too, of as many chunks as the call says. Nobody asks for the last one's summary. The others'
(A, B) of ``S' = A S + B`` lies in tiles ``[active, columns]`` of fp32: B's blocks of columns, then
A's. A number for A (no row reads the state) lies apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.affine import point_index, summary_of, taken
from attncc.codegen.emit.rows import printer_of
from attncc.codegen.emit.scan import (
    grid_parts,
    load_initial,
    slot_lines,
    split_program_id,
    tile_lines,
)
from attncc.codegen.plan_affine import ChunkPlan, Part, StartPlan, StatePlan


@dataclass(frozen=True, slots=True)
class StartCode:
    """Printed pieces of ``affine_start.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    load: tuple[str, ...]
    tile_size: int
    height: int
    whole: bool
    start_precision: str
    blocks: int
    decayed: bool
    kept_at: str


def tile_size(plan: ChunkPlan) -> int:
    """Numbers of one tile of a summary or a start."""
    return plan.axis(plan.form.active[0]).block * plan.axis(plan.blocked).block


def part_lines(plan: StartPlan) -> list[str]:
    """Which tile of the buffers a program's columns lie in, and where in it: ``place``."""
    k, columns = plan.form.active[0], plan.axis(plan.blocked).block
    each = plan.width // columns
    return [
        f"tile = block // {each}",
        f"inner = block % {each} * {columns} + tl.arange(0, {columns})",
        f"place = at_{k}[:, None] * {plan.width} + inner[None, :]",
    ]


def place_lines(plan: ChunkPlan) -> list[str]:
    """Where an element lies within its tile: ``place``."""
    k, v = plan.form.active[0], plan.axis(plan.blocked).block
    return [f"place = at_{k}[:, None] * {v} + tl.arange(0, {v})[None, :]"]


def segment_parts(plan: StatePlan) -> list[tuple[str, str]]:
    """The segments that there are programs for."""
    sizes = {Part.SUMMARY: "(segments - 1)", Part.LOCAL: "segments", Part.LEAD: "1"}
    return [("segment", sizes[plan.part])] if plan.part in sizes else []


def unit_line(plan: ChunkPlan) -> str:
    """The index of a segment's system among those of all segments."""
    index, count = point_index(plan, plan.grid_axes)
    return f"unit = (sequence * segments + segment).to(tl.int64) * ({count}) + {index}"


def ahead_line(chunks: str) -> str:
    """How many of a sequence's chunks are ahead of its segments."""
    return f"first_chunks_here = ({chunks}.to(tl.int64) * ahead // 1024).to(tl.int32)"


def bound_lines(plan: StatePlan, chunks: str) -> list[str]:
    """From which chunk of a sequence a program goes to which."""
    lines = [ahead_line(chunks)]
    if plan.part is Part.LEAD:
        return [*lines, "begin = first_chunks_here * 0", "end = first_chunks_here"]
    return [
        *lines,
        f"each = tl.cdiv({chunks} - first_chunks_here, segments)",
        f"begin = tl.minimum(first_chunks_here + segment * each, {chunks})",
        f"end = tl.minimum(begin + each, {chunks})",
    ]


def segment_lines(plan: StatePlan) -> list[str]:
    """Which chunks a program carries the state over."""
    if plan.part is Part.WHOLE:
        return []
    return [
        f"chunks_here = tl.cdiv(length, {plan.tokens})",
        *bound_lines(plan, "chunks_here"),
        unit_line(plan),
        *place_lines(plan),
    ]


def start_at(plan: StatePlan) -> str:
    """Where the tile lies of the state that a segment starts with."""
    blocks = plan.axis(plan.blocked).blocks
    return f"starts_ptr + (unit * {blocks} + block) * {tile_size(plan)}"


def first_state(plan: StatePlan) -> list[str]:
    """The state that a segment starts with; zero for B and the identity for A."""
    k, v = plan.axis(plan.form.active[0]), plan.axis(plan.blocked)
    if plan.part is Part.LOCAL:
        return [f"state = tl.load({start_at(plan)} + place)"]
    if plan.column_blocks == v.blocks:
        return [f"state = tl.zeros([{k.block}, {v.block}], tl.float32)"]
    return [
        f"column = (block - {v.blocks}) * {v.block} + tl.arange(0, {v.block})",
        f"state = tl.where(at_{k.axis}[:, None] == column[None, :], 1.0, 0.0)",
    ]


def kept_shape(plan: ChunkPlan) -> str:
    """Sizes of an A that is a number, or (decays per element of the active axis) a diagonal."""
    return str(plan.axis(plan.form.active[0]).block) if plan.each else ""


def kept_at(plan: ChunkPlan) -> str:
    """Where such an A lies."""
    shape, key = kept_shape(plan), plan.form.active[0]
    return f"kept_ptr + unit * {shape} + at_{key}" if shape else "kept_ptr + unit"


def store_summary(plan: StatePlan) -> list[str]:
    """Store a block of columns of a summary, and A where it is a number."""
    at = f"(unit * {plan.column_blocks} + block) * {tile_size(plan)}"
    lines = [f"tl.store(summaries_ptr + {at} + place, state)"]
    if plan.form.decays and not plan.solve:
        lines.append(f"tl.store({kept_at(plan)}, kept, mask=block == 0)")
    return lines


def emit_start(plan: StartPlan) -> StartCode:
    """Print the composing kernel's expressions."""
    k, v = plan.axis(plan.form.active[0]), plan.axis(plan.blocked)
    printer = printer_of(plan)
    parts = [("block", str(v.blocks)), *grid_parts(plan, plan.grid_axes)]
    length = "tokens_given"
    lines = [*split_program_id(parts, "sequence"), *tile_lines(plan), *slot_lines(plan)]
    if plan.packed:
        length = "length"
        ends = "tl.load(cu_seqlens_ptr + sequence + 1) - tl.load(cu_seqlens_ptr + sequence)"
        lines.append(f"length = ({ends}).to(tl.int32)")
    lines += [f"chunks_here = tl.cdiv({length}, {plan.tokens})"]
    lines += [ahead_line("chunks_here"), "left = chunks_here - first_chunks_here"]
    lines += ["each = tl.cdiv(left, segments)"]
    lines += ["used = tl.cdiv(left, tl.maximum(each, 1))  # segments with tokens"]
    lines += ["summed = tl.minimum(used, segments - 1)"]
    lines += part_lines(plan)
    if plan.form.state in plan.given:
        state = load_initial(printer, plan, plan.form.state).text
    else:
        state = f"tl.zeros([{k.block}, {v.block}], tl.float32)"
    index, count = point_index(plan, plan.grid_axes)
    lines += [f"first = (sequence * segments).to(tl.int64) * ({count}) + {index}"]
    return StartCode(
        summary=summary_of(plan), index=tuple([*lines, f"count = {count}"]),
        load=(*taken(printer), f"state = {state}"), tile_size=k.block * plan.width,
        height=k.block, whole=plan.slice == k.block,
        start_precision=plan.precision,
        blocks=v.blocks * v.block // plan.width,
        decayed=bool(plan.form.decays), kept_at=kept_at(plan),
    )  # fmt: skip
