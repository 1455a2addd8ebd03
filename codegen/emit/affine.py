"""Triton text of the chunked affine form: the solving kernel and the carrying kernel.

With S0 the state before a chunk, row i at token t(i), and ``w(j -> i)`` the product of the decays
between row j's write and row i's read:

    L[i, j] = coef_i (b_i . a_j) w(j -> i)   where row i sees row j, else 0
    u       = (I - L)^-1 (const + coef * prefix * (b . S0))
    read_t  = prefix_t (vector_t . S0) + sum_j (vector_t . a_j) w(j -> t) u_j
    S1      = total S0 + sum_j suffix_j a_j (x) u_j

Decays are values, and an interval's product is a cumulative product in which decays outside the
interval are 1: no differences of logarithms and no quotients, so decays of 0 (a gate of -inf) and
negative ones are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.decays import Decays, row_choice, visible, visible_read
from attncc.codegen.emit.rows import COLUMN, ROW, Scope, at, printer_of, tokens_of
from attncc.codegen.emit.scan import (
    grid_parts,
    sizes_of,
    split_program_id,
    tile_lines,
)
from attncc.codegen.emit.triton import Printer
from attncc.codegen.forms import Row
from attncc.codegen.plan_affine import ROWS, ChunkPlan, PreparePlan, Split, split_row
from attncc.codegen.render import Source, render
from attncc.codegen.terms import is_number, number
from attncc.dsl.ir import Node


@dataclass(frozen=True, slots=True)
class ReadCode:
    """One read-out of ``affine_prepare.py.jinja``: its matrix over the chunk's rows."""

    name: str
    lines: tuple[str, ...]
    vector: str
    weight: str
    prefix: str


@dataclass(frozen=True, slots=True)
class PrepareCode:
    """Printed pieces of ``affine_prepare.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    operands: tuple[str, ...]
    a: str
    b: str
    decays: tuple[str, ...]
    suffix: str
    total: str
    coefficients: tuple[str, ...]
    mixing: str
    gain: str
    scale: str
    read_codes: tuple[ReadCode, ...]
    levels: int
    rows: int
    square: int
    dot_precision: str
    positions: dict[str, int]
    total_at: int
    token_dim: str


def splits(plan: ChunkPlan) -> list[Split]:
    """Every row of the table, split."""
    return [split_row(r, plan.form.passive) for r in plan.form.rows]


def chunk_index(plan: ChunkPlan) -> tuple[str, str]:
    """The index of a system among all systems of a chunk, and their number."""
    index, count = "0", "1"
    sizes = sizes_of(plan)
    for a in plan.system_axes:
        index = f"at_{a}" if index == "0" else f"({index}) * {sizes[a]} + at_{a}"
        count = sizes[a] if count == "1" else f"{count} * {sizes[a]}"
    return index, count


def line_positions(plan: ChunkPlan) -> tuple[dict[str, int], int]:
    """Where each vector lies in the buffer between the kernels, and the chunk's total decay."""
    return {name: i * ROWS for i, name in enumerate(plan.lines)}, len(plan.lines) * ROWS


def prepare_index(plan: PreparePlan) -> list[str]:
    """Which chunk of which system a program solves."""
    index, count = chunk_index(plan)
    lines = split_program_id(grid_parts(plan, plan.grid_axes), "chunk")
    if plan.packed:
        lines += [
            "sequence = tl.load(chunks_ptr + 2 * chunk)",
            "if sequence < 0:  # an unused place of the table",
            "    return",
            "first_token = tl.load(chunks_ptr + 2 * chunk + 1)",
            "first_row = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)",
            "length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_row).to(tl.int32)",
        ]
    else:
        lines += [
            "sequence = chunk // chunks_each",
            f"first_token = (chunk % chunks_each) * {plan.tokens}",
            "first_row = tl.full((), 0, tl.int64)",
            "length = tokens_given",
        ]
    lines.append(f"system = chunk.to(tl.int64) * ({count}) + {index}")
    lines += tile_lines(plan)
    lines += ROW.lines(plan) + COLUMN.lines(plan)
    return lines + ([] if tokens_of(plan) is ROW else tokens_of(plan).lines(plan))


def taken(printer: Printer) -> tuple[str, ...]:
    """The lines printed so far, which are then forgotten."""
    lines = tuple(printer.lines)
    printer.lines.clear()
    return lines


def _coefficient(row: Row, coef: Node | None) -> Node | None:
    """A row's coefficient: 1 where none is written, 0 (None) where the row reads nothing."""
    return number(1) if coef is None and row.b is not None else coef


def _solve(plan: PreparePlan, decays: Decays, row: Scope) -> tuple[str, str, str]:
    """The system's strictly lower matrix but for the product of rows, the gain, and the scale."""
    form, parts = plan.form, splits(plan)
    seen = [i if r.b is None else r.rows_visible for i, r in enumerate(form.rows)]
    full = row.inert(row.rows([_coefficient(r, r.coef) for r in form.rows]))
    mixing = f"{full.text}[:, None]"
    slots = [r.read_slot for r in form.rows]
    pairs = zip(parts, form.rows, strict=True)
    gain = row.rows([_coefficient(r, p.coef) for p, r in pairs])
    gain_text = gain.text
    if decays.present:
        weight = decays.by_slot(ROW, slots, "weight")
        late = row_choice(ROW, [str(bool(s)) for s in slots])
        weight = decays.written(weight, f"({late})[:, None]", ROW)
        mixing = f"{mixing} * {weight}"
        gain_text = f"{gain.text} * {decays.by_slot(ROW, slots, 'prefix')}"
    mask = visible(plan, ROW, seen)
    column = at(plan, row.printer, COLUMN)
    scale = ""
    if any(p.scale is not None and not is_number(p.scale, 1) for p in parts):
        scale = column.inert(column.rows([p.scale or number(1) for p in parts])).text
    return f"tl.where({mask}, gram * {mixing}, 0.0)", gain_text, scale


def _read_codes(plan: PreparePlan, decays: Decays, printer: Printer) -> list[ReadCode]:
    places = tokens_of(plan)
    scope = at(plan, printer, places)
    found = []
    for read in plan.form.reads:
        vector = scope.operand([read.vector], "k")
        mask = visible_read(plan, places, read.rows_visible)
        weight, prefix = "", ""
        if decays.present:
            weight = decays.weight(places, read.slot)
            late = f"({row_choice(places, [str(bool(read.slot))])})[:, None]"
            weight = decays.written(weight, late, places)
            prefix = decays.prefix(places, read.slot)
        product_ = f"score * {weight}" if weight else "score"
        text = f"tl.where({mask}, {product_}, 0.0)"
        found.append(ReadCode(read.name, taken(printer), vector.text, text, prefix))
    return found


def emit_prepare(plan: PreparePlan) -> PrepareCode:
    """Print the solving kernel's expressions."""
    form = plan.form
    printer = printer_of(plan)
    decays = Decays(plan, printer)
    row = at(plan, printer, ROW)
    a = row.operand([r.a for r in form.rows], "k")
    b = a
    if plan.solve and [r.b for r in form.rows] != [r.a for r in form.rows]:
        b = row.operand([r.b for r in form.rows], "k")
    operands = taken(printer)
    suffix = total = mixing = gain = scale = ""
    if decays.present:
        suffix, total = decays.suffix()
    decay_lines = taken(printer)
    reads = _read_codes(plan, decays, printer)
    if plan.solve:
        mixing, gain, scale = _solve(plan, decays, row)
    coefficients = taken(printer)
    positions, total_at = line_positions(plan)
    return PrepareCode(
        summary=summary_of(plan), index=tuple(prepare_index(plan)), operands=operands, a=a.text,
        b=b.text, decays=decay_lines, suffix=suffix, total=total, coefficients=coefficients,
        mixing=mixing, gain=gain, scale=scale, read_codes=tuple(reads),
        levels=ROWS.bit_length() - 1, rows=ROWS,
        square=ROWS * ROWS, dot_precision=dot_precision(plan), positions=positions,
        total_at=total_at, token_dim=tokens_of(plan).dim,
    )  # fmt: skip


def dot_precision(plan: ChunkPlan) -> str:
    """The precision argument of products of operands in the storage type."""
    return f', input_precision="{plan.precision}"' if plan.storage == "fp32" else ""


def summary_of(plan: ChunkPlan) -> tuple[str, ...]:
    """What the header says of the table."""
    form = plan.form
    return (
        f"{plan.tokens} tokens a chunk, {len(form.rows)} row(s) a token; the rows act along "
        f"{' '.join(form.active)},",
        f"columns along {' '.join(form.passive)} never mix; one system per "
        f"{' '.join(form.system) or 'op'}.",
    )


def prepare_source(plan: PreparePlan) -> Source:
    """The generated file of the solving kernel."""
    return render(plan, emit_prepare(plan))
