"""Triton text of the outputs of chunks that read their state across the axis of its rows."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.affine_plans import AcrossPlan
from attncc.codegen.emit.affine import chunk_index, chunk_lines, summary_of, taken
from attncc.codegen.emit.carry import left
from attncc.codegen.emit.rows import ROW, at, printer_of
from attncc.codegen.emit.scan import grid_parts, split_program_id, store_results, tile_lines
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan_across import ADDED, BASES, SCORES, STARTS
from attncc.codegen.plan_affine import ROWS
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime, Node


@dataclass(frozen=True, slots=True)
class ColumnsRead:
    """One read-out of ``affine_columns.py.jinja``: where a token's products lie."""

    name: str
    scores: str
    bases: str


@dataclass(frozen=True, slots=True)
class BasesRead(ColumnsRead):
    """One read-out of ``affine_bases.py.jinja``: where its products go, and its vector."""

    lines: tuple[str, ...]
    vector: str


@dataclass(frozen=True, slots=True)
class BasesCode:
    """Printed pieces of ``affine_bases.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    system: str
    added: str
    starts: str
    read_codes: tuple[BasesRead, ...]


@dataclass(frozen=True, slots=True)
class ColumnsCode:
    """Printed pieces of ``affine_columns.py.jinja``.

    Attributes:
        summary: what the header says of the table.
        index: which columns of which chunk a program works on.
        system: where the chunk's products lie.
        read_codes: the read-outs.
        here: lines that load what a token has.
        own_row: what its row is written along.
        decay: its decay; empty for none.
        outputs: lines that store its outputs.
        decayed: whether there is a decay.
        rows: tokens of a chunk.
        blocks: variables that hold their rows.
        width: columns of a program.
    """

    summary: tuple[str, ...]
    index: tuple[str, ...]
    system: str
    read_codes: tuple[ColumnsRead, ...]
    here: tuple[str, ...]
    own_row: str
    decay: str
    outputs: tuple[str, ...]
    decayed: bool
    rows: int
    blocks: int
    width: int


def _index(plan: AcrossPlan) -> list[str]:
    """Which chunk of which system a program works on, and its places."""
    key = plan.axis(plan.form.active[0])
    parts = [("column", str(plan.columns)), *grid_parts(plan, plan.grid_axes)]
    lines = split_program_id(parts, "chunk")
    lines += chunk_lines(plan, ("first_row = tl.full((), 0, tl.int64)",))
    lines += ["chunk_row = first_row + first_token", *tile_lines(plan)]
    lines.append(f"at_{key.axis} = column * {key.block} + at_{key.axis}")
    return [*lines, *ROW.head(plan), *ROW.lines(plan), f"n = tl.arange(0, {ROWS})"]


def _system(plan: AcrossPlan) -> str:
    """Where a chunk's results lie."""
    index, count = chunk_index(plan)
    return f"system = chunk.to(tl.int64) * ({count}) + {index}"


def _left(plan: AcrossPlan) -> tuple[str, str]:
    """Where what the rows add lies, and the state before a chunk, with the masks of columns."""
    key, wide = plan.axis(plan.form.active[0]), plan.axis(plan.blocked)
    mask = f", mask=at_{wide.axis}[None, :] < {wide.size}, other=0.0" if wide.partial else ""
    added, starts = left(plan, ADDED, ROWS, "m"), left(plan, STARTS, plan.high, f"at_{key.axis}")
    return f"{added}{mask}", f"{starts}{mask}"


def _products(plan: AcrossPlan, number: int, name: str, row: str, size: int) -> str:
    """Where a row of a read-out's products lies: ``[system, read, ROWS, size]``."""
    at = f"{name}_ptr + (system * {len(plan.reads)} + {number}) * {ROWS * size}"
    return f"{at} + {row} * {size}"


def emit_bases(plan: AcrossPlan) -> BasesCode:
    """Print the expressions of the kernel with the products of chunks."""
    printer, key = printer_of(plan), plan.form.active[0]
    own, reads = at(plan, printer, ROW), []
    for i, read in enumerate(plan.reads):
        vector = own.operand([read.vector], "v").text
        scores = f"{_products(plan, i, SCORES, 'm[:, None]', ROWS)} + n[None, :]"
        bases = f"{_products(plan, i, BASES, 'm[:, None]', plan.high)} + at_{key}[None, :]"
        reads.append(BasesRead(read.name, scores, bases, taken(printer), vector))
    added, starts = _left(plan)
    return BasesCode(
        summary_of(plan), tuple(_index(plan)), _system(plan), added, starts, tuple(reads)
    )


def emit_columns(plan: AcrossPlan) -> ColumnsCode:
    """Print the expressions of the kernel that goes through the tokens of a chunk."""
    form, key, scan = plan.form, plan.axis(plan.form.active[0]), plan.program.scan or "T"
    base = printer_of(plan)
    printer = base.child(**{scan: Place(Var("row"))})
    printer.positions = {**base.positions, scan: Var("t")}
    own_row = _whole(printer, form.rows[0].a, key.block)
    decay = _whole(printer, form.decays[0], key.block) if form.decays else ""
    here, names = taken(printer), {r.name for r in plan.reads}
    for node in walk(*plan.outputs):
        if isinstance(node, Input) and node.lifetime is Lifetime.WORKSPACE and node.name in names:
            printer.known[node] = Var(node.name, ("k",))
    values = zip(plan.program.outputs, map(printer.emit, plan.outputs), strict=True)
    store_results(printer, plan, {o.name: value for o, value in values})
    reads = tuple(
        ColumnsRead(
            r.name, _products(plan, i, SCORES, "place", ROWS),
            f"{_products(plan, i, BASES, 'place', plan.high)} + at_{key.axis}",
        )
        for i, r in enumerate(plan.reads)
    )  # fmt: skip
    return ColumnsCode(
        summary=summary_of(plan), index=tuple(_index(plan)), system=_system(plan),
        read_codes=reads, here=here, own_row=own_row, decay=decay, outputs=taken(printer),
        decayed=bool(form.decays), rows=ROWS, blocks=ROWS // plan.leaf, width=key.block,
    )  # fmt: skip


def _whole(printer: Printer, node: Node, width: int) -> str:
    """An expression as text over the active axis, where it may lack that."""
    value = printer.emit(node)
    return value.text if value.dims else f"(tl.zeros([{width}], tl.float32) + {value.text})"
