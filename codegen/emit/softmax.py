"""Prints the pieces of the softmax family's kernels, and renders them.

Tile dimensions: ``m`` query rows, ``n`` keys, ``k`` a dot's contraction, ``e`` value columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attncc.codegen.emit.append import append_code
from attncc.codegen.emit.bounds import Bounds, bounds
from attncc.codegen.emit.scale import fold_constants, gather
from attncc.codegen.emit.skip import all_seen, skip_lines
from attncc.codegen.emit.softmax_finish import (
    Held,
    finish,
    group_of,
    held_columns,
    merge_code,
    partial_lines,
)
from attncc.codegen.emit.softmax_rows import (
    Texts,
    about,
    columns_of,
    grid,
    paging_lines,
    points,
    printer,
    row_lines,
    section,
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
from attncc.codegen.forms import Band, Refusal, SoftmaxForm
from attncc.codegen.plan import KernelPlan, Spec
from attncc.codegen.plan_append import AppendPlan
from attncc.codegen.plan_passes import Columns
from attncc.codegen.plan_softmax import MergePlan, SoftmaxPlans, TiledPlan, plan_softmax
from attncc.codegen.render import Source, render
from attncc.codegen.terms import mul
from attncc.dsl.errors import RefusedError
from attncc.dsl.graph import axes_of, kind_of
from attncc.dsl.ir import Input, Kind, Node, Program


@dataclass(frozen=True, slots=True)
class SumCode:
    """One weighted sum of a block.

    Attributes:
        acc: the accumulator [m, e].
        block: its columns.
        type: element type of the value tile.
        values: lines that load the value tile.
        options: further arguments of the dot.
    """

    acc: str
    block: int
    type: str
    values: Texts
    options: str


@dataclass(frozen=True, slots=True)
class TiledCode:
    """Printed pieces of the tiled fold.

    Attributes:
        about: the file's docstring.
        grid: axes and sizes, fastest first.
        points: number of points of the grid axes.
        group: rows a token.
        rows: row indices taken apart.
        setup: query tiles, values that do not depend on keys, addresses of the first keys.
        bounds: ranges of keys, as text.
        limits: lines that ``bounds`` needs.
        skips: lines that tighten the range by what blocks of the history hold.
        later: what lies behind the last block, for sums between key and query.
        parts: arguments of the loop over masked and fully visible ranges.
        step: the loop variable over blocks.
        paging: lines that find a block's pages, where the history lies in pages.
        keys: key tiles of a block.
        scores: dots and the score ``x`` [m, n].
        mask: ``visible`` [m, n].
        hidden: ``x`` where it is not visible.
        scale: factor from ``x`` to base-2 logits where it is a positive constant, else empty.
        sums: the weighted sums.
        finish: what follows the loops.
    """

    about: Texts
    grid: tuple[tuple[str, str], ...]
    points: str
    group: str
    rows: Texts
    setup: Texts
    bounds: Bounds
    limits: Texts
    skips: Texts
    later: Texts
    parts: str
    step: str
    paging: Texts
    keys: Texts
    scores: Texts
    mask: Texts
    hidden: str
    scale: str
    sums: tuple[SumCode, ...]
    finish: Texts


def source(plan: KernelPlan) -> Source:
    """The generated file of a plan of this family."""
    if isinstance(plan, TiledPlan):
        return render(plan, tiled_code(plan))
    if isinstance(plan, MergePlan):
        return render(plan, merge_code(plan))
    assert isinstance(plan, AppendPlan)
    return render(plan, append_code(plan))


def softmax_sources(program: Program, form: SoftmaxForm, spec: Spec, phase: str) -> list[Source]:
    """Every kernel that a call of this kind may launch, in launch order.

    Raises:
        RefusedError: the family does not cover the program; the message says why and where.
    """
    plans = plan_softmax(program, form, spec, phase)
    if isinstance(plans, Refusal):
        raise RefusedError(plans.reason, op=program.name, loc=plans.loc)
    assert isinstance(plans, SoftmaxPlans)
    found = (plans.append, plans.whole, *plans.parts, plans.merge)
    return [source(plan) for plan in found if plan is not None]


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
    x, scale = (folded, "") if plan.plain else _scaled(p, plan, folded)
    limits = bounds(fold.mask, lambda band: _offset(p, band))
    skips = skip_lines(p, plan)
    if skips:
        limits = Bounds(limits.lo, limits.hi, *all_seen(plan))
    found = streams(p, plan, places)
    addresses = _value_streams(p, plan)
    hoisted = dict(p.known)
    keys = section(p)
    key_tiles(p, plan, places, found)
    sums = _sums(p, plan, addresses)
    later = later_lines(p, plan)
    scores, mask = _scores(p, plan, places, x, scale)
    p.known = hoisted
    accs = tuple(s.acc for s in sums)
    end = (
        partial_lines(plan, group_of(plan), accs)
        if plan.split
        else finish(p, plan, (Held("m", "l", accs),), ("m",))
    )
    return TiledCode(
        about(plan), grid(plan), points(plan), group_of(plan), row_lines(plan), tuple(setup),
        limits, _limit_lines(plan, limits, forced=bool(skips or later)), skips, later,
        f"2, {plan.first_part - 1}, -1" if plan.backward else f"{plan.first_part}, 3",
        "back" if plan.backward else "n0", paging_lines(plan), tuple(keys), scores, mask,
        "0.0" if plan.plain else 'float("-inf")', scale, sums, end,
    )  # fmt: skip


def _scores(
    p: Printer, plan: TiledPlan, places: Places, x: Node, scale: str
) -> tuple[Texts, Texts]:
    """Lines for a block's scores and its mask."""
    scores = section(p)
    products(p, plan, places)
    value = p.emit(x)
    tail = "" if scale or plan.plain else " * scale"
    scores.append(tile_of(p, plan, value, tail, kind_of(x) is Kind.INT))
    mask = section(p)
    mask.append(f"visible = {mask_text(p, plan.fold.where)}")
    return tuple(scores), tuple(mask)


def _value_streams(p: Printer, plan: TiledPlan) -> dict[str, Texts]:
    """Addresses of plain value tiles."""
    found = {}
    for name, column in _value_names(plan):
        value = column.fold.value
        if column.shared < 0 and len(value) == 1 and isinstance(value[0], Input):
            inner = columns_of(p, plan, column)[1]
            found[name] = stream(p, plan, value[0], name, inner, DIALECT[column.type])
    return found


def _value_names(plan: TiledPlan) -> list[tuple[str, Columns]]:
    columns = plan.passes[0].columns
    return [(f"values{i}" if i else "values", c) for i, c in enumerate(columns)]


def _sums(p: Printer, plan: TiledPlan, addresses: dict[str, Texts]) -> tuple[SumCode, ...]:
    """The weighted sums of a block, with the lines that load their values."""
    found = []
    held = held_columns(plan.passes[0])
    for (acc, _), (name, column) in zip(held, _value_names(plan), strict=True):
        lines = section(p)
        if column.shared >= 0:
            lines.append(f"{name} = keys{column.shared}  # one tile is both key and value")
        elif name in addresses:
            lines += addresses[name]
        else:
            inner = p.child(**columns_of(p, plan, column)[1])
            shape = (plan.block_n, column.block)
            text = operand(inner, column.fold.value, ("n", "e"), column.type, shape)
            lines.append(f"{name} = {text}")
        if name != "values":
            lines.append(f"values = {name}")
        found.append(SumCode(acc, column.block, column.type, tuple(lines), options(column.type)))
    return tuple(found)


# --- scale and bounds ------------------------------------------------------------------------


def _scaled(p: Printer, plan: TiledPlan, score: Node) -> tuple[Node, str]:
    """The score without its uniform factor, and that factor as text if it is a positive constant.

    Otherwise a variable ``scale`` holds the factor, log2(e) included.
    """
    factor, rest = gather(score, p.sizes)
    uniform = {*plan.grid_axes, *(("B",) if plan.packed else ())}
    fixed = [n for n in rest if set(axes_of(n)) <= uniform]
    x = mul(*(n for n in rest if not set(axes_of(n)) <= uniform))
    base2 = factor * math.log2(math.e)
    if not fixed and factor > 0 and math.isfinite(base2):
        return x, repr(base2)
    texts = [repr(base2), *(p.emit(n).text for n in fixed)]
    p.lines.append(f"scale = {' * '.join(texts)}  # log2(e) included")
    return x, ""


def _offset(p: Printer, band: Band) -> str | None:
    """Text of a band's offset if it is one number for the whole tile."""
    value = p.emit(band.offset)
    return None if value.dims else value.text


def _limit_lines(plan: TiledPlan, limits: Bounds, *, forced: bool) -> Texts:
    """Absolute positions of the tile's first and last token, if anything uses them."""
    texts = " ".join((limits.lo, limits.hi, limits.inner_lo, limits.inner_hi))
    if "t_" not in texts and not forced:
        return ()
    group = group_of(plan)
    shift = " + (S - T)" if plan.aligned_end else ""
    last = f"tl.minimum(start + {plan.block_m}, T * {group}) - 1"
    return (
        f"t_first = (start // {group}{shift}).to(tl.int64)",
        f"t_last = (({last}) // {group}{shift}).to(tl.int64)",
    )
