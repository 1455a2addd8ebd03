"""Prints ``systems`` where every element of the active axis has a decay of its own.

Vectors, decays and what depends on rows are printed where eight elements of a row lie in each lane,
as they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from attncc.codegen.affine_checks import split_row
from attncc.codegen.emit.affine import line_positions, summary_of, system_line, taken
from attncc.codegen.emit.gluon import IMPORTS, TYPES, gluon_lines, gluon_text
from attncc.codegen.emit.gluon_systems import index_lines, places_in
from attncc.codegen.emit.rows import ROW, Scope, at, printer_of
from attncc.codegen.emit.solve import coefficient
from attncc.codegen.emit.triton import Printer
from attncc.codegen.plan_affine import ROWS
from attncc.codegen.plan_gluon_keys import InversePlan, KeysPlan
from attncc.codegen.terms import number

Texts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """Vectors in shared memory.

    Attributes:
        name: of the tile.
        vector: what it holds, ``[m, k]`` in the storage type.
    """

    name: str
    vector: str


@dataclass(frozen=True, slots=True)
class KeysRead:
    """One read-out of ``gluon/affine_keys.py.jinja``.

    Attributes:
        name: its name.
        tile: the tile with its vectors.
        sees: which rows ``j`` a token ``i`` sees.
    """

    name: str
    tile: str
    sees: str


@dataclass(frozen=True, slots=True)
class KeysCode:
    """Printed pieces of ``gluon/affine_keys.py.jinja``.

    Attributes:
        summary: what the header says of the table.
        imports: the language.
        dtype: element type of the operands.
        given: the parameters' names, in lines.
        index: which chunk of which system a program works on.
        system: where the system's results lie.
        decay: the decay, ``[m, k]`` in fp32, 1 where no token is.
        places: lines that make the indices of rows.
        loaded: lines that load vectors and decays, and make the rows' factors.
        tiles: the vectors, each once.
        a: the tile with the rows' vectors as they are written.
        b: the tile with those as they read the state.
        read_codes: the read-outs.
        coef: the rows' coefficients.
        stored: vectors that are stored for ``state``: place and value.
        total_at: where the chunk's total decay lies.
        height: size of the active axis.
        key: name of the active axis.
        lanes: lanes of a row of vectors.
        vector_rows: rows that the lanes of a warp take.
        rows: rows of a chunk.
        groups: warpgroups.
        at_once: products of a level that are on their way beside the system's; one warpgroup alone
            has no registers for any.
        columns: of a square that one of them has.
        key_warps: warps side by side along the active axis.
        row_warps: along the rows.
        own_rows: rows of a thread.
        half: half of a chunk's rows.
        levels: sizes of halves, from 1.
        square: elements of a square.
        operand: elements of an operand.
    """

    summary: Texts
    imports: Texts
    dtype: str
    given: Texts
    index: Texts
    system: str
    decay: str
    places: Texts
    loaded: Texts
    tiles: tuple[Tile, ...]
    a: str
    b: str
    read_codes: tuple[KeysRead, ...]
    coef: str
    stored: tuple[tuple[int, str], ...]
    total_at: int
    height: int
    key: str
    lanes: int
    vector_rows: int
    rows: int
    groups: int
    at_once: int
    columns: int
    key_warps: int
    row_warps: int
    own_rows: int
    half: int
    levels: int
    square: int
    operand: int


@dataclass(frozen=True, slots=True)
class InverseCode:
    """Printed pieces of ``gluon/affine_solve.py.jinja``.

    Attributes:
        summary: what the header says of the table.
        imports: the language.
        dtype: element type of the operands.
        given: the parameters' names.
        rows: rows of a chunk.
        half: half of them.
        leaves: blocks of ``leaf`` rows, where these are fewer than a half's; else 0.
        lane_leaves: of how many of them a warp's lanes have columns.
        chain: numbers that are added up one after the other.
        square: elements of a square.
    """

    summary: Texts
    imports: Texts
    dtype: str
    given: Texts
    rows: int
    half: int
    leaves: int
    lane_leaves: int
    chain: int
    square: int


def inverse_code(plan: InversePlan) -> InverseCode:
    """Print the kernel that inverts."""
    return InverseCode(
        summary=summary_of(plan), imports=IMPORTS, dtype=TYPES[plan.storage],
        given=(", ".join(p.name for p in plan.parameters) + ",",), rows=ROWS, half=ROWS // 2,
        leaves=ROWS // plan.leaf if plan.leaf < ROWS // 2 else 0, lane_leaves=32 // plan.leaf,
        chain=8, square=ROWS * ROWS,
    )  # fmt: skip


def keys_code(plan: KeysPlan) -> KeysCode:
    """Print the kernel that solves and weighs.

    Raises:
        RefusedError: an expression has no text in Gluon.
    """
    form, printer = plan.form, printer_of(plan)
    decay = _decay(plan, printer)
    tiles, a, b, reads = _tiles(plan, printer)
    coef, stored = _factors(plan, at(plan, printer, ROW)) if plan.solve else ("", [])
    loaded = taken(printer)
    positions, total_at = line_positions(plan)
    height = plan.axis(form.active[0]).block
    return KeysCode(
        summary=summary_of(plan), imports=IMPORTS, dtype=TYPES[plan.storage],
        given=tuple(wrap(", ".join(p.name for p in plan.parameters) + ",", 88)),
        index=gluon_lines(index_lines(plan), ""), system=gluon_text(system_line(plan), ""),
        decay=decay,
        places=places_in(plan, "VECTOR_ROWS"),
        loaded=gluon_lines(loaded, "VECTOR_ROWS"), tiles=tiles, a=a, b=b, read_codes=reads,
        coef=gluon_text(coef, ""),
        stored=tuple((positions[name], gluon_text(text, "")) for name, text in stored),
        total_at=total_at, height=height, key=form.active[0], lanes=height // 8,
        vector_rows=256 // height, rows=ROWS, half=ROWS // 2,
        **_warps(plan, height), levels=ROWS.bit_length() - 1,
        square=ROWS * ROWS, operand=ROWS * height,
    )  # fmt: skip


def _warps(plan: KeysPlan, height: int) -> dict[str, Any]:
    """Who has what: a thread an element of the active axis, with the rows that are left to it."""
    warps, key_warps = plan.num_warps, height // 32
    row_warps, groups = warps // key_warps, warps // 4
    return {
        "groups": groups, "at_once": len(plan.form.reads) if groups > 1 else 0,
        "columns": ROWS // groups, "key_warps": key_warps, "row_warps": row_warps,
        "own_rows": ROWS // row_warps,
    }  # fmt: skip


def _decay(plan: KeysPlan, printer: Printer) -> str:
    """The decay of each row, ``[m, k]``."""
    scope = at(plan, printer, ROW)
    value = scope.value(plan.form.decays[0])
    lifted = scope.printer.lift(value, ("m", "k"))
    printer.lines.append(f"decay = tl.where({ROW.valid}[:, None], {lifted}, 1.0)")
    return "decay"


def _tiles(
    plan: KeysPlan, printer: Printer
) -> tuple[tuple[Tile, ...], str, str, tuple[KeysRead, ...]]:
    """The vectors, each once, and which tile is whose."""
    names: dict[str, str] = {}

    def held(name: str, text: str) -> str:
        return names.setdefault(text, name)

    scope = at(plan, printer, ROW)
    [row] = plan.form.rows
    a = b = held("a", scope.operand([row.a], "k").text)
    if row.b is not None and row.b != row.a:
        b = held("b", scope.operand([row.b], "k").text)
    reads = []
    for read in plan.form.reads:
        tile = held(read.name, scope.operand([read.vector], "k").text)
        sees = "i >= j" if read.rows_visible else "i > j"
        reads.append(KeysRead(read.name, tile, sees))
    return tuple(Tile(n, t) for t, n in names.items()), a, b, tuple(reads)


def _factors(plan: KeysPlan, scope: Scope) -> tuple[str, list[tuple[str, str]]]:
    """The rows' coefficient, and the vectors that ``state`` is left."""
    rows = plan.form.rows
    full = scope.inert(scope.rows([coefficient(r, r.coef) for r in rows])).text
    stored = [("gain", full)] if "gain" in plan.lines else []
    if "scale" in plan.lines:
        parts = [split_row(r, plan.form.passive) for r in rows]
        scale = scope.inert(scope.rows([p.scale or number(1) for p in parts])).text
        stored.append(("scale", scale))
    return full, stored
