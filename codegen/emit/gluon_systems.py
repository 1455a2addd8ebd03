"""Prints ``systems``, which solves and weighs a chunk's systems, a lane to a column.

What differs from the Triton kernels is where things lie. Vectors of 64 rows lie along the lanes
(``LINE``); squares have their rows in the registers of a lane and a column in each lane
(``SQUARE``), where cumulative products and sums along rows need no other lane. Where tokens have
several rows that follow each other, what is read has a token a row (``READS``), of which there are
fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from attncc.codegen.affine_checks import split_row
from attncc.codegen.emit.affine import (
    line_positions,
    shared_loop,
    summary_of,
    system_line,
    taken,
)
from attncc.codegen.emit.decays import BlockDecays, times, visible, visible_read
from attncc.codegen.emit.gluon import IMPORTS, TYPES, gluon_lines, gluon_text
from attncc.codegen.emit.gluon_squares import (
    OF_READS,
    OF_ROWS,
    Spread,
    of_chunks,
    square_lines,
    square_text,
)
from attncc.codegen.emit.gluon_system_places import (
    half_places,
    index_lines,
    line_places,
    places_in,
    square_places,
)
from attncc.codegen.emit.rows import ROW, Places, Scope, at, printer_of, tokens_of
from attncc.codegen.emit.solve import coefficient
from attncc.codegen.emit.triton import Printer
from attncc.codegen.plan_affine import ROWS
from attncc.codegen.plan_gluon_systems import BY_HALVES, INVERSE, SystemsPlan, square_size
from attncc.codegen.terms import number

Texts = tuple[str, ...]
BELOW = "m[:, None] > m[None, :]"


@dataclass(frozen=True, slots=True)
class SystemsRead:
    """One read-out of ``gluon/affine_systems.py.jinja``.

    Attributes:
        name: its name.
        vector: its vector, ``[places, k]``.
        values: lines that its weights need.
        seen: its products, ``scores_<name>``, less those of rows that it does not see; "" where
            they are left out when they are weighed.
        weighed: what each row adds, over ``score_<name>``.
        square: elements of what each row adds, in memory.
        prefix: decays from the chunk's start to the read; "" where nothing decays.
        prefix_at: where those lie in the buffer.
    """

    name: str
    vector: str
    values: Texts
    seen: str
    weighed: str
    square: int
    prefix: str
    prefix_at: int


@dataclass(frozen=True, slots=True)
class SystemsCode:
    """Printed pieces of ``gluon/affine_systems.py.jinja``.

    Attributes:
        summary: what the header says of the table.
        imports: the language.
        dtype: element type of the operands.
        given: the parameters' names, in lines.
        index: which chunk of which systems a program works on.
        places: lines that make the indices of rows and tokens, for vectors.
        line_places: the same along the lanes.
        square_places: the same down and across a square.
        vectors: lines that load the row vectors.
        read_vectors: lines that load those of the read-outs.
        read_halves: lines that make the places of either half of what is read.
        a: the rows' vectors as they are written.
        b: those as they read the state.
        read_codes: the read-outs.
        system_loop: the loop over the systems that share their vectors; "" for one.
        depth: indentation below it.
        system: where the system's results lie.
        values: lines that coefficients and decays need.
        mixing: the matrix of the system, over ``gram``.
        stored: vectors that are stored along the lanes: place and value.
        suffix: decays to the chunk's end, a column each; "" where nothing decays.
        suffix_at: where those lie.
        total: the chunk's total decay; "" for none.
        total_at: where it lies.
        height: size of the active axis.
        key: name of the active axis.
        lanes: lanes of a row of vectors.
        vector_rows: rows that the lanes of a warp take.
        rows: rows of a chunk.
        half: half of them.
        leaves: blocks of ``leaf`` rows, where these are fewer than a half's; else 0.
        lane_leaves: of how many of them a warp's lanes have columns.
        chain: numbers that are added up one after the other.
        square: elements of an inverse, in memory.
        row: those from one row of a square by halves to the next.
        token_dim: the dimension of tokens.
        apart: tokens have places of their own.
        reads: places of a chunk's tokens.
        warps: warps of a program where each works on a chunk; else 1.
    """

    summary: Texts
    imports: Texts
    dtype: str
    given: Texts
    index: Texts
    places: Texts
    line_places: Texts
    square_places: Texts
    vectors: Texts
    read_vectors: Texts
    read_halves: tuple[Texts, Texts]
    a: str
    b: str
    read_codes: tuple[SystemsRead, ...]
    system_loop: str
    depth: int
    system: str
    values: Texts
    mixing: str
    stored: tuple[tuple[int, str], ...]
    suffix: str
    suffix_at: int
    total: str
    total_at: int
    height: int
    key: str
    lanes: int
    vector_rows: int
    rows: int
    half: int
    leaves: int
    lane_leaves: int
    chain: int
    square: int
    row: int
    token_dim: str
    apart: bool
    reads: int
    warps: int


class ChunkDecays(BlockDecays):
    """Products of decays over intervals of a whole chunk."""

    def __init__(self, plan: SystemsPlan, printer: Printer) -> None:
        super().__init__(plan, printer, 0)
        self.rows = ROW
        self.last = ROWS - 1


class BlockwiseDecays(ChunkDecays):
    """The same where squares lie as tensor cores leave them.

    Rows are written and read behind their token's decay, so that an interval is what lies between
    two places. The first axis of a line counts chunks.
    """

    def __init__(self, plan: SystemsPlan, printer: Printer) -> None:
        super().__init__(plan, printer)
        self.axis = 1

    def inside(self, places: Places, slot: int) -> str:
        """Products from each column's write to each place's read, ``[places, m]``."""
        if places is not self.rows or ("inside", places.dim, slot) in self._found:
            return super().inside(places, slot)
        text = f"over_intervals({self.step(places, slot)})"
        self.printer.lines.append(f"inside_{places.tag}, suffix_{places.tag} = {text}")
        self._found["suffix", places.dim, slot] = f"suffix_{places.tag}"
        return self._found.setdefault(("inside", places.dim, slot), f"inside_{places.tag}")

    def total(self, places: Places) -> str:
        """The products up to each row, of which the last one's is the chunk's."""
        return self.prefix(places, 1)

    def suffix(self, places: Places) -> str:
        """Products from each column's write to the chunk's end, across a square."""
        self.inside(places, 1)
        return super().suffix(places)


def systems_code(plan: SystemsPlan) -> SystemsCode:
    """Print the kernel that solves and weighs.

    Raises:
        RefusedError: an expression has no text in Gluon.
    """
    form, printer = plan.form, printer_of(plan)
    a, b = _row_vectors(plan, printer)
    own = taken(printer)
    vectors = _read_vectors(plan, printer)
    read_own = taken(printer)
    decays = None
    if form.decays:
        decays = (BlockwiseDecays if plan.blockwise else ChunkDecays)(plan, printer)
    scope = at(plan, printer, ROW)
    scope.kept = {}
    full = scope.inert(scope.rows([coefficient(r, r.coef) for r in form.rows])).text
    # ahead of the decays: what they and the coefficient load alike is loaded once
    scale = _scale(plan, scope) if "scale" in plan.lines else ""
    inside = prefix = ""
    if decays is not None:
        slots = [r.read_slot for r in form.rows]
        inside, prefix = (decays.by_slot(ROW, slots, of) for of in ("inside", "prefix"))
    seen = [i if r.b is None else r.rows_visible for i, r in enumerate(form.rows)]
    mixing = times("gram", f"{full}[:, None]", inside)
    sees = visible(plan, ROW, seen)
    if sees != BELOW:  # what is not below the diagonal is not looked at anyway
        mixing = f"tl.where({sees}, {mixing}, 0.0)"
    positions, total_at = line_positions(plan)
    stored = [("gain", times(full, prefix))] if "gain" in plan.lines else []
    stored += [("scale", scale)] if scale else []
    suffix = decays.suffix(ROW) if decays is not None else ""
    total = decays.total(ROW) if decays is not None else ""
    values = taken(printer)
    reads = tuple(
        _read(plan, printer, decays, i, vector, positions) for i, vector in enumerate(vectors)
    )
    loop, height = shared_loop(plan), plan.axis(form.active[0]).block
    return SystemsCode(
        summary=summary_of(plan), imports=IMPORTS, dtype=TYPES[plan.storage],
        given=tuple(wrap(", ".join(p.name for p in plan.parameters) + ",", 88)),
        index=gluon_lines(index_lines(plan), ""), places=places_in(plan, "VECTOR_ROWS"),
        line_places=line_places(plan), square_places=square_places(plan),
        vectors=gluon_lines(own, "VECTOR_ROWS"),
        read_vectors=gluon_lines(read_own, "VECTOR_ROWS"),
        read_halves=(half_places(plan, 0), half_places(plan, 1)), a=a, b=b, read_codes=reads,
        system_loop=gluon_text(loop, ""), depth=4 if loop else 0,
        system=gluon_text(system_line(plan), ""),
        values=_lines(plan, values), mixing=_text(plan, mixing),
        stored=tuple((positions[name], gluon_text(text, "")) for name, text in stored),
        suffix=suffix, suffix_at=positions.get("suffix", 0), total=total, total_at=total_at,
        height=height, key=form.active[0], lanes=height // 8, vector_rows=256 // height,
        rows=ROWS, half=ROWS // 2, chain=8,
        leaves=ROWS // plan.leaf if plan.leaf < ROWS // 2 else 0, lane_leaves=32 // plan.leaf,
        square=square_size(plan, INVERSE, halves=plan.blockwise),
        row=BY_HALVES, token_dim=tokens_of(plan).dim, apart=plan.gathered,
        reads=tokens_of(plan).count, warps=plan.chunks,
    )  # fmt: skip


def _text(plan: SystemsPlan, text: str, kind: Spread = OF_ROWS) -> str:
    """Text about a square, or about one of each warp."""
    text = square_text(text, kind)
    return of_chunks(text) if plan.blockwise else text


def _lines(plan: SystemsPlan, lines: Texts, kind: Spread = OF_ROWS) -> Texts:
    """Lines of which some are about squares."""
    found = square_lines(lines, kind)
    return tuple(map(of_chunks, found)) if plan.blockwise else found


def _row_vectors(plan: SystemsPlan, printer: Printer) -> tuple[str, str]:
    """The rows' vectors as they are written and as they read the state, in the storage type."""
    rows, scope = plan.form.rows, at(plan, printer, ROW)
    a = b = scope.operand([r.a for r in rows], "k").text
    if [r.b for r in rows] != [r.a for r in rows]:
        b = scope.operand([r.b for r in rows], "k").text
    return a, b


def _read_vectors(plan: SystemsPlan, printer: Printer) -> list[str]:
    """Those of the read-outs."""
    tokens = tokens_of(plan)
    return [at(plan, printer, tokens).operand([r.vector], "k").text for r in plan.form.reads]


def _scale(plan: SystemsPlan, scope: Scope) -> str:
    parts = [split_row(r, plan.form.passive) for r in plan.form.rows]
    return scope.inert(scope.rows([p.scale or number(1) for p in parts])).text


def _read(
    plan: SystemsPlan, printer: Printer, decays: ChunkDecays | None, i: int, vector: str,
    positions: dict[str, int],
) -> SystemsRead:  # fmt: skip
    read, tokens = plan.form.reads[i], tokens_of(plan)
    inside = prefix = ""
    if decays is not None:
        prefix, inside = decays.prefix(tokens, read.slot), decays.inside(tokens, read.slot)
    # the choice comes before the decays, which are 1 for what is not seen: one selection each
    sees = visible_read(plan, None, read.rows_visible)
    seen = f"tl.where({sees}, score_{read.name}, 0.0)"
    ahead = plan.blockwise and not plan.gathered  # of the loop over systems
    text = times(f"score_{read.name}" if ahead else seen, inside)
    at_line = positions.get(f"prefix_{read.name}", 0)
    kind = OF_READS if plan.gathered else OF_ROWS
    values = _lines(plan, taken(printer), kind)
    seen = _text(plan, seen.replace("score_", "scores_"), kind) if ahead else ""
    size, text = square_size(plan, read.name, halves=plan.blockwise), _text(plan, text, kind)
    return SystemsRead(read.name, vector, values, seen, text, size, prefix, at_line)
