"""Triton text of the kernel that carries an affine state over the chunks of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.affine_checks import shared_gain
from attncc.codegen.affine_plans import AcrossPlan, LeavingPlan
from attncc.codegen.emit.affine import (
    chunk_index,
    dot_precision,
    line_positions,
    splits,
    summary_of,
    taken,
)
from attncc.codegen.emit.decays import operand_at
from attncc.codegen.emit.rows import ROW, Scope, at, printer_of, tokens_of
from attncc.codegen.emit.scan import (
    ELEMENT,
    grid_parts,
    load_initial,
    slot_lines,
    split_program_id,
    store_final,
    store_results,
    tile_lines,
)
from attncc.codegen.emit.segments import (
    first_state,
    kept_shape,
    segment_lines,
    segment_parts,
    start_at,
    store_summary,
)
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.forms import Read
from attncc.codegen.plan_across import ADDED, STARTS
from attncc.codegen.plan_affine import BLOCK, ROWS, Part, Split, StatePlan
from attncc.codegen.terms import is_number
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime


@dataclass(frozen=True, slots=True)
class CarryRead:
    """One read-out of ``affine_state.py.jinja``."""

    name: str
    lines: tuple[str, ...]
    vector: str
    decayed: bool


@dataclass(frozen=True, slots=True)
class StateCode:
    """Printed pieces of ``affine_state.py.jinja``.

    Attributes:
        row_prefix: the line with the decays up to the rows' read; "" where there are none, or where
            the line ``gain`` holds all that the rows' read is multiplied by.
        row_coef: a number that all rows' reads are multiplied by, where there is no such line.
        single: operands are fp32.
        piece: rows of a piece of a chunk in plain fp32 products.
        width: columns of the tile.
        leave_start: what leaves the state before a chunk to others; empty where nobody asks.
        leave_rows: the same of what its rows add.
    """

    summary: tuple[str, ...]
    index: tuple[str, ...]
    load: tuple[str, ...]
    rows_here: tuple[str, ...]
    a: str
    b: str
    const: str
    row_prefix: str
    row_coef: str
    read_codes: tuple[CarryRead, ...]
    outputs: tuple[str, ...]
    finish: tuple[str, ...]
    counts_decay: bool
    kept_shape: str
    steps: str
    decayed: bool
    system_index: str
    system_count: str
    positions: dict[str, int]
    total_at: int
    token_dim: str
    element: str
    single: bool
    dot_precision: str
    rows: int
    square: int
    piece: int
    width: int
    leave_start: tuple[str, ...]
    leave_rows: tuple[str, ...]


def left(plan: StatePlan | AcrossPlan, name: str, rows: int, at: str) -> str:
    """Where a row and column of what is left of a chunk lie: ``[system, rows, wide]``."""
    assert isinstance(plan, (LeavingPlan, AcrossPlan))
    column = f"at_{plan.blocked}[None, :]"
    return f"{name}_ptr + system * {rows * plan.wide} + {at}[:, None] * {plan.wide} + {column}"


def _left(plan: StatePlan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not isinstance(plan, LeavingPlan):
        return (), ()
    key = plan.axis(plan.form.active[0])
    start = left(plan, STARTS, key.block, f"at_{key.axis}")
    return (f"tl.store({start}, held)",), (f"tl.store({left(plan, ADDED, ROWS, 'm')}, added)",)


def state_index(plan: StatePlan) -> list[str]:
    """Which columns of which system a program carries."""
    parts = grid_parts(plan, plan.grid_axes)
    if plan.column_blocks > 1 or plan.part is not Part.WHOLE:
        parts.insert(0, ("block", str(plan.column_blocks)))
    parts += segment_parts(plan)
    lines = [*split_program_id(parts, "sequence"), *tile_lines(plan), *slot_lines(plan)]
    for places in dict.fromkeys([ROW, tokens_of(plan)]):
        lines += places.head(plan)
    if plan.packed:
        return [
            *lines,
            "first_row = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)",
            "length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_row).to(tl.int32)",
            "first_chunk = tl.load(first_chunks_ptr + sequence)",
            *segment_lines(plan),
        ]
    return [
        *lines,
        "first_row = tl.full((), 0, tl.int64)",
        "length = tokens_given",
        "first_chunk = sequence * chunks_each",
        *segment_lines(plan),
    ]


def _const(scope: Scope, parts: list[Split]) -> str:
    """What the rows add by themselves, ``[m, v]``; empty where they add nothing."""
    if all(p.const is None or is_number(p.const, 0) for p in parts):
        return ""
    value = scope.added([p.const for p in parts])
    text = scope.printer.lift(value, scope.printer.order(("m", "v")))
    plan, own = scope.plan, scope.plan.axis(scope.plan.blocked).blocks
    if isinstance(plan, StatePlan) and plan.column_blocks > own:  # columns of A have none
        return f"tl.where(block < {own}, {text}, 0.0)"
    return text


def _initial(plan: StatePlan, printer: Printer) -> None:
    name = plan.form.state
    if plan.part not in (Part.WHOLE, Part.LEAD):
        printer.lines += first_state(plan)
        return
    k, v = plan.axis(plan.form.active[0]), plan.axis(plan.blocked)
    if name in plan.given:
        value = load_initial(printer, plan, name)
        printer.lines.append(f"state = {value.text}")
    else:
        shape = (v.block, k.block) if plan.transposed else (k.block, v.block)
        printer.lines.append(f"state = tl.zeros([{shape[0]}, {shape[1]}], tl.float32)")


def _outputs(plan: StatePlan, printer: Printer) -> None:
    """The outputs, over the read-outs that the skeleton holds in variables."""
    places = tokens_of(plan)
    scope = at(plan, printer, places)
    names = {r.name for r in plan.form.reads}
    for node in walk(*plan.form.outputs):
        if isinstance(node, Input) and node.lifetime is Lifetime.WORKSPACE and node.name in names:
            scope.printer.known[node] = Var(node.name, scope.printer.order((places.dim, "v")))
    values = {
        o.name: scope.value(node)
        for o, node in zip(plan.program.outputs, plan.form.outputs, strict=True)
    }
    store_results(scope.printer, plan, values, [scope.valid])


def _row_operands(plan: StatePlan, row: Scope) -> tuple[str, str]:
    """The rows' vectors as they write and as they read; with decays inside, ready-made."""
    if plan.each:
        names = ["late_a", *(["early_b"] if plan.solve else [])]
        row.printer.lines += [f"{n} = tl.load({operand_at(plan, n, 'm')})" for n in names]
        return names[0], names[-1]
    rows = plan.form.rows
    a = b = row.operand([r.a for r in rows], "k").text
    if plan.solve and [r.b for r in rows] != [r.a for r in rows]:
        b = row.operand([r.b for r in rows], "k").text
    return a, b


def _read_operand(plan: StatePlan, tokens: Scope, read: Read) -> str:
    """The vector of a read-out; with decays inside, ready-made."""
    if not plan.each:
        return tokens.operand([read.vector], "k").text
    name = f"early_{read.name}"
    text = f"tl.load({operand_at(plan, name, tokens.places.dim)})"
    return tokens.printer.name(text, (tokens.places.dim, "k")).text


def _finish(plan: StatePlan, printer: Printer) -> None:
    """Store the state after the last token, or what a summary has found."""
    if plan.part is Part.SUMMARY:
        printer.lines += store_summary(plan)
        return
    if plan.part is Part.LEAD:
        printer.lines.append(f"tl.store({start_at(plan)} + place, state)")
        return
    store_final(printer, plan, plan.form.state, Var("state", printer.order(("k", "v"))))
    if plan.part is Part.LOCAL:
        lines = [f"    {line}" for line in taken(printer)]
        printer.lines += ["if segment == segments - 1:", *lines]


def emit_state(plan: StatePlan) -> StateCode:
    """Print the carrying kernel's expressions."""
    form = plan.form
    printer = printer_of(plan)
    _initial(plan, printer)
    load = taken(printer)
    for places in dict.fromkeys([ROW, tokens_of(plan)]):
        printer.lines += places.lines(plan)
    row = at(plan, printer, ROW)
    a, b = _row_operands(plan, row)
    const = _const(row, splits(plan))
    rows_here = taken(printer)
    tokens = at(plan, printer, tokens_of(plan))
    reads = []
    for read in form.reads if plan.part is not Part.SUMMARY else ():
        vector = _read_operand(plan, tokens, read)
        decayed = bool(form.decays) and not plan.each
        reads.append(CarryRead(read.name, taken(printer), vector, decayed))
    if plan.part is not Part.SUMMARY:
        _outputs(plan, printer)
    outputs = taken(printer)
    _finish(plan, printer)
    index, count = chunk_index(plan)
    counts = plan.part is Part.SUMMARY and bool(form.decays) and not plan.solve
    coef, prefix = shared_gain(form) or (1.0, "")
    steps = "begin, end" if plan.part is not Part.WHOLE else f"0, tl.cdiv(length, {plan.tokens})"
    positions, total_at = line_positions(plan)
    leave_start, leave_rows = _left(plan)
    return StateCode(
        summary=summary_of(plan), index=tuple(state_index(plan)), load=load, rows_here=rows_here,
        a=a, b=b, const=const, row_prefix=f"prefix_{prefix}" if prefix else "",
        row_coef=repr(coef), read_codes=tuple(reads), outputs=outputs,
        finish=taken(printer), counts_decay=counts, kept_shape=kept_shape(plan), steps=steps,
        decayed=bool(form.decays), system_index=index, system_count=count,
        positions=positions, total_at=total_at, token_dim=tokens_of(plan).dim,
        element=ELEMENT[plan.storage], single=plan.storage == "fp32",
        piece=BLOCK, width=plan.axis(plan.blocked).block, dot_precision=dot_precision(plan),
        rows=ROWS, square=ROWS * ROWS, leave_start=leave_start, leave_rows=leave_rows,
    )  # fmt: skip
