"""Which columns of which system a warp-specialised program carries, and over which chunks."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.affine import chunk_index
from attncc.codegen.emit.gluon import gluon_lines
from attncc.codegen.emit.scan import grid_parts, slot_lines
from attncc.codegen.emit.segments import bound_lines, segment_parts, unit_line
from attncc.codegen.plan_affine import Part
from attncc.codegen.plan_gluon_state import WarpStatePlan


@dataclass(frozen=True, slots=True)
class Placed:
    """Lines that find a program's place, and the names that they make."""

    lines: tuple[str, ...]
    names: tuple[str, ...]


def placed_of(plan: WarpStatePlan) -> Placed:
    """The place of a program: numbers on the device, all of them."""
    parts = [("group", str(plan.column_blocks // plan.consumers))]
    parts += grid_parts(plan, plan.grid_axes)
    parts += segment_parts(plan)
    lines = ["at = here" if plan.resident else "at = gl.program_id(0)"]
    for name, size in parts:
        if size == "1":
            lines.append(f"{name} = gl.to_tensor(0)")
        else:
            lines += [f"{name} = at % {size}", f"at = at // {size}"]
    lines += ["sequence = at", *slot_lines(plan), *_rows(plan), *_chunks(plan)]
    names = [name for name, _ in parts]
    names += ["sequence", *_slots(plan), "first_row", "length", "first_system", "systems"]
    names += ["begin", "end", *(["unit"] if plan.part is not Part.WHOLE else [])]
    return Placed(gluon_lines(lines, ""), tuple(names))


def _rows(plan: WarpStatePlan) -> list[str]:
    if plan.packed:
        return [
            "first_row = gl.load(cu_seqlens_ptr + sequence).to(gl.int64)",
            "length = (gl.load(cu_seqlens_ptr + sequence + 1) - first_row).to(gl.int32)",
            "first_chunk = gl.load(first_chunks_ptr + sequence)",
        ]
    return [
        "first_row = gl.to_tensor(0).to(gl.int64)",
        "length = tokens_given",
        "first_chunk = sequence * chunks_each",
    ]


def _chunks(plan: WarpStatePlan) -> list[str]:
    index, count = chunk_index(plan)
    lines = [
        f"systems = gl.to_tensor({count}).to(gl.int64)  # of a chunk",
        f"first_system = first_chunk.to(gl.int64) * systems + {index}",
        f"end = gl.cdiv(length, {plan.tokens})",
    ]
    if plan.part is Part.WHOLE:
        return [*lines, "begin = end * 0"]
    return [
        *lines,
        "chunks_here = end",
        *bound_lines(plan, "chunks_here"),
        unit_line(plan),
    ]


def _slots(plan: WarpStatePlan) -> list[str]:
    return [f"{n}{kind}_slot" for n in plan.pooled for kind in ("", "_out")]
