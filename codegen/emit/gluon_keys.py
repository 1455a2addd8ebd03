"""Prints ``systems`` where every element of the active axis has a decay of its own.

Vectors, decays and what depends on rows are printed where eight elements of a row lie in each lane,
as they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from attncc.codegen.affine_checks import read_slots, split_row
from attncc.codegen.emit.affine import line_positions, summary_of, system_line, taken
from attncc.codegen.emit.gluon import IMPORTS, TYPES, gluon_lines, gluon_text
from attncc.codegen.emit.gluon_system_places import head_lines, index_lines
from attncc.codegen.emit.rows import ROW, at, printer_of
from attncc.codegen.emit.solve import coefficient
from attncc.codegen.emit.triton import Printer
from attncc.codegen.forms import Read
from attncc.codegen.plan_affine import BLOCK, ROWS
from attncc.codegen.plan_gluon_keys import InversePlan, KeysPlan
from attncc.codegen.terms import number

Texts = tuple[str, ...]
TURNED = replace(ROW, token="turned_token", inner="turned_inner", valid="turned_valid")
"""Rows whose vectors are turned by a token: those of the next one, the first one's at the end."""


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
        tile: the tile with its vectors; those of a token stand at each of its rows.
        sees: which rows ``j`` the token of row ``i`` sees.
        turned: its vectors are turned by a token.
    """

    name: str
    tile: str
    sees: str
    turned: bool


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
        turned: they are turned by a token; ``any_turned``: they are, or a read-out's are.
        read_codes: the read-outs.
        joined: one product serves rows and read-outs, which stand at a row that reads nothing.
        rows_each: rows of a token, of which read-outs stand at ``read_row``.
        ahead: rows of a chunk less those of a token.
        block_rows: rows of a block.
        tokens_block: tokens of it.
        equal: rows of a token may see each other without a decay between them.
        sees: which rows ``j`` a row ``i`` sees.
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
    turned: bool
    any_turned: bool
    read_codes: tuple[KeysRead, ...]
    joined: bool
    rows_each: int
    read_row: int
    ahead: int
    block_rows: int
    tokens_block: int
    equal: bool
    sees: str
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
    turned = 0 in read_slots(form)
    tiles, a, b, reads = _tiles(plan, printer, turned=turned)
    coef, stored = _factors(plan, printer, turned=turned) if plan.solve else ("", [])
    loaded = taken(printer)
    positions, total_at = line_positions(plan)
    height = plan.axis(form.active[0]).block
    return KeysCode(
        summary=summary_of(plan), imports=IMPORTS, dtype=TYPES[plan.storage],
        given=tuple(wrap(", ".join(p.name for p in plan.parameters) + ",", 88)),
        index=gluon_lines(index_lines(plan), ""), system=gluon_text(system_line(plan), ""),
        decay=decay,
        places=gluon_lines([*head_lines(plan, (ROW,)), *_turned_lines(plan)], "VECTOR_ROWS"),
        loaded=gluon_lines(loaded, "VECTOR_ROWS"), tiles=tiles, a=a, b=b,
        turned=turned, any_turned=_is_turned(plan), read_codes=reads, joined=plan.joined,
        rows_each=len(form.rows), read_row=_read_row(plan),
        ahead=ROWS - len(form.rows), block_rows=BLOCK, tokens_block=plan.block_tokens,
        equal=turned or len(form.rows) > 1,
        sees=_sees(plan, turned=turned) if plan.solve else "", coef=gluon_text(coef, ""),
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
    apart = groups > 1 and not plan.joined
    return {
        "groups": groups, "at_once": len(plan.form.reads) * apart,
        "columns": ROWS // groups, "key_warps": key_warps, "row_warps": row_warps,
        "own_rows": ROWS // row_warps,
    }  # fmt: skip


def _decay(plan: KeysPlan, printer: Printer) -> str:
    """The decay of each row, ``[m, k]``."""
    scope = at(plan, printer, ROW)
    value = scope.value(plan.form.decays[0])
    lifted = scope.printer.lift(value, ("m", "k"))
    valid = ROW.valid if len(plan.form.rows) == 1 else f"({ROW.valid} & ({ROW.update} == 0))"
    printer.lines.append(f"decay = tl.where({valid}[:, None], {lifted}, 1.0)")
    return "decay"


def _read_row(plan: KeysPlan) -> int:
    """The row of a token where a read-out's vector is looked for: of one that reads nothing."""
    rows = plan.form.rows
    free = [i for i, r in enumerate(rows) if r.b is None]
    return free[-1] if plan.joined else len(rows) - 1


def _is_turned(plan: KeysPlan) -> bool:
    return not all([*read_slots(plan.form), *(r.slot for r in plan.form.reads)])


def _turned_lines(plan: KeysPlan) -> list[str]:
    """Lines that make the places of vectors which are turned by a token."""
    lines = [
        f"{TURNED.inner} = ({ROW.inner} + 1) % {plan.tokens}",
        f"{TURNED.token} = first_token + {TURNED.inner}",
        f"{TURNED.valid} = {TURNED.token} < length",
    ]
    return lines if _is_turned(plan) else []


def _sees(plan: KeysPlan, *, turned: bool) -> str:
    """Which rows ``j`` a row ``i`` sees; turned ones the rows of tokens ahead of their own."""
    rows = plan.form.rows
    own = f" & (i % {len(rows)} != {_read_row(plan)})" if plan.joined else ""
    if turned:
        earlier = f"({_token('j', len(rows))} <= {_token('i', len(rows))})"
        return f"{earlier} & (i < {ROWS - len(rows)}){own}"
    seen = [i if r.b is None else r.rows_visible for i, r in enumerate(rows)]
    if len(rows) == 1:
        return "i > j"
    limit = str(seen[-1])
    for n, count in enumerate(seen[:-1]):
        limit = f"gl.where(i % {len(rows)} == {n}, {count}, {limit})"
    return f"({_earlier(len(rows), limit)}){own}"


def _token(row: str, rows: int) -> str:
    return row if rows == 1 else f"{row} // {rows}"


def _earlier(rows: int, limit: str) -> str:
    """Rows of earlier tokens, and the first ``limit`` ones of the same."""
    i, j = _token("i", rows), _token("j", rows)
    return f"({j} < {i}) | (({j} == {i}) & (j % {rows} < {limit}))"


def _read_sees(plan: KeysPlan, read: Read) -> str:
    """Which rows ``j`` a read-out sees whose vector stands at row ``i``."""
    rows = len(plan.form.rows)
    if not read.slot:
        return f"({_token('j', rows)} <= {_token('i', rows)}) & (i < {ROWS - rows})"
    if rows == 1:
        return "i >= j" if read.rows_visible else "i > j"
    return _earlier(rows, str(read.rows_visible))


def _tiles(
    plan: KeysPlan, printer: Printer, *, turned: bool
) -> tuple[tuple[Tile, ...], str, str, tuple[KeysRead, ...]]:
    """The vectors, each once, and which tile is whose."""
    names: dict[str, str] = {}

    def held(name: str, text: str) -> str:
        return names.setdefault(text, name)

    own = {False: at(plan, printer, ROW), True: at(plan, printer, TURNED)}
    rows, joined = plan.form.rows, plan.joined
    a = b = held("a", own[False].operand([r.a for r in rows], "k").text)
    vectors = [own[not r.slot].operand([r.vector], "k").text for r in plan.form.reads]
    if plan.solve and (turned or [r.b for r in rows] != [r.a for r in rows]):
        text = own[turned].operand([r.b for r in rows], "k").text
        if joined:
            here = f"({ROW.update} == {_read_row(plan)})[:, None]"
            printer.lines.append(f"joined = tl.where({here}, {vectors[0]}, {text})")
            text = "joined"
        b = held("b", text)
    reads = []
    for read, vector in zip(plan.form.reads, vectors, strict=True):
        tile = b if joined else held(read.name, vector)
        reads.append(KeysRead(read.name, tile, _read_sees(plan, read), not read.slot))
    return tuple(Tile(n, t) for t, n in names.items()), a, b, tuple(reads)


def _factors(
    plan: KeysPlan, printer: Printer, *, turned: bool
) -> tuple[str, list[tuple[str, str]]]:
    """The rows' coefficient where they read, and the vectors that ``state`` is left."""
    rows, scope = plan.form.rows, at(plan, printer, ROW)
    coefs = [coefficient(r, r.coef) for r in rows]
    full = scope.inert(scope.rows(coefs)).text
    stored = [("gain", full)] if "gain" in plan.lines else []
    if "scale" in plan.lines:
        parts = [split_row(r, plan.form.passive) for r in rows]
        scale = scope.inert(scope.rows([p.scale or number(1) for p in parts])).text
        stored.append(("scale", scale))
    if turned:
        scope = at(plan, printer, TURNED)
        full = scope.inert(scope.rows(coefs)).text
    return full, stored
