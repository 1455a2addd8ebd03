"""Triton text of ``mix``: what the rows of a chunk add to each read-out of the chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.codegen.emit.affine import (
    BLOCKS,
    block_pairs,
    dot_precision,
    each_total,
    ends,
    line_positions,
    shared_loop,
    summary_of,
    system_index,
    system_line,
    taken,
    totals,
)
from attncc.codegen.emit.decays import BlockDecays, EachDecays, Reading, times, visible_read
from attncc.codegen.emit.rows import ROW, at, printer_of, tokens_of
from attncc.codegen.emit.triton import Printer
from attncc.codegen.forms import Read
from attncc.codegen.plan_affine import BLOCK, ROWS, MixPlan
from attncc.codegen.plan_gluon_mixing import DECAY, SCALE, scale_of


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a read-out's matrix: reads of block ``i``, writes of block ``j``."""

    i: int
    j: int
    score: str
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
        operands: lines that leave its vector with decays inside.
    """

    name: str
    vectors: tuple[tuple[tuple[str, ...], str], ...]
    values: tuple[str, ...]
    parts: tuple[Part, ...]
    prefixes: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MixCode:
    """Printed pieces of ``affine_mix.py.jinja``.

    Attributes:
        end_values: lines that the ends need.
        ends: per block, decay from each row's write to the chunk's end; empty where ``prepare``
            has stored it, or nothing decays.
        others: where further products of decays go, and the products.
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
    others: tuple[tuple[str, str], ...]
    total: str
    operands: tuple[str, ...]
    rows: int
    square: int
    block_rows: int
    blocks: int
    token_dim: str
    positions: dict[str, int]
    total_at: int


def _decays(plan: MixPlan, printer: Printer) -> list[BlockDecays]:
    if not plan.form.decays or plan.each:
        return []
    return [BlockDecays(plan, printer, n) for n in range(BLOCKS)]


Vectors = list[tuple[tuple[str, ...], str]]


@dataclass(frozen=True, slots=True)
class _Weigher:
    """Prints the read-outs' matrices."""

    plan: MixPlan
    printer: Printer
    rows: Vectors
    each: list[EachDecays]

    def score(self, vectors: Vectors, readings: list[Reading], i: int, j: int) -> str:
        """Products of two blocks, with the decays between them where they are inside."""
        q, a = vectors[i][1], self.rows[j][1]
        if self.each and i == j:
            return self.each[i].within(q, readings[i], a)
        if self.each:
            q = self.each[i].early(q, readings[i])
            a = self.each[j].late(a, range(j + 1, i))
        return f"tl.dot({q}, tl.trans({a}){dot_precision(self.plan)})"

    def operands(self, name: str, vectors: Vectors, readings: list[Reading]) -> tuple[str, ...]:
        """Lines that leave a read's vector with its decays."""
        dim, found = tokens_of(self.plan).dim, zip(self.each, vectors, readings, strict=False)
        return tuple(
            d.store(name, d.early(v, r, range(n)), dim) for n, (d, (_, v), r) in enumerate(found)
        )

    def late(self) -> tuple[str, ...]:
        """Lines that leave the row vectors with their decays, where ``prepare`` has not."""
        if self.plan.solve or not self.each:
            return ()
        found = (
            d.store("late_a", d.late(self.rows[n][1], range(n + 1, BLOCKS)))
            for n, d in enumerate(self.each)
        )
        return (*found, *each_total(self.plan))

    def read(self, read: Read) -> MixRead:
        """One read-out."""
        plan, printer = self.plan, self.printer
        tokens, vectors, readings = tokens_of(plan), [], []
        for n in range(BLOCKS):
            vector = at(plan, printer, tokens.of(n)).operand([read.vector], "k").text
            if self.each:
                readings.append(self.each[n].reading(tokens.of(n), [read.slot]))
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
            weighed = times(f"score_{n}{n}", insides[n])
            seen = visible_read(plan, n, read.rows_visible)
            score = self.score(vectors, readings, n, n)
            parts.append(Part(n, n, score, f"tl.where({seen}, {weighed}, 0.0)"))
        for i, j in block_pairs():
            weighed = f"score_{i}{j}"
            if decays:
                left = times(prefixes[i], totals(decays, tokens, range(j + 1, i)))
                weighed += f" * ({left})[:, None] * {decays[j].suffix(tokens.of(j))}[None, :]"
            parts.append(Part(i, j, self.score(vectors, readings, i, j), weighed))
        parts.sort(key=lambda p: (p.i, p.j))
        return MixRead(
            read.name, tuple(vectors), taken(printer), tuple(parts), tuple(outer),
            self.operands(f"early_{read.name}", vectors, readings),
        )  # fmt: skip


def _weigher(plan: MixPlan, printer: Printer) -> _Weigher:
    rows: Vectors = []
    each = []
    for n in range(BLOCKS):
        scope = at(plan, printer, ROW.of(n))
        wanted = (plan.squares and bool(plan.form.reads)) or plan.each
        vector = scope.operand([r.a for r in plan.form.rows], "k").text if wanted else ""
        if plan.each:
            each.append(EachDecays(plan, printer, n))
        rows.append((taken(printer), vector))
    return _Weigher(plan, printer, rows, each)


def _others(plan: MixPlan, decays: list[BlockDecays]) -> Iterator[tuple[str, str]]:
    """What a state pass that makes the matrices itself wants of a chunk: decays, and to each read.

    Each is stored once for each row or token of a block.
    """
    positions, _ = line_positions(plan)
    tokens = tokens_of(plan)
    for n, own in enumerate(decays):
        step = own.step(ROW.of(n), 1)
        yield f"{positions[DECAY] + n * BLOCK} + m", step
        if SCALE in positions:
            scope = at(plan, own.printer, ROW.of(n))
            value = scope.inert(scope.rows([scale_of(plan)]))
            yield f"{positions[SCALE] + n * BLOCK} + m", value.text
        for read in plan.form.reads:
            before = totals(decays, tokens, range(n))
            found = times(own.prefix(tokens.of(n), read.slot), before)
            yield f"{positions[f'prefix_{read.name}'] + n * BLOCK} + {tokens.dim}", found


def emit_mix(plan: MixPlan) -> MixCode:
    """Print the weighing kernel's expressions."""
    printer = printer_of(plan)
    weigher = _weigher(plan, printer)
    suffixes: list[str] = []
    total = ""
    decays = [] if plan.solve else _decays(plan, printer)
    if decays:
        suffixes, total = ends(decays, tokens_of(plan))
    others = () if plan.squares else tuple(_others(plan, decays))
    end_values = taken(printer)
    reads = tuple(weigher.read(read) for read in plan.form.reads if plan.squares)
    positions, total_at = line_positions(plan)
    loop = shared_loop(plan)
    return MixCode(
        summary=summary_of(plan), index=tuple(system_index(plan)), vectors=tuple(weigher.rows),
        read_codes=reads, system_loop=loop, depth=4 if loop else 0, system=system_line(plan),
        end_values=end_values, ends=tuple(suffixes), others=others, total=total,
        operands=weigher.late(),
        rows=ROWS, square=ROWS * ROWS, block_rows=BLOCK,
        blocks=BLOCKS, token_dim=tokens_of(plan).dim, positions=positions, total_at=total_at,
    )  # fmt: skip
