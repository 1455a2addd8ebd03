"""Prints the pieces of the softmax family's kernels, and renders them.

Tile dimensions: ``m`` query rows, ``n`` keys, ``k`` a dot's contraction, ``e`` value columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.appended import appended_lines
from attncc.codegen.emit.bounds import Bounds, bounds
from attncc.codegen.emit.paging import early_pages, first_pages, order_lines, paging_lines
from attncc.codegen.emit.quantised import (
    Piece,
    interleaved,
    joined,
    pair_lines,
    pair_stream,
    scale_lines,
    unit_lines,
    value_pieces,
)
from attncc.codegen.emit.scale import fold_constants
from attncc.codegen.emit.skip import all_seen, skip_lines
from attncc.codegen.emit.skip_keys import scan_lines
from attncc.codegen.emit.softmax_finish import (
    Held,
    MergeCode,
    finish,
    group_of,
    handed,
    held_columns,
    merge_code,
    partial_lines,
)
from attncc.codegen.emit.softmax_limits import band_offset, limit_lines, scaled
from attncc.codegen.emit.softmax_rows import (
    Loads,
    Texts,
    about,
    columns_of,
    grid,
    points,
    printer,
    row_lines,
    section,
    shared_points,
    stream,
)
from attncc.codegen.emit.softmax_scores import (
    DIALECT,
    Places,
    contracted,
    hoist,
    key_tiles,
    later_lines,
    mask_text,
    operand,
    options,
    products,
    query_tiles,
    streams,
    tile_of,
)
from attncc.codegen.emit.triton import Printer
from attncc.codegen.plan_passes import Columns
from attncc.codegen.plan_softmax import TiledPlan
from attncc.dsl.graph import kind_of
from attncc.dsl.ir import Input, Kind, Node


@dataclass(frozen=True, slots=True)
class SumCode:
    """One weighted sum of a block.

    Attributes:
        acc: the accumulator [m, e].
        block: its columns.
        type: element type of the value tile.
        values: lines that load the value tile.
        options: further arguments of the dot.
        weight: the weights [m, n], with the values' scales where they have some.
        times: factor of the dot's result, with its operator, or empty; it is added by itself then.
        whole_values: lines that load the value tile of a block within the history, if it is plain.
    """

    acc: str
    block: int
    type: str
    values: Texts
    options: str
    weight: str = "weight"
    times: str = ""
    whole_values: Texts = ()


@dataclass(frozen=True, slots=True)
class TiledCode:
    """Printed pieces of the tiled fold.

    Attributes:
        about: the file's docstring.
        grid: axes and sizes, fastest first.
        points: number of points of the grid axes.
        shared: number of those that share a sequence.
        group: rows a token.
        key_order: lines that say which key of a block each row of a tile holds.
        rows: row indices taken apart.
        setup: query tiles, values that do not depend on keys, addresses of the first keys.
        bounds: ranges of keys, as text.
        limits: lines that ``bounds`` needs.
        skips: lines that tighten the range by what blocks of the history hold.
        appended: lines that write new rows of caches.
        scans: lines that tighten the range by what the history holds.
        later: what lies behind the last block, for sums between key and query.
        parts: arguments of the loop over masked and fully visible ranges.
        masked_from: where the last masked range begins.
        step: the loop variable over blocks.
        early_pages: lines that find those of the first blocks ahead of new rows.
        first_pages: the same at a loop's start; each block finds those of a later one.
        paging: lines that find a block's pages, where the history lies in pages.
        keys: key tiles of a block.
        whole_keys: the same of a block that lies within the history.
        products: the dots.
        scores: the score ``x`` [m, n].
        mask: ``visible`` [m, n].
        hidden: ``x`` where it is not visible.
        scale: factor from ``x`` to base-2 logits where it is a positive constant, else empty.
        sums: the weighted sums.
        finish: what follows the loops.
        merging: what the last program of a tile does, if it merges.
        handed: what it hands to the function that merges.
    """

    about: Texts
    grid: tuple[tuple[str, str], ...]
    points: str
    shared: str
    group: str
    key_order: Texts
    rows: Texts
    setup: Texts
    bounds: Bounds
    limits: Texts
    skips: Texts
    appended: Texts
    scans: Texts
    later: Texts
    parts: str
    masked_from: str
    step: str
    early_pages: Texts
    first_pages: Texts
    paging: Texts
    keys: Texts
    whole_keys: Texts
    products: Texts
    scores: Texts
    mask: Texts
    hidden: str
    scale: str
    sums: tuple[SumCode, ...]
    finish: Texts
    merging: MergeCode | None
    handed: Texts


# --- the tiled fold --------------------------------------------------------------------------


def tiled_code(plan: TiledPlan) -> TiledCode:
    """Print the tiled fold."""
    p = printer(plan, ("m",))
    fold = plan.fold
    setup = section(p)
    places = contracted(p, plan)
    query_tiles(p, plan, places)
    for _, column in held_columns(plan.passes[0]):
        p.lines += [text for text in columns_of(p, plan, column)[0] if text not in p.lines]
    folded = fold.score if plan.plain else fold_constants(fold.score, p.sizes)
    hoist(p, plan, folded, fold.where)
    x, scale = (folded, "") if plan.plain else scaled(p, plan, folded)
    limits = bounds(fold.mask, lambda band: band_offset(p, band))
    skips, scans = skip_lines(p, plan), scan_lines(p, plan)
    if skips:
        limits = Bounds(limits.lo, limits.hi, *all_seen(plan))
    found = streams(p, plan, places)
    columns = [value_pieces(p, plan, name, c) for name, c in _value_names(plan)]
    addresses = _value_streams(p, plan, columns)
    hoisted = dict(p.known)
    keys = section(p)
    key_tiles(p, plan, places, {name: loads.each for name, loads in found.items()})
    whole_keys = section(p)
    if plan.ahead:
        key_tiles(p, plan, places, {name: loads.whole for name, loads in found.items()})
    sums = _sums(p, plan, columns, addresses)
    later = later_lines(p, plan)
    dots, scores, mask = _scores(p, plan, places, x, scale)
    p.known = hoisted
    accs = tuple(acc for acc, _ in held_columns(plan.passes[0]))
    end = (
        partial_lines(plan, group_of(plan), accs)
        if plan.split
        else finish(p, plan, (Held("m", "l", accs),), ("m",))
    )
    return TiledCode(
        about(plan), grid(plan), points(plan), shared_points(plan), group_of(plan),
        order_lines(plan), row_lines(plan), tuple(setup),
        limits, limit_lines(plan, limits, forced=bool(skips or scans or later)), skips,
        appended_lines(plan), scans, later,
        _parts(plan), "whole" if plan.ahead else "inner_hi",
        "back" if plan.backward else "n0", early_pages(plan), first_pages(plan),
        paging_lines(plan), tuple(keys),
        tuple(whole_keys), dots, scores, mask,
        "0.0" if plan.plain else 'float("-inf")', scale, sums, (*_joins(plan, columns), *end),
        None if plan.fused is None else merge_code(plan.fused), handed(plan),
    )  # fmt: skip


def _parts(plan: TiledPlan) -> str:
    """The ranges of keys that have a loop of their own, as arguments of a range, last keys first.

    With the masked range behind it, ptxas (12.8) serialises every wgmma of the visible one (C7515).
    """
    return "2, 3" if plan.ahead else f"2, {plan.first_part - 1}, -1"


def _scores(
    p: Printer, plan: TiledPlan, places: Places, x: Node, scale: str
) -> tuple[Texts, Texts, Texts]:
    """Lines for a block's products, its scores and its mask."""
    dots = section(p)
    products(p, plan, places)
    scores = section(p)
    value = p.emit(x)
    tail = "" if scale or plan.plain else " * scale"
    scores.append(tile_of(p, plan, value, tail, kind_of(x) is Kind.INT))
    mask = section(p)
    mask.append(f"visible = {mask_text(p, plan.fold.where)}")
    return tuple(dots), tuple(scores), tuple(mask)


def _value_streams(p: Printer, plan: TiledPlan, columns: list[list[Piece]]) -> dict[str, Loads]:
    """Addresses of plain value tiles.

    One block ahead, the first round has no block before it: its weights are 0, and so its values
    have to be, since 0 times an infinite one is none.
    """
    when = "(n0 > lo)" if plan.ahead else ""
    found = {}
    for (name, column), pieces in zip(_value_names(plan), columns, strict=True):
        value = column.fold.value
        if column.shared < 0 and len(value) == 1 and isinstance(value[0], Input):
            if plan.paired:
                found[f"{name}_0"] = found[f"{name}_1"] = pair_stream(p, plan, column)
                continue
            for piece in pieces:
                own = f"{name}{piece.mark}"
                cast = DIALECT[column.type]
                found[own] = stream(p, plan, value[0], own, piece.places, cast, when)
    return found


def _value_names(plan: TiledPlan) -> list[tuple[str, Columns]]:
    columns = plan.passes[0].columns
    return [(f"values{i}" if i else "values", c) for i, c in enumerate(columns)]


def _sums(
    p: Printer, plan: TiledPlan, columns: list[list[Piece]], addresses: dict[str, Loads]
) -> tuple[SumCode, ...]:
    """The weighted sums of a block, with the lines that load their values."""
    held = held_columns(plan.passes[0])
    return tuple(
        _sum(p, plan, f"{acc}{piece.mark}", f"{name}{piece.mark}", column, piece, addresses)
        for (acc, _), (name, column), pieces in zip(held, _value_names(plan), columns, strict=True)
        for piece in pieces
    )


def _sum(
    p: Printer, plan: TiledPlan, acc: str, name: str, column: Columns, piece: Piece,
    addresses: dict[str, Loads],
) -> SumCode:  # fmt: skip
    """One weighted sum of a block, or one piece of its columns."""
    lines = section(p)
    whole = addresses[name].whole if name in addresses else ()
    if column.shared >= 0:
        lines.append(f"{name} = keys{column.shared}  # one tile is both key and value")
    elif plan.paired:
        lines += pair_lines(name, piece, addresses[name], DIALECT[column.type])
    elif name in addresses:
        lines += addresses[name].each
    else:
        inner = p.child(**piece.places)
        shape = (plan.block_n, piece.block)
        text = operand(inner, column.fold.value, ("n", "e"), column.type, shape)
        lines.append(f"{name} = {text}")
    weight = times = ""
    if piece.scaled is not None:
        weight, times = _scaled_weight(p, f"{name}_scale", column, piece)
    if name != "values":
        lines.append(f"values = {name}")
    return SumCode(
        acc, piece.block, column.type, tuple(lines), options(column.type), weight or "weight",
        times, whole,
    )  # fmt: skip


def _scaled_weight(p: Printer, scale: str, column: Columns, piece: Piece) -> tuple[str, str]:
    """The weights times the values' scales, and the factor of the dot's result."""
    if column.shared >= 0:
        p.lines.append(f"{scale} = keys{column.shared}_scale")
    else:
        scale_lines(p, piece, scale)
    weight = f"(weight * {scale}[None, :])"
    if column.type != "fp16":
        return weight, ""
    p.lines += unit_lines(scale)
    return weight, f" * {scale}_unit"


def _joins(plan: TiledPlan, columns: list[list[Piece]]) -> Texts:
    """Lines that put the pieces of each sum side by side, with rows in front."""
    if plan.turned:
        sums = () if plan.plain else ("l = tl.sum(l, 1)",)
        held = held_columns(plan.passes[0])
        return (*sums, *(f"{acc} = tl.trans({acc})  # [m, e]" for acc, _ in held))
    lines: list[str] = []
    for (acc, column), pieces in zip(held_columns(plan.passes[0]), columns, strict=True):
        if plan.paired:
            lines.append(interleaved(acc, plan.block_m, column.block))
        elif len(pieces) > 1:
            count, block = len(pieces), pieces[0].block
            lines += joined(acc, count, plan.block_m, block, column.block)
    return tuple(lines)
