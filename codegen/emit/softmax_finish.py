"""Prints what follows the loops of the softmax family: partials, merge, division, epilogue, lse."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attncc.codegen.emit.softmax_rows import (
    LN2,
    LOG2E,
    Texts,
    about,
    atom,
    column_names,
    columns_of,
    grid,
    printer,
    row_lines,
    section,
    sizes_of,
)
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan_passes import Columns, Pass
from attncc.codegen.plan_softmax import MergePlan, SoftmaxPlan, TiledPlan
from attncc.codegen.softmax_checks import TOKENS
from attncc.dsl.graph import walk
from attncc.dsl.ir import Node, Softmax


@dataclass(frozen=True, slots=True)
class Held:
    """Variables that hold one pass' carry.

    Attributes:
        m: base-2 maximum, empty for a plain sum.
        l: sum of weights, empty for a plain sum.
        accs: weighted sums, one a fold.
    """

    m: str
    l: str
    accs: Texts


@dataclass(frozen=True, slots=True)
class ColumnCode:
    """One fold's columns in a merge.

    Attributes:
        acc: the accumulator.
        block: columns of its tile.
        at: where a split's columns start in a row of partials.
        e: the columns.
        valid: condition for the columns, with a leading ``&``, or empty.
    """

    acc: str
    block: int
    at: str
    e: str
    valid: str


@dataclass(frozen=True, slots=True)
class PassCode:
    """One pass' partials in a merge.

    Attributes:
        index: the pass.
        plain: a plain sum.
        width: columns of a row of partials.
        columns: its folds.
    """

    index: int
    plain: bool
    width: int
    columns: tuple[ColumnCode, ...]


@dataclass(frozen=True, slots=True)
class MergeCode:
    """Printed pieces of the merge, for some rows.

    Attributes:
        about: the file's docstring.
        grid: axes and sizes, fastest first.
        rows_apart: the rows' indices taken apart.
        columns: lines that define the value columns.
        merged: the passes.
        finish: what follows the loops.
    """

    about: Texts
    grid: tuple[tuple[str, str], ...]
    rows_apart: Texts
    columns: Texts
    merged: tuple[PassCode, ...]
    finish: Texts


def merge_code(plan: MergePlan) -> MergeCode:
    """Print the merge."""
    p = printer(plan, ("m",))
    lines: list[str] = []
    merged, held = [], []
    for one in plan.passes:
        columns = []
        for at, column in enumerate(one.columns):
            own, _ = columns_of(p, plan, column)
            lines += [text for text in own if text not in lines]
            e = column_names(plan)[column.fold.value_axes]
            valid = f" & {e}_valid[None, None, :]" if column.width != column.block else ""
            start = f"{column.first} + " if column.first else ""
            columns.append(ColumnCode(f"acc{one.index}_{at}", column.block, start, e, valid))
        merged.append(PassCode(one.index, one.plain, one.width, tuple(columns)))
        accs = tuple(c.acc for c in columns)
        held.append(Held(f"m{one.index}", f"l{one.index}", accs))
    return MergeCode(
        about(plan), grid(plan), row_lines(plan), tuple(lines), tuple(merged),
        finish(p, plan, tuple(held), ("m",)),
    )  # fmt: skip


def handed(plan: TiledPlan) -> Texts:
    """What the kernel hands to the function that merges, in the order of its parameters."""
    if plan.fused is None:
        return ()
    [own] = plan.passes
    mine = {f"part{own.index}_{n}_ptr": f"part_{n}_ptr" for n in ("m", "l", "u")}
    mine[f"splits{own.index}"] = "splits"
    row = f"first.to(tl.int64) * {group_of(plan)} + own" if plan.packed else "own"
    names = [p.name for p in plan.fused.parameters]
    points = [f"at_{axis}" for axis, _ in grid(plan)]
    return (*(mine.get(n, n) for n in names), "point", row, "own_valid", *points)


def partial_lines(plan: TiledPlan, group: str, accs: Texts) -> Texts:
    """Store a partial: base-2 maximum, sum, and the weighted sums, not yet normalised."""
    row = f"first.to(tl.int64) * {group} + row" if plan.packed else "row"
    [own] = plan.passes
    lines = [f"place = (point.to(tl.int64) * rows + {row}) * splits + cut"]
    if not own.plain:
        lines += [
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


def group_of(plan: SoftmaxPlan) -> str:
    """Rows a token."""
    sizes = sizes_of(plan)
    return atom(" * ".join(sizes[a] for a in plan.tile_axes if a != TOKENS) or "1")


# --- division, epilogue and lse --------------------------------------------------------------


def finish(
    p: Printer, plan: SoftmaxPlan, held: tuple[Held, ...], rows: tuple[str, ...], *,
    inverted: bool = False,
) -> Texts:  # fmt: skip
    """Sink, division, epilogue, outputs and lse, from each pass' carry.

    Args:
        p: of the rows.
        plan: of the kernel.
        held: each pass' carry.
        rows: dimensions of the rows.
        inverted: multiply by the denominator's reciprocal, one division a row.
    """
    lines = section(p)
    known = dict(p.known)
    places: dict[Node, dict[str, Place]] = {}
    for one in plan.passes:
        values = _divided(p, plan, one, held, rows, inverted)
        for column, value in zip(one.columns, values, strict=True):
            known[column.fold.node] = value
            places[column.fold.node] = columns_of(p, plan, column)[1]
    for out in plan.program.outputs:
        node = next(n for n in walk(out.value) if n in places)
        inner = p.child(**places[node])
        inner.known = dict(known)
        inner.store(p.tensors[f"out_{out.name}"], inner.emit(out.value))
    if plan.lse:
        suffix = _suffix(plan, plan.passes[0])
        lines.append(
            f'lse = tl.where(empty{suffix}, float("-inf"), '
            f"(high{suffix} + tl.log2(total{suffix})) * {LN2})  # natural log"
        )
        p.child(one=Place(Var("0"))).store(p.tensors["out_lse"], Var("lse", rows))
    return tuple(lines)


def _suffix(plan: SoftmaxPlan, one: Pass) -> str:
    return str(one.index) if len(plan.passes) > 1 else ""


def _divided(
    p: Printer, plan: SoftmaxPlan, one: Pass, held: tuple[Held, ...], rows: tuple[str, ...],
    inverted: bool,
) -> list[Var]:  # fmt: skip
    """Each fold's value: the sums as they are, or divided by everything in the denominator."""
    at = plan.passes.index(one)
    own, dims = held[at], (*rows, "e")
    if one.plain:
        return [Var(acc, dims) for acc in own.accs]
    mark = _suffix(plan, one)

    def wide(text: str) -> str:
        return p.lift(Var(text, rows), dims)

    accs = list(own.accs)
    others = [(held[i].m, held[i].l) for i in _beside(plan, one)]
    others += _sink(p, one, mark, rows)
    high, below = own.m, own.l
    for m, _ in others:
        high = f"tl.maximum({high}, {m})"
    p.lines.append(f"high{mark} = {high}")
    if others:
        p.lines += [
            f'base{mark} = tl.where(high{mark} == float("-inf"), 0.0, high{mark})',
            f"keep{mark} = tl.exp2({own.m} - base{mark})",
        ]
        terms = [f"{own.l} * keep{mark}"]
        terms += [f"{l} * tl.exp2({m} - base{mark})" for m, l in others]
        below = " + ".join(terms)
        accs = [f"({acc} * {wide(f'keep{mark}')})" for acc in accs]
    p.lines += [
        f"sum{mark} = {below}",
        f"empty{mark} = sum{mark} == 0  # the row sees nothing",
        f"total{mark} = tl.where(empty{mark}, 1.0, sum{mark})",
    ]
    if inverted:
        p.lines.append(f"share{mark} = 1.0 / total{mark}")
    found = []
    for i, acc in enumerate(accs):
        name = f"o{mark}" + (f"_{i}" if len(accs) > 1 else "")
        value = f"{acc} * {wide(f'share{mark}')}" if inverted else f"{acc} / {wide(f'total{mark}')}"
        p.lines.append(f"{name} = tl.where({wide(f'empty{mark}')}, 0.0, {value})")
        found.append(Var(name, dims))
    return found


def _beside(plan: SoftmaxPlan, one: Pass) -> list[int]:
    """The passes whose exponentials share this one's sum."""
    alone = [_alone(other) for other in plan.passes]
    return [alone.index(b) for b in one.lead.beside]


def _alone(one: Pass) -> Node:
    weight = one.lead.weight
    return replace(weight, sink=None, beside=()) if isinstance(weight, Softmax) else weight


def _sink(p: Printer, one: Pass, mark: str, rows: tuple[str, ...]) -> list[tuple[str, str]]:
    if one.lead.sink is None:
        return []
    sink = p.lift(p.emit(one.lead.sink), rows)
    p.lines.append(f"sink{mark} = ({sink}) * {LOG2E}  # one more logit, without a value")
    return [(f"sink{mark}", "1.0")]


def held_columns(one: Pass) -> tuple[tuple[str, Columns], ...]:
    """The accumulators of one pass' folds."""
    return tuple((f"acc{i}" if i else "acc", c) for i, c in enumerate(one.columns))
