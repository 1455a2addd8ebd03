"""Prints the fold over the rows that a selection picked.

Tile dimensions: ``m`` query rows of one token, ``n`` picked rows, ``k`` a dot's contraction, ``e``
value columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attncc.codegen.emit.quantised import (
    Piece,
    in_units,
    scale_lines,
    unit_lines,
    unit_query,
)
from attncc.codegen.emit.scale import fold_constants
from attncc.codegen.emit.selected import page_lines
from attncc.codegen.emit.softmax_finish import Held, finish, held_columns
from attncc.codegen.emit.softmax_limits import factored, scale_line
from attncc.codegen.emit.softmax_rows import (
    Texts,
    about,
    atom,
    column_names,
    columns_of,
    grid,
    points,
    printer,
    section,
    sizes_of,
    spread,
)
from attncc.codegen.emit.softmax_scores import (
    hoist,
    mask_text,
    operand,
    options,
    product,
    products_apart,
    tile_of,
)
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.forms import Dot
from attncc.codegen.plan_gathered import GatherPlan
from attncc.codegen.quantised import Scaled, quantised_input
from attncc.codegen.softmax_checks import TOKENS
from attncc.dsl.axes import PAGE, PAGES, block_axis
from attncc.dsl.ir import Node

ROWS = ("m",)


@dataclass(frozen=True, slots=True)
class PickedSum:
    """One weighted sum of a block.

    Attributes:
        acc: the accumulator [m, e].
        block: its columns.
        values: lines that define ``values`` [n, e].
        options: further arguments of the dot.
        weight: the weights [m, n], with the values' scales where they have some.
        times: factor of the dot's result, with its operator, or empty.
        apart: the dot's result is added by itself.
    """

    acc: str
    block: int
    values: Texts
    options: str
    weight: str
    times: str
    apart: bool


@dataclass(frozen=True, slots=True)
class GatherCode:
    """Printed pieces of the fold over picked rows.

    Attributes:
        about: the file's docstring.
        grid: grid axes and sizes, fastest first.
        points: number of points of the grid axes.
        group: query rows of a token.
        rows: row indices taken apart.
        setup: query tiles, and what does not depend on the picked rows.
        picks: where a token's picks start.
        paging: lines that find the rows' pages.
        keys: key tiles of a block.
        scores: the score ``x`` [m, n].
        mask: ``visible`` [m, n].
        sums: the weighted sums.
        finish: what follows the loop.
    """

    about: Texts
    grid: tuple[tuple[str, str], ...]
    points: str
    group: str
    rows: Texts
    setup: Texts
    picks: str
    paging: Texts
    keys: Texts
    scores: Texts
    mask: Texts
    sums: tuple[PickedSum, ...]
    finish: Texts


def gather_code(plan: GatherPlan) -> GatherCode:
    """Print the fold over picked rows."""
    p = rows_printer(plan)
    fold = plan.fold
    setup = section(p)
    pieces = [_piece(p, plan, i) for i in range(len(fold.dots))]
    for i, dot in enumerate(fold.dots):
        _query(p, plan, i, dot, pieces[i])
    for _, column in held_columns(plan.passes[0]):
        p.lines += [text for text in columns_of(p, plan, column)[0] if text not in p.lines]
    folded = fold_constants(fold.score, p.sizes)
    hoist(p, plan, folded, fold.where)
    x = scaled_score(p, plan, folded)
    hoisted = dict(p.known)
    keys = section(p)
    for i, dot in enumerate(fold.dots):
        shape = (plan.block_n, plan.blocks_k[i])
        text = operand(p.child(**pieces[i].places), dot.key, ("n", "k"), plan.operand[i], shape)
        keys.append(f"keys{i} = {text}  # [n, k]")
        if pieces[i].scaled is not None:
            scale_lines(p, pieces[i], f"keys{i}_scale")
    sums = _sums(p, plan)
    scores = section(p)
    scores += _products(p, plan, pieces)
    scores.append(tile_of(p, plan, p.emit(x), " * scale", whole=False))
    mask = section(p)
    mask.append(f"visible = {mask_text(p, fold.where)}")
    p.known = hoisted
    accs = tuple(acc for acc, _ in held_columns(plan.passes[0]))
    end = partial_text(plan, accs) if plan.split else finish(p, plan, (Held("m", "l", accs),), ROWS)
    end = (*(_upright(accs) if plan.turned else ()), *end)
    return GatherCode(
        about(plan), grid(plan), points(plan), group_text(plan), picked_rows(plan), tuple(setup),
        picks_text(plan), page_lines(plan.page, "key", "key_valid") if plan.page else (),
        tuple(keys), tuple(scores), tuple(mask), sums, end,
    )  # fmt: skip


def _piece(p: Printer, plan: GatherPlan, i: int) -> Piece:
    """Define the contracted columns of a dot."""
    dot = plan.fold.dots[i]
    lines, places = spread(f"d{i}", "k", dot.over, p.sizes, plan.widths_k[i], plan.blocks_k[i])
    p.lines += lines
    own = quantised_input(plan.quantised, dot.key[0]) if len(dot.key) == 1 else None
    return Piece("", plan.blocks_k[i], places, own, _row_scale(own))


def _row_scale(own: Scaled | None) -> dict[str, Place] | None:
    """Where the one scale of a row is."""
    return None if own is None else {block_axis(own.axis): Place(Var("0"))}


def _query(p: Printer, plan: GatherPlan, i: int, dot: Dot, piece: Piece) -> None:
    inner, shape = p.child(**piece.places), (plan.block_m, plan.blocks_k[i])
    if piece.scaled is not None and in_units(p, dot.query, plan.operand[i]):
        p.lines += unit_query(f"query{i}", operand(inner, dot.query, ("m", "k"), "fp32", shape))
        return
    text = operand(inner, dot.query, ("m", "k"), plan.operand[i], shape)
    p.lines.append(f"query{i} = {text}  # [m, k]")


def _products(p: Printer, plan: GatherPlan, pieces: list[Piece]) -> list[str]:
    """The dots, each a known value [m, n]."""
    lines = []
    for i, dot in enumerate(plan.fold.dots):
        text = product(f"query{i}", f"keys{i}", plan.operand[i], plan.blocks_k[i])
        if pieces[i].scaled is not None:
            text += f" * keys{i}_scale[None, :]"
            if in_units(p, dot.query, plan.operand[i]):
                text += f" * query{i}_unit[:, None]"
        lines.append(f"s{i} = {text}")
        p.known[dot.node] = Var(f"s{i}", ("m", "n"))
    return products_apart(plan, lines, "end") if plan.turned else lines


def rows_printer(plan: GatherPlan) -> Printer:
    """A printer for the rows of one token: the token is a number, the history's rows are picked."""
    p = printer(plan, ROWS)
    token = Place(Var("first + t" if plan.packed else "t"))
    known, over = Var("key_valid", ("n",)), plan.fold.over
    places = {**p.places, "B": Place(Var("at_B")), TOKENS: token}
    places |= {a: Place(Var(f"at_{a}", ROWS), Var("row_valid", ROWS)) for a in plan.tile_axes[1:]}
    row = "key_row" if plan.packed and not plan.lengths else "key"
    places[over] = Place(Var(row, ("n",)), known)
    if plan.page:
        places |= {PAGES: Place(Var("page", ("n",)), known), PAGE: Place(Var("page_at", ("n",)))}
    positions = {**p.positions, TOKENS: Var("t_abs"), "B": Var("at_B")}
    positions |= {a: places[a].index for a in plan.tile_axes[1:]}
    return replace(p, places=places, positions=positions, origins={})


def group_text(plan: GatherPlan) -> str:
    """Rows of a token."""
    sizes = sizes_of(plan)
    return atom(" * ".join(sizes[a] for a in plan.tile_axes if a != TOKENS) or "1")


def picked_rows(plan: GatherPlan) -> Texts:
    """A row's index taken apart into the axes of the tile."""
    sizes, inner = sizes_of(plan), plan.tile_axes[1:]
    lines = []
    for at, axis in enumerate(inner):
        below = " * ".join(sizes[a] for a in inner[at + 1 :])
        text = f"row // {atom(below)}" if below else "row"
        lines.append(f"at_{axis} = {atom(text)} % {sizes[axis]}")
    return tuple(lines)


def picks_text(plan: GatherPlan) -> str:
    """Where a token's picks start."""
    if plan.packed:
        return "picked_ptr + (first + t) * picked_s0"
    return "picked_ptr + at_B * picked_s0 + t * picked_s1"


def scaled_score(p: Printer, plan: GatherPlan, score: Node) -> Node:
    """The score without its uniform factor, which ``scale`` holds, log2(e) included."""
    x, base2, fixed = factored(p, score, {"B", TOKENS, *plan.grid_axes})
    p.lines.append(scale_line(p, base2, fixed))
    return x


def _sums(p: Printer, plan: GatherPlan) -> tuple[PickedSum, ...]:
    found = []
    for acc, column in held_columns(plan.passes[0]):
        lines = section(p)
        value = column.fold.value
        own = quantised_input(plan.quantised, value[0]) if len(value) == 1 else None
        places, scale = columns_of(p, plan, column)[1], f"{acc}_scale"
        if column.shared >= 0:
            lines.append(f"values = keys{column.shared}  # one tile is both key and value")
        else:
            shape = (plan.block_n, column.block)
            text = operand(p.child(**places), value, ("n", "e"), column.type, shape)
            lines.append(f"values = {text}")
        weight, times = "weight", ""
        if own is not None:
            if column.shared >= 0:
                lines.append(f"{scale} = keys{column.shared}_scale")
            else:
                scale_lines(p, Piece("", column.block, places, own, _row_scale(own)), scale)
            weight = f"(weight * {scale}[None, :])"
            if column.type == "fp16":
                lines += unit_lines(scale)
                times = f" * {scale}_unit"
        apart = column.type == "fp32" or bool(times)
        found.append(
            PickedSum(
                acc, column.block, tuple(lines), options(column.type), weight, times, apart
            )
        )  # fmt: skip
    return tuple(found)


def _upright(accs: Texts) -> Texts:
    """What a turned loop leaves, with rows in front."""
    return tuple(f"{acc} = tl.trans({acc})  # [m, e]" for acc in accs)


def partial_text(plan: GatherPlan, accs: Texts) -> Texts:
    """Store a partial: base-2 maximum, sum, and the weighted sums, not yet normalised.

    Args:
        plan: of the kernel.
        accs: the weighted sums.
    """
    group, [own] = group_text(plan), plan.passes
    token = "first.to(tl.int64) + t" if plan.packed else "t.to(tl.int64)"
    lines = [
        f"place = ((point * rows) + ({token}) * {group} + row) * splits + cut",
        "tl.store(part_m_ptr + place, m, mask=row_valid)",
        "tl.store(part_l_ptr + place, l, mask=row_valid)",
    ]
    for acc, column in zip(accs, own.columns, strict=True):
        e = column_names(plan)[column.fold.value_axes]
        valid = "row_valid[:, None]"
        if column.width != column.block:
            valid += f" & {e}_valid[None, :]"
        start = f"{column.first} + " if column.first else ""
        at = f"part_u_ptr + place[:, None] * {own.width} + {start}{e}[None, :]"
        lines.append(f"tl.store({at}, {acc}, mask={valid})")
    return tuple(lines)
