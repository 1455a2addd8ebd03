"""Prints the pieces of the warp-specialised tile whose keys are its values too.

They come from the printers of the Triton tile, and are spelled in Gluon. Tile dimensions are those
of :mod:`attncc.codegen.emit.softmax`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from textwrap import wrap

from attncc.codegen.emit.bounds import Bounds, bounds
from attncc.codegen.emit.gluon import IMPORTS, TYPES, gluon_lines, gluon_text, helpers
from attncc.codegen.emit.gluon_pieces import (
    BEYOND,
    ConsumerCode,
    FoldCode,
    KeyMap,
    halves_of,
    key_map,
    layout_of,
    layouts_of,
    pieces_of,
    ring_names,
)
from attncc.codegen.emit.scale import fold_constants
from attncc.codegen.emit.softmax_finish import Held, finish, group_of, partial_lines
from attncc.codegen.emit.softmax_limits import band_offset, limit_lines, scaled
from attncc.codegen.emit.softmax_rows import (
    Texts,
    about,
    grid,
    points,
    printer,
    row_lines,
    section,
    spread,
)
from attncc.codegen.emit.softmax_scores import TILE, hoist, tile_of
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.forms import Band
from attncc.codegen.plan_shared import SharedPlan, product_sum
from attncc.dsl.errors import RefusedError
from attncc.dsl.graph import kind_of
from attncc.dsl.ir import Kind, Lit, Node

ROWS, KEYS = "ROWS", "KEYS"
OUT_ROWS, OUT_COLUMNS = "OUT_ROWS", "OUT_COLUMNS"
LINE = "LINE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCode(FoldCode):
    """Printed pieces of the tile whose keys are the history's.

    Attributes:
        place_setup: values that the bounds need.
        bounds: ranges of keys, as text.
        limits: lines that ``bounds`` needs.
        maps: of the keys.
        coordinates: of a copy, but for its first column.
        beyond: a page that no pool has.
    """

    place_setup: Texts
    bounds: Bounds
    limits: Texts
    maps: tuple[KeyMap, ...]
    coordinates: str
    beyond: int


def shared_code(plan: SharedPlan) -> SharedCode:
    """Print the tile.

    Raises:
        RefusedError: an expression has no text in Gluon.
    """
    setup, scores, mask, scale = _scores(plan)
    place_setup, limits = _bounds(plan)
    by = f" * {scale}" if scale else ""
    found = tuple(_consumer(plan, i) for i in range(plan.consumers))
    printed = "\n".join((*setup, *scores, *mask, *found[0].finish))
    pieces = pieces_of(plan, lambda: printer(plan, ("m",)))
    paged, parts = bool(plan.page), plan.block_n // plan.copied
    return SharedCode(
        about=about(plan),
        loading="One warp copies blocks of keys into rings in shared memory.",
        imports=IMPORTS,
        helpers=helpers(printed),
        dtype=TYPES[plan.operand[0]],
        grid=grid(plan),
        points=points(plan),
        group=group_of(plan),
        given=tuple(wrap(", ".join(p.name for p in plan.parameters) + ",", 88)),
        placed=_placed(plan),
        place_setup=gluon_lines(place_setup, LINE),
        bounds=_in_gluon(limits),
        limits=gluon_lines(limit_lines(plan, limits, forced=False), LINE),
        masked={0: "(n0 < inner_lo) | (n0 >= inner_hi)", 1: "n0 >= inner_hi"}.get(
            plan.first_part, ""
        ),
        pieces=pieces,
        halves=halves_of(pieces),
        layouts=layouts_of(pieces),
        weight_swizzle=layout_of(plan.block_n).swizzle,
        maps=tuple(key_map(plan, i, dot) for i, dot in enumerate(plan.fold.dots)),
        coordinates="page, page_first" if paged else "n0",
        rank=3 if paged else 2,
        parts=parts,
        loaders=1,
        arrivals=1,
        row_valid=f"row < T * {group_of(plan)}",
        early=(),
        positions=("key = n0 + offs_n  # [n] position in the history", "key_valid = key < S"),
        beyond=BEYOND,
        rows=gluon_lines(row_lines(plan), ROWS),
        setup=gluon_lines(setup, ROWS),
        scores=gluon_lines(scores, ROWS),
        mask=gluon_lines(mask, ROWS),
        logits=f"x{by}",
        highest=f"gl.max(x, 1){by}",
        consumer=found,
        rings=ring_names(pieces, parts),
        staged=False,
    )


def _placed(plan: SharedPlan) -> str:
    """What is known of a program's work."""
    names = [f"at_{axis}" for axis, _ in grid(plan)]
    names += ["point", "cut"] if plan.split else []
    names += ["start", *(["S"] if plan.lengths else []), "lo", "hi"]
    names += {0: ["inner_lo", "inner_hi"], 1: ["inner_hi"]}.get(plan.first_part, [])
    return ", ".join(names)


# --- where a program's keys lie --------------------------------------------------------------


def _bounds(plan: SharedPlan) -> tuple[Texts, Bounds]:
    p = printer(plan, ("m",))
    setup = section(p)
    return tuple(setup), bounds(plan.fold.mask, lambda band: _uniform(p, band))


def _uniform(p: Printer, band: Band) -> str | None:
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


# --- scores and sums -------------------------------------------------------------------------


def _scores(plan: SharedPlan) -> tuple[Texts, Texts, Texts, str]:
    """Lines of setup, score and mask, and the factor from ``x`` to logits."""
    p = printer(plan, ("m",))
    setup = section(p)
    folded = fold_constants(plan.fold.score, p.sizes)
    hoist(p, plan, folded, plan.fold.where)
    x, scale = scaled(p, plan, folded)
    total = product_sum(x, plan.fold.dots)
    if total is None:
        raise RefusedError("products that are not added to each other", op=plan.op)
    p.known[total] = Var("s0", TILE)
    scores = section(p)
    tail = "" if scale else " * scale"
    scores.append(tile_of(p, plan, p.emit(x), tail, kind_of(x) is Kind.INT))
    mask = section(p)
    mask.append(f"visible = {_visible(p, plan.fold.where)}")
    return tuple(setup), tuple(scores), tuple(mask), scale


def _visible(p: Printer, where: Node | None) -> str:
    """What is visible of a tile; broadcasting is left to the ``where`` that uses it."""
    inside = p.lift(Var("key_valid", ("n",)), TILE)
    if where is None or isinstance(where, Lit):
        return inside
    return f"{inside} & {p.lift(p.emit(where), TILE)}"


def _consumer(plan: SharedPlan, i: int) -> ConsumerCode:
    """What a warpgroup writes: its columns; the first one also what a row's partial has once."""
    p = printer(plan, ("m",))
    [own] = plan.passes
    [column] = own.columns
    axes = column.fold.value_axes
    lines, _ = spread("e", "e", axes, p.sizes, plan.part_e, plan.part_e, first=i * plan.part_e)
    if plan.split:
        alone = plan if i == 0 else replace(plan, passes=(replace(own, plain=True),))
        end = partial_lines(alone, group_of(plan), ("acc",))
    else:
        end = finish(p, plan, (Held("m", "l", ("acc",)),), ("m",))
    return ConsumerCode(gluon_lines(lines, OUT_COLUMNS), gluon_lines(end, OUT_ROWS))
