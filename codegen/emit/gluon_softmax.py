"""Prints the pieces of warp-specialised softmax prefill, from the printers of the Triton tile.

Three functions of the generated file need text: where a piece of work lies and which keys it sees
(both sides of the pipeline ask), what the loading warp's tensor maps are, and what the multiplying
warpgroups compute of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from textwrap import wrap

from attncc.codegen.emit.bounds import Bounds, bounds
from attncc.codegen.emit.gluon import IMPORTS, TYPES, gluon_lines, gluon_text, helpers
from attncc.codegen.emit.gluon_maps import MapCode, map_codes
from attncc.codegen.emit.row_edges import (
    bands_alone,
    beside_clear,
    clear_lines,
    edges_of,
    rest_of,
)
from attncc.codegen.emit.skip import all_seen, skip_lines
from attncc.codegen.emit.softmax_finish import Held, finish, group_of
from attncc.codegen.emit.softmax_limits import band_offset, limit_lines
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
from attncc.codegen.emit.softmax_scores import TILE, hoist
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.emit.warp_scores import NAMED, score_lines
from attncc.codegen.emit.wide_stores import WIDE_COLUMNS, WIDE_ROWS, LaterStores
from attncc.codegen.forms import Band
from attncc.codegen.plan_gluon import WarpPlan
from attncc.dsl.ir import Lit, Node

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
        placed_room: numbers that a place of ``work`` holds, a power of two.
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
        rest: ``shown``, what the mask says besides the row's edges; empty where nothing is left.
        unclear: condition that a masked block needs it, empty where all do.
        logits: base-2 logits from ``x``.
        highest: the largest of each row.
        base: what is taken from the logits, from the row's base.
        columns: the value's columns.
        finish: what follows the loop.
        wide: layout in which outputs are stored, empty where it is that of the sums.
        wide_rows: row indices taken apart there.
        wide_columns: the value's columns there.
        stores: the stores there.
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
    placed_room: int
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
    rest: Texts
    unclear: str
    logits: str
    highest: str
    base: str
    columns: Texts
    finish: Texts
    wide: str
    wide_rows: Texts
    wide_columns: Texts
    stores: Texts
    worker_warps: str
    worker_registers: str


@dataclass(frozen=True, slots=True)
class WarpTexts:
    """What every dialect of the warp-specialised tile is translated from: lines of a Triton tile.

    Attributes:
        setup: values that do not depend on keys.
        scores: the score ``x`` [m, n] from the product ``s0``.
        mask: ``visible``.
        rest: ``shown``, where ``visible`` is about bands only.
        scale: factor from ``x`` to base-2 logits where it is a positive constant, else empty.
        offset: what a row adds to all of its ``x`` of a block, empty for nothing.
        columns: the value's columns.
        finish: what follows the loop.
        stores: the stores that follow it in another layout.
        place: where a piece of work lies.
    """

    setup: Texts
    scores: Texts
    mask: Texts
    rest: Texts
    scale: str
    offset: str
    columns: Texts
    finish: Texts
    stores: Texts
    place: Place


def warp_texts(plan: WarpPlan) -> WarpTexts:
    """Print the pieces of the warp-specialised tile as lines of a Triton tile."""
    where = _place(plan)
    p = printer(plan, ("m",))
    p.exact = plan.lse  # the lse is fp32 whatever the operands are, and held to that
    p.named = NAMED[plan.tanh]
    [dot] = plan.fold.dots
    setup = section(p)
    hoist(p, plan, rest_of(plan) if plan.edges else plan.fold.where)
    scores, scale, offset = score_lines(p, plan, dot)
    edges = edges_of(p, plan, "place" if offset else "") if plan.edges else None
    setup += edges.setup if edges else ()
    mask = section(p)
    mask.append(f"visible = {edges.visible if edges else _visible(p, plan.fold.where)}")
    rest = section(p)
    if edges and edges.rest is not None:
        rest.append(f"shown = {p.lift(p.emit(edges.rest), TILE)}")
    columns, end, stores = _finish(plan)
    return WarpTexts(
        tuple(setup), tuple(scores), tuple(mask), tuple(rest), scale, offset, columns, end, stores,
        where,
    )  # fmt: skip


def warp_code(plan: WarpPlan) -> WarpCode:
    """Print the warp-specialised tile.

    Raises:
        RefusedError: an expression has no text in Gluon.
    """
    texts = warp_texts(plan)
    where, scale = texts.place, texts.scale
    by = f" * {scale}" if scale else ""
    added = f"(gl.max(x, 1) + {texts.offset})" if texts.offset else "gl.max(x, 1)"
    printed = "\n".join((*texts.setup, *texts.scores, *texts.mask, *texts.finish))
    others = plan.consumers - 1
    return WarpCode(
        about=about(plan),
        imports=IMPORTS,
        helpers=helpers(printed),
        dtype=TYPES[plan.operand[0]],
        grid=grid(plan),
        points=points(plan),
        group=group_of(plan),
        given=tuple(wrap(", ".join(p.name for p in plan.parameters) + ",", 88)),
        numbers=tuple(p.name for p in plan.parameters if p.type in ("i32", "i64")),
        placed=where.known,
        placed_names=", ".join(name for name, _ in where.known),
        placed_room=1 << (len(where.known) - 1).bit_length(),
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
        rest=gluon_lines(texts.rest, ROWS),
        unclear=_unclear(plan),
        logits=f"x{by}",
        highest=f"{added}{by}",
        base=f"(base - {texts.offset}{by})" if texts.offset else "base",
        columns=gluon_lines(texts.columns, OUT_COLUMNS),
        finish=gluon_lines(texts.finish, OUT_ROWS),
        wide=_wide(plan) if plan.wide_stores else "",
        wide_rows=gluon_lines(row_lines(plan), WIDE_ROWS),
        wide_columns=gluon_lines(texts.columns, WIDE_COLUMNS),
        stores=gluon_lines(texts.stores, WIDE_ROWS),
        worker_warps=", ".join([*others * [str(plan.num_warps)], "1"]),
        worker_registers=", ".join(
            [*others * [str(plan.consumer_registers)], str(plan.producer_registers)]
        ),
    )


def _visible(p: Printer, where: Node | None) -> str:
    """What is visible of a tile; broadcasting is left to the ``where`` that uses it."""
    inside = p.lift(Var("key_valid", ("n",)), TILE)
    if where is None or isinstance(where, Lit):
        return inside
    return f"{inside} & {p.lift(p.emit(where), TILE)}"


def masked_blocks(plan: WarpPlan) -> str:
    """The blocks outside the run that every row sees."""
    return {0: "(n0 < inner_lo) | (n0 >= inner_hi)", 1: "n0 >= inner_hi"}.get(plan.first_part, "")


def _unclear(plan: WarpPlan) -> str:
    """The blocks outside the run in which predicates hold for all rows."""
    return "(n0 < clear_lo) | (n0 >= clear_hi)" if _clear(plan) else ""


def _clear(plan: WarpPlan) -> bool:
    """Whether such a run is looked for."""
    return plan.edges and plan.tighten


def _finish(plan: WarpPlan) -> tuple[Texts, Texts, Texts]:
    """The value's columns; sink, division, epilogue, outputs and lse; stores that come apart."""
    p: Printer = printer(plan, ("m",))
    if plan.wide_stores:
        p = LaterStores(**{f.name: getattr(p, f.name) for f in fields(p)})
    [own] = plan.passes
    columns, _ = columns_of(p, plan, own.columns[0])
    held = (Held("m", "l", ("acc",)),)
    lines = finish(p, plan, held, ("m",), inverted=plan.wide_stores)
    return tuple(columns), lines, tuple(p.later) if isinstance(p, LaterStores) else ()


def _wide(plan: WarpPlan) -> str:
    """Layout in which a thread has 16 bytes of a row: 8 numbers of 16 bits."""
    across = plan.width_e // 8
    return f"gl.BlockedLayout([1, 8], [{32 // across}, {across}], [{plan.num_warps}, 1], [1, 0])"


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
    mask, clear = plan.fold.mask, _clear(plan)
    if clear and mask is not None:
        mask = bands_alone(mask)
    limits = bounds(mask, lambda band: _uniform_offset(p, band))
    skips = skip_lines(p, plan, rest_of(plan) if clear else None)
    if skips and clear:
        limits = beside_clear(limits, all_seen(plan))
        skips = (*skips, *clear_lines(plan, all_seen(plan)))
    elif skips:
        limits = Bounds(limits.lo, limits.hi, *all_seen(plan))
    rows = row_lines(plan) if skips else ()
    wide = [f"at_{axis}" for axis, _ in grid(plan)]
    wide += ["at_B", "first_key"] if plan.packed else []
    names = ["first", "T", "S"] if plan.packed else []
    names += ["start", "lo", "hi"]
    names += {0: ["inner_lo", "inner_hi"], 1: ["inner_hi"]}.get(plan.first_part, [])
    names += ["clear_lo", "clear_hi"] if clear else []
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
