"""Triton text of the kernel that carries an affine state over the chunks of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.affine import (
    chunk_index,
    dot_precision,
    line_positions,
    splits,
    summary_of,
    taken,
)
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
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.plan_affine import ROWS, Split, StatePlan
from attncc.codegen.render import Source, render
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
    """Printed pieces of ``affine_state.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    load: tuple[str, ...]
    rows_here: tuple[str, ...]
    a: str
    b: str
    const: str
    read_codes: tuple[CarryRead, ...]
    outputs: tuple[str, ...]
    finish: tuple[str, ...]
    decayed: bool
    system_index: str
    system_count: str
    positions: dict[str, int]
    total_at: int
    token_dim: str
    element: str
    dot_precision: str
    rows: int
    square: int


def state_index(plan: StatePlan) -> list[str]:
    """Which columns of which system a program carries."""
    parts = grid_parts(plan, plan.grid_axes)
    if (blocks := plan.axis(plan.blocked).blocks) > 1:
        parts.insert(0, ("block", str(blocks)))
    lines = [*split_program_id(parts, "sequence"), *tile_lines(plan), *slot_lines(plan)]
    for places in dict.fromkeys([ROW, tokens_of(plan)]):
        lines += places.head(plan)
    if plan.packed:
        return [
            *lines,
            "first_row = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)",
            "length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_row).to(tl.int32)",
            "first_chunk = tl.load(first_chunks_ptr + sequence)",
        ]
    return [
        *lines,
        "first_row = tl.full((), 0, tl.int64)",
        "length = tokens_given",
        "first_chunk = sequence * chunks_each",
    ]


def _const(scope: Scope, parts: list[Split]) -> str:
    """What the rows add by themselves, ``[m, v]``; empty where they add nothing."""
    if all(p.const is None or is_number(p.const, 0) for p in parts):
        return ""
    value = scope.added([p.const for p in parts])
    return scope.printer.lift(value, scope.printer.order(("m", "v")))


def _initial(plan: StatePlan, printer: Printer) -> None:
    name = plan.form.state
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


def emit_state(plan: StatePlan) -> StateCode:
    """Print the carrying kernel's expressions."""
    form = plan.form
    printer = printer_of(plan)
    _initial(plan, printer)
    load = taken(printer)
    for places in dict.fromkeys([ROW, tokens_of(plan)]):
        printer.lines += places.lines(plan)
    row = at(plan, printer, ROW)
    a = row.operand([r.a for r in form.rows], "k")
    b = a
    if plan.solve and [r.b for r in form.rows] != [r.a for r in form.rows]:
        b = row.operand([r.b for r in form.rows], "k")
    const = _const(row, splits(plan))
    rows_here = taken(printer)
    tokens = at(plan, printer, tokens_of(plan))
    reads = []
    for read in form.reads:
        vector = tokens.operand([read.vector], "k")
        reads.append(CarryRead(read.name, taken(printer), vector.text, bool(form.decays)))
    _outputs(plan, printer)
    outputs = taken(printer)
    store_final(printer, plan, form.state, Var("state", printer.order(("k", "v"))))
    index, count = chunk_index(plan)
    positions, total_at = line_positions(plan)
    return StateCode(
        summary=summary_of(plan), index=tuple(state_index(plan)), load=load, rows_here=rows_here,
        a=a.text, b=b.text, const=const, read_codes=tuple(reads), outputs=outputs,
        finish=taken(printer), decayed=bool(form.decays), system_index=index, system_count=count,
        positions=positions, total_at=total_at, token_dim=tokens_of(plan).dim,
        element=ELEMENT[plan.storage], dot_precision=dot_precision(plan), rows=ROWS,
        square=ROWS * ROWS,
    )  # fmt: skip


def state_source(plan: StatePlan) -> Source:
    """The generated file of the carrying kernel."""
    return render(plan, emit_state(plan))
