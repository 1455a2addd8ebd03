"""Prints the pieces of warp-specialised softmax prefill, from the printers of the Triton tile.

Three functions of the generated file need text: where a piece of work lies and which keys it sees
(both sides of the pipeline ask), what the loading warp's tensor maps are, and what the multiplying
warpgroups compute of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from attncc.codegen.emit.bounds import Bounds, bounds
from attncc.codegen.emit.gluon import IMPORTS, SIGMOID, TYPES, gluon_lines, gluon_text
from attncc.codegen.emit.gluon_maps import MapCode, map_codes
from attncc.codegen.emit.scale import fold_constants
from attncc.codegen.emit.skip import all_seen, skip_lines
from attncc.codegen.emit.softmax_finish import Held, finish, group_of
from attncc.codegen.emit.softmax_limits import band_offset, limit_lines, scaled
from attncc.codegen.emit.softmax_rows import (
    Texts,
    about,
    columns_of,
    grid,
    points,
    printer,
    row_lines,
    section,
)
from attncc.codegen.emit.softmax_scores import TILE, hoist, tile_of
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.forms import Band
from attncc.codegen.plan_gluon import WarpPlan
from attncc.dsl.graph import kind_of
from attncc.dsl.ir import Kind, Lit, Node

ROWS, KEYS = "ROWS", "KEYS"
OUT_ROWS, OUT_COLUMNS = "OUT_ROWS", "OUT_COLUMNS"
LINE = "LINE"


@dataclass(frozen=True, slots=True)
class WarpCode:
    """Printed pieces of the warp-specialised tile.

    Attributes:
        about: the file's docstring.
        imports: the language.
        helpers: functions that Gluon lacks.
        dtype: element type of the operands.
        grid: axes and sizes, fastest first.
        points: number of points of the grid axes.
        group: rows a token.
        given: the parameters' names, in lines.
        numbers: those of whole numbers.
        placed: what is known of a piece of work: names, and how a 32-bit number becomes the value.
        placed_names: the names in one line.
        place_rows: the tile's rows, where predicates over the history tighten its keys.
        place_setup: values that the bounds need.
        bounds: ranges of keys, as text.
        limits: lines that ``bounds`` needs.
        skips: lines that tighten the range by what blocks of the history hold.
        maps: of query, key and value.
        rows: row indices taken apart.
        setup: values that do not depend on keys.
        scores: the score ``x`` [m, n] from the product ``s0``.
        mask: ``visible``.
        masked: condition that a block needs its mask, empty where all do.
        logits: base-2 logits from ``x``.
        highest: the largest of each row.
        columns: the value's columns.
        finish: what follows the loop.
        worker_warps: warps of the further partitions: the other warpgroups, then the loading warp.
        worker_registers: registers a thread of each of them.
    """

    about: Texts
    imports: Texts
    helpers: Texts
    dtype: str
    grid: tuple[tuple[str, str], ...]
    points: str
    group: str
    given: Texts
    numbers: Texts
    placed: tuple[tuple[str, str], ...]
    placed_names: str
    place_rows: Texts
    place_setup: Texts
    bounds: Bounds
    limits: Texts
    skips: Texts
    maps: tuple[MapCode, ...]
    rows: Texts
    setup: Texts
    scores: Texts
    mask: Texts
    masked: str
    logits: str
    highest: str
    columns: Texts
    finish: Texts
    worker_warps: str
    worker_registers: str


@dataclass(frozen=True, slots=True)
class WarpTexts:
    """What every dialect of the warp-specialised tile is translated from: lines of a Triton tile.

    Attributes:
        setup: values that do not depend on keys.
        scores: the score ``x`` [m, n] from the product ``s0``.
        mask: ``visible``.
        scale: factor from ``x`` to base-2 logits where it is a positive constant, else empty.
        columns: the value's columns.
        finish: what follows the loop.
        place: where a piece of work lies.
    """

    setup: Texts
    scores: Texts
    mask: Texts
    scale: str
    columns: Texts
    finish: Texts
    place: Place


def warp_texts(plan: WarpPlan) -> WarpTexts:
    """Print the pieces of the warp-specialised tile as lines of a Triton tile."""
    where = _place(plan)
    p = printer(plan, ("m",))
    p.exact = plan.lse  # the lse is fp32 whatever the operands are, and held to that
    fold = plan.fold
    setup = section(p)
    folded = fold_constants(fold.score, p.sizes)
    hoist(p, plan, folded, fold.where)
    x, scale = scaled(p, plan, folded)
    [dot] = fold.dots
    p.known[dot.node] = Var("s0", TILE)
    scores = section(p)
    scores.append(_tile(p, plan, x, "" if scale else " * scale"))
    mask = section(p)
    mask.append(f"visible = {_visible(p, fold.where)}")
    columns, end = _finish(plan)
    return WarpTexts(tuple(setup), tuple(scores), tuple(mask), scale, columns, end, where)


def warp_code(plan: WarpPlan) -> WarpCode:
    """Print the warp-specialised tile.

    Raises:
        RefusedError: an expression has no text in Gluon.
    """
    texts = warp_texts(plan)
    where, scale = texts.place, texts.scale
    printed = "\n".join((*texts.setup, *texts.scores, *texts.mask, *texts.finish))
    others = plan.consumers - 1
    return WarpCode(
        about=about(plan),
        imports=IMPORTS,
        helpers=SIGMOID if "tl.sigmoid(" in printed else (),
        dtype=TYPES[plan.operand[0]],
        grid=grid(plan),
        points=points(plan),
        group=group_of(plan),
        given=tuple(wrap(", ".join(p.name for p in plan.parameters) + ",", 88)),
        numbers=tuple(p.name for p in plan.parameters if p.type in ("i32", "i64")),
        placed=where.known,
        placed_names=", ".join(name for name, _ in where.known),
        place_rows=gluon_lines(where.rows, LINE),
        place_setup=gluon_lines(where.setup, LINE),
        bounds=_in_gluon(where.bounds),
        limits=gluon_lines(where.limits, LINE),
        skips=gluon_lines(where.skips, LINE),
        maps=map_codes(plan),
        rows=gluon_lines(row_lines(plan), ROWS),
        setup=gluon_lines(texts.setup, ROWS),
        scores=gluon_lines(texts.scores, ROWS),
        mask=gluon_lines(texts.mask, ROWS),
        masked=masked_blocks(plan),
        logits=f"x * {scale}" if scale else "x",
        highest=f"gl.max(x, 1) * {scale}" if scale else "gl.max(x, 1)",
        columns=gluon_lines(texts.columns, OUT_COLUMNS),
        finish=gluon_lines(texts.finish, OUT_ROWS),
        worker_warps=", ".join([*others * [str(plan.num_warps)], "1"]),
        worker_registers=", ".join(
            [*others * [str(plan.consumer_registers)], str(plan.producer_registers)]
        ),
    )


def _tile(p: Printer, plan: WarpPlan, x: Node, tail: str) -> str:
    return tile_of(p, plan, p.emit(x), tail, kind_of(x) is Kind.INT)


def _visible(p: Printer, where: Node | None) -> str:
    """What is visible of a tile; broadcasting is left to the ``where`` that uses it."""
    inside = p.lift(Var("key_valid", ("n",)), TILE)
    if where is None or isinstance(where, Lit):
        return inside
    return f"{inside} & {p.lift(p.emit(where), TILE)}"


def masked_blocks(plan: WarpPlan) -> str:
    """The blocks outside the run that every row sees."""
    return {0: "(n0 < inner_lo) | (n0 >= inner_hi)", 1: "n0 >= inner_hi"}.get(plan.first_part, "")


def _finish(plan: WarpPlan) -> tuple[Texts, Texts]:
    """The value's columns; sink, division, epilogue, outputs and lse, in the output's layout."""
    p = printer(plan, ("m",))
    [own] = plan.passes
    columns, _ = columns_of(p, plan, own.columns[0])
    return tuple(columns), finish(p, plan, (Held("m", "l", ("acc",)),), ("m",))


# --- where a piece of work lies --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Text of the function that finds a tile's sequence and keys."""

    known: tuple[tuple[str, str], ...]
    rows: Texts
    setup: Texts
    bounds: Bounds
    limits: Texts
    skips: Texts


def _place(plan: WarpPlan) -> Place:
    p = printer(plan, ("m",))
    setup = section(p)
    limits = bounds(plan.fold.mask, lambda band: _uniform_offset(p, band))
    skips = skip_lines(p, plan)
    if skips:
        limits = Bounds(limits.lo, limits.hi, *all_seen(plan))
    rows = row_lines(plan) if skips else ()
    wide = [f"at_{axis}" for axis, _ in grid(plan)]
    wide += ["at_B", "first_key"] if plan.packed else []
    names = ["first", "T", "S"] if plan.packed else []
    names += ["start", "lo", "hi"]
    names += {0: ["inner_lo", "inner_hi"], 1: ["inner_hi"]}.get(plan.first_part, [])
    known = [*((name, ".to(gl.int64)") for name in wide), *((name, "") for name in names)]
    return Place(
        tuple(known), rows, tuple(setup), limits,
        limit_lines(plan, limits, forced=bool(skips)), skips,
    )  # fmt: skip


def _uniform_offset(p: Printer, band: Band) -> str | None:
    """A band's offset where it is one number for the tile; what rows differ in bounds nothing."""
    lines, known = len(p.lines), dict(p.known)
    text = band_offset(p, band)
    if text is None:
        del p.lines[lines:]
        p.known.clear()
        p.known.update(known)
    return text


def _in_gluon(limits: Bounds) -> Bounds:
    texts = (limits.lo, limits.hi, limits.inner_lo, limits.inner_hi)
    return Bounds(*(gluon_text(text, LINE) for text in texts))
