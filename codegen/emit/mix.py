"""Triton text of ``mix``: what the rows of a chunk add to each read-out of the chunk."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.affine import (
    BLOCKS,
    block_pairs,
    dot_precision,
    ends,
    line_positions,
    shared_loop,
    summary_of,
    system_index,
    system_line,
    taken,
    totals,
)
from attncc.codegen.emit.decays import BlockDecays, times, visible_read
from attncc.codegen.emit.rows import ROW, at, printer_of, tokens_of
from attncc.codegen.emit.triton import Printer
from attncc.codegen.forms import Read
from attncc.codegen.plan_affine import BLOCK, ROWS, MixPlan
from attncc.codegen.render import Source, render


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a read-out's matrix: reads of block ``i``, writes of block ``j``."""

    i: int
    j: int
    weighed: str


@dataclass(frozen=True, slots=True)
class MixRead:
    """One read-out of ``affine_mix.py.jinja``.

    Attributes:
        name: its name.
        vectors: per block of tokens, the lines that load its vector, and the vector.
        values: lines inside the loop over systems.
        parts: the blocks of its matrix that are not 0, over ``score_ij``.
        prefixes: per block, decay from the chunk's start to the read; empty where nothing decays.
    """

    name: str
    vectors: tuple[tuple[tuple[str, ...], str], ...]
    values: tuple[str, ...]
    parts: tuple[Part, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MixCode:
    """Printed pieces of ``affine_mix.py.jinja``.

    Attributes:
        end_values: lines that the ends need.
        ends: per block, decay from each row's write to the chunk's end; empty where ``prepare``
            has stored it, or nothing decays.
    """

    summary: tuple[str, ...]
    index: tuple[str, ...]
    vectors: tuple[tuple[tuple[str, ...], str], ...]
    read_codes: tuple[MixRead, ...]
    system_loop: str
    depth: int
    system: str
    end_values: tuple[str, ...]
    ends: tuple[str, ...]
    total: str
    dot_precision: str
    rows: int
    square: int
    block_rows: int
    blocks: int
    token_dim: str
    positions: dict[str, int]
    total_at: int


def _decays(plan: MixPlan, printer: Printer) -> list[BlockDecays]:
    if not plan.form.decays:
        return []
    return [BlockDecays(plan, printer, n) for n in range(BLOCKS)]


def _read(plan: MixPlan, printer: Printer, read: Read) -> MixRead:
    tokens, vectors = tokens_of(plan), []
    for n in range(BLOCKS):
        vector = at(plan, printer, tokens.of(n)).operand([read.vector], "k").text
        vectors.append((taken(printer), vector))
    decays = _decays(plan, printer)
    prefixes, insides, outer = [""] * BLOCKS, [""] * BLOCKS, [""] * BLOCKS
    if decays:
        prefixes = [d.prefix(tokens.of(n), read.slot) for n, d in enumerate(decays)]
        insides = [d.inside(tokens.of(n), read.slot) for n, d in enumerate(decays)]
        before = (totals(decays, tokens, range(n)) for n in range(BLOCKS))
        outer = [times(p, b) for p, b in zip(prefixes, before, strict=True)]
    parts = []
    for n in range(BLOCKS):
        score = times(f"score_{n}{n}", insides[n])
        seen = visible_read(plan, n, read.rows_visible)
        parts.append(Part(n, n, f"tl.where({seen}, {score}, 0.0)"))
    for i, j in block_pairs():
        weighed = f"score_{i}{j}"
        if decays:
            left = times(prefixes[i], totals(decays, tokens, range(j + 1, i)))
            weighed += f" * ({left})[:, None] * {decays[j].suffix(tokens.of(j))}[None, :]"
        parts.append(Part(i, j, weighed))
    parts.sort(key=lambda p: (p.i, p.j))
    return MixRead(read.name, tuple(vectors), taken(printer), tuple(parts), tuple(outer))


def emit_mix(plan: MixPlan) -> MixCode:
    """Print the weighing kernel's expressions."""
    printer = printer_of(plan)
    vectors = []
    for n in range(BLOCKS):
        scope = at(plan, printer, ROW.of(n))
        vector = scope.operand([r.a for r in plan.form.rows], "k").text if plan.form.reads else ""
        vectors.append((taken(printer), vector))
    suffixes: list[str] = []
    total = ""
    decays = [] if plan.solve else _decays(plan, printer)
    if decays:
        suffixes, total = ends(decays, tokens_of(plan))
    end_values = taken(printer)
    reads = tuple(_read(plan, printer, read) for read in plan.form.reads)
    positions, total_at = line_positions(plan)
    loop = shared_loop(plan)
    return MixCode(
        summary=summary_of(plan), index=tuple(system_index(plan)), vectors=tuple(vectors),
        read_codes=reads, system_loop=loop, depth=4 if loop else 0, system=system_line(plan),
        end_values=end_values, ends=tuple(suffixes), total=total,
        dot_precision=dot_precision(plan), rows=ROWS, square=ROWS * ROWS, block_rows=BLOCK,
        blocks=BLOCKS, token_dim=tokens_of(plan).dim, positions=positions, total_at=total_at,
    )  # fmt: skip


def mix_source(plan: MixPlan) -> Source:
    """The generated file of the weighing kernel."""
    return render(plan, emit_mix(plan))
