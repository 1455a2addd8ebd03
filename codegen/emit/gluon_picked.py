"""Prints the warp-specialised tile over picked rows whose keys are its values too, in Gluon.

Tile dimensions are those of :mod:`attncc.codegen.emit.gathered`.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from attncc.codegen.emit.gathered import (
    group_text,
    picked_rows,
    picks_text,
    rows_printer,
    scaled_score,
)
from attncc.codegen.emit.gluon import ASYNC_COPY, IMPORTS, TYPES, gluon_lines, helpers
from attncc.codegen.emit.gluon_pieces import (
    ConsumerCode,
    FoldCode,
    first_column,
    halves_of,
    layout_of,
    layouts_of,
    pieces_of,
    ring_names,
)
from attncc.codegen.emit.scale import fold_constants
from attncc.codegen.emit.selected import page_lines
from attncc.codegen.emit.softmax_finish import Held, finish
from attncc.codegen.emit.softmax_rows import (
    Texts,
    about,
    column_names,
    grid,
    points,
    section,
    spread,
)
from attncc.codegen.emit.softmax_scores import TILE, hoist, tile_of
from attncc.codegen.emit.triton import Place, Var
from attncc.codegen.forms import Dot
from attncc.codegen.plan_picked import PickedPlan
from attncc.codegen.plan_shared import product_sum
from attncc.dsl.errors import RefusedError
from attncc.dsl.graph import kind_of
from attncc.dsl.ir import Input, Kind

ROWS, PICKS = "ROWS", "PICKS"
OUT_ROWS, OUT_COLUMNS = "OUT_ROWS", "OUT_COLUMNS"
HIDDEN = "visible = (picked >= 0)[None, :]"


@dataclass(frozen=True, slots=True)
class RowCode:
    """Where a product's keys lie.

    Attributes:
        name: ends the names of its variables.
        start: address of the first column of each row [n].
    """

    name: str
    start: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedCode(FoldCode):
    """Printed pieces of the tile whose keys are picked.

    Attributes:
        picks: where a token's picks start.
        paging: lines that find the rows' pages.
        keys: where each product's rows lie.
        widths: of the pieces.
    """

    picks: str
    paging: Texts
    keys: tuple[RowCode, ...]
    widths: tuple[int, ...]


def picked_code(plan: PickedPlan) -> PickedCode:
    """Print the tile.

    Raises:
        RefusedError: an expression has no text in Gluon.
    """
    setup, scores = _scores(plan)
    found = tuple(_consumer(plan, i) for i in range(plan.consumers))
    pieces = pieces_of(plan, lambda: rows_printer(plan))
    paging = page_lines(plan.page, "key", "key_valid") if plan.page else ()
    return PickedCode(
        about=about(plan),
        loading=f"{plan.loaders} warps copy picked rows into rings in shared memory.",
        imports=(*IMPORTS, ASYNC_COPY),
        helpers=helpers("\n".join((*setup, *scores, *found[0].finish))),
        dtype=TYPES[plan.operand[0]],
        grid=grid(plan),
        points=points(plan),
        group=group_text(plan),
        given=tuple(wrap(", ".join(p.name for p in plan.parameters) + ",", 88)),
        placed=_placed(plan),
        masked="last_pick < 0",
        pieces=pieces,
        halves=halves_of(pieces),
        layouts=layouts_of(pieces),
        weight_swizzle=layout_of(plan.block_n).swizzle,
        rank=2,
        parts=1,
        loaders=plan.loaders,
        arrivals=32 * plan.loaders,
        row_valid=f"row < {group_text(plan)}",
        rows=gluon_lines(picked_rows(plan), ROWS),
        setup=gluon_lines(setup, ROWS),
        early=(
            f"n_last = n0 + {plan.block_n - 1}  # places without a pick come last",
            "last_pick = gl.load(picks + n_last, mask=n_last < hi, other=-1)",
        ),
        positions=(),
        scores=gluon_lines(scores, ROWS),
        mask=(
            "picked = gl.load(picks + n0 + offs_n, mask=n0 + offs_n < hi, other=-1)  # [n]",
            HIDDEN,
        ),
        logits="x",
        highest="gl.max(x, 1)",
        consumer=found,
        rings=ring_names(pieces, 1),
        staged=plan.staged,
        picks=picks_text(plan),
        paging=gluon_lines(paging, PICKS),
        keys=tuple(_row(plan, i, dot) for i, dot in enumerate(plan.fold.dots)),
        widths=tuple(sorted({p.width for p in pieces})),
    )


def _placed(plan: PickedPlan) -> str:
    """What is known of a program's work."""
    names = [f"at_{axis}" for axis, _ in grid(plan)]
    names += ["at_B", "t", "t_abs", *(["S"] if plan.lengths else [])]
    names += ["point", "cut"] if plan.split else []
    names += ["share"] if plan.shares > 1 else []
    return ", ".join((*names, "start", "picks", "lo", "hi"))


def _row(plan: PickedPlan, i: int, dot: Dot) -> RowCode:
    """The address of each picked row of a product's keys."""
    [node] = dot.key
    assert isinstance(node, Input)
    p = rows_printer(plan)
    arg = p.tensors[node.name]
    offset, _ = p.child(**dict.fromkeys(dot.over, Place(Var("0")))).offset(arg)
    start = "" if offset.text == "0" else f" + {offset.text}"
    return RowCode(str(i), f"{arg.pointer}{start}")


def _scores(plan: PickedPlan) -> tuple[Texts, Texts]:
    """Lines of setup and score."""
    p = rows_printer(plan)
    setup = section(p)
    folded = fold_constants(plan.fold.score, p.sizes)
    hoist(p, plan, folded)
    x = scaled_score(p, plan, folded)
    total = product_sum(x, plan.fold.dots)
    if total is None:
        raise RefusedError("products that are not added to each other", op=plan.op)
    p.known[total] = Var("s0", TILE)
    scores = section(p)
    scores.append(tile_of(p, plan, p.emit(x), " * scale", kind_of(x) is Kind.INT))
    return tuple(setup), tuple(scores)


def _consumer(plan: PickedPlan, i: int) -> ConsumerCode:
    """What a warpgroup writes: its columns; the first one also what a row's partial has once."""
    p = rows_printer(plan)
    [column] = plan.passes[0].columns
    axes = column.fold.value_axes
    first = first_column(plan, i)
    lines, _ = spread("e", "e", axes, p.sizes, plan.part_e, plan.part_e, first=first)
    if plan.split:
        layout = "WHOLE_COLUMNS" if plan.staged else OUT_COLUMNS
        return ConsumerCode(gluon_lines(lines, layout), _partial(plan, i))
    end = finish(p, plan, (Held("m", "l", ("acc",)),), ("m",))
    return ConsumerCode(gluon_lines(lines, OUT_COLUMNS), gluon_lines(end, OUT_ROWS))


def _partial(plan: PickedPlan, i: int) -> Texts:
    """Store a partial: base-2 maximum, sum, and the weighted sums, not yet normalised.

    Its first row's place is one number, so that places within the tile need 32 bits.
    """
    group, width = group_text(plan), plan.passes[0].width
    e = column_names(plan)[plan.passes[0].columns[0].fold.value_axes]
    lines = [f"first = ((point * rows) + t.to(gl.int64) * {group} + start) * splits + cut"]
    once = f"start + own < {group}"
    once = f"({once}) & (share == 0)" if plan.shares > 1 else once
    if i == 0:
        lines += [
            f"own = gl.arange(0, {plan.block_m}, layout={OUT_ROWS})  # [m] rows of the tile",
            f"gl.store(part_m_ptr + first + own * splits, m, mask={once})",
            f"gl.store(part_l_ptr + first + own * splits, l, mask={once})",
        ]
    layout = "WHOLE_ROWS" if plan.staged else OUT_ROWS
    lines += [
        f"own = gl.arange(0, {plan.block_m}, layout={layout})",
        f"to = part_u_ptr + first * {width} + (own * (splits * {width}))[:, None] + {e}[None, :]",
        f"gl.store(to, acc, mask=(start + own < {group})[:, None])",
    ]
    return tuple(lines)
