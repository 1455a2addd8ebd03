"""Where a chunk's systems lie: which chunk a program works on, and its rows and tokens."""

from __future__ import annotations

from attncc.codegen.emit.affine import chunk_lines, system_parts
from attncc.codegen.emit.gluon import gluon_lines
from attncc.codegen.emit.gluon_squares import indexed
from attncc.codegen.emit.rows import ROW, Places, tokens_of
from attncc.codegen.plan_affine import SystemPlan
from attncc.codegen.plan_gluon_systems import SystemsPlan

Texts = tuple[str, ...]


def index_lines(plan: SystemPlan) -> list[str]:
    """Which chunk of which systems a program works on."""
    lines = ["at = tl.program_id(0)"]
    if isinstance(plan, SystemsPlan) and plan.blockwise:
        lines = [
            f"place = tl.minimum(tl.program_id(0) * {plan.chunks} + warp(), solved - 1)",
            "at = place",
        ]
    for name, size in system_parts(plan):
        one = size == "1"
        lines += [f"{name} = at * 0"] if one else [f"{name} = at % {size}", f"at = at // {size}"]
    lines += ["chunk = at", *chunk_lines(plan)]
    row = "first_row + first_token" if plan.packed else "first_token.to(tl.int64)"
    return [*lines, f"chunk_row = {row}"]


def _dims(plan: SystemPlan) -> tuple[Places, ...]:
    return tuple(dict.fromkeys([ROW, tokens_of(plan)]))


def head_lines(plan: SystemPlan, dims: tuple[Places, ...] | None = None) -> list[str]:
    """Lines that make the indices of rows and tokens, or of some of them."""
    return [line for d in dims or _dims(plan) for line in (*d.head(plan), *d.lines(plan))]


def places_in(plan: SystemPlan, layout: str) -> Texts:
    """The same for places along a layout."""
    return gluon_lines(head_lines(plan), layout)


def half_places(plan: SystemsPlan, half: int) -> Texts:
    """The indices of what is read for vectors, of half of the places."""
    tokens = tokens_of(plan)
    count = tokens.count // 2
    first, *lines = head_lines(plan, (tokens,))
    start = f" + {half * count}" if half else ""
    first = first.replace(f"tl.arange(0, {tokens.count})", f"tl.arange(0, {count}){start}")
    return gluon_lines([first, *lines], "VECTOR_ROWS")


def square_places(plan: SystemsPlan) -> Texts:
    """Indices down (``_i``) and across (``_j``) a square; of what is read, ``_t`` and ``_r``."""
    dims = (ROW,) if plan.gathered else _dims(plan)
    wanted = [("_i", "DOWN", dims), ("_j", "ACROSS", dims)]
    if plan.gathered:
        wanted += [("_t", "READS_DOWN", (tokens_of(plan),)), ("_r", "READS_ACROSS", dims)]
    found = []
    for suffix, layout, held in wanted:
        for line in _places_of_each(plan, head_lines(plan, held), layout):
            found.append(indexed(line, suffix))
    return tuple(found)


def line_places(plan: SystemsPlan) -> Texts:
    """The indices of rows and tokens along the lanes."""
    return _places_of_each(plan, head_lines(plan), "LINE")


def _places_of_each(plan: SystemsPlan, lines: list[str], layout: str) -> Texts:
    """Indices along a layout; where the first axis counts chunks, those of each."""
    if not plan.blockwise:
        return gluon_lines(lines, layout)
    found = gluon_lines(lines, f"{layout}_PLACES")
    return tuple(f"{line}[None, :]" if "gl.arange(" in line else line for line in found)
