"""Triton text of ``prepare``: the triangular system of each chunk, solved by blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from attncc.codegen.affine_checks import read_slots
from attncc.codegen.emit.affine import (
    BLOCKS,
    block_pairs,
    dot_precision,
    each_total,
    line_positions,
    shared_loop,
    splits,
    summary_of,
    system_index,
    system_line,
    taken,
)
from attncc.codegen.emit.decays import BlockDecays, EachDecays, Reading, times, visible
from attncc.codegen.emit.rows import ROW, Scope, at, printer_of
from attncc.codegen.emit.triton import Printer
from attncc.codegen.forms import Row
from attncc.codegen.plan_affine import BLOCK, ROWS, PreparePlan
from attncc.codegen.terms import number
from attncc.dsl.ir import Node


@dataclass(frozen=True, slots=True)
class Lower:
    """A block of L below the diagonal: ``gram * left[:, None] * right[None, :]``."""

    i: int
    j: int
    gram: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class SolveBlock:
    """One block of rows of ``affine_prepare.py.jinja``.

    Attributes:
        n: its number.
        vectors: lines that load ``a`` and ``b``.
        values: lines that the coefficients and decays need.
        gram: its products ``b_i . a_j``.
        mixing: the block of L on the diagonal, over ``gram_nn``.
        gain: factor of the read of the state before the chunk.
        scale: factor of the constants that ``state`` does not have; empty for 1.
        suffix: decay from the write to the chunk's end; empty where nothing decays.
    """

    n: int
    vectors: tuple[str, ...]
    gram: str
    values: tuple[str, ...]
    mixing: str
    gain: str
    scale: str
    suffix: str


@dataclass(frozen=True, slots=True)
class PrepareCode:
    """Printed pieces of ``affine_prepare.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    blocks: tuple[SolveBlock, ...]
    lowers: tuple[Lower, ...]
    again: tuple[str, ...]
    system_loop: str
    depth: int
    system: str
    total: str
    operands: tuple[str, ...]
    rows: int
    square: int
    block_rows: int
    positions: dict[str, int]
    total_at: int


def coefficient(row: Row, coef: Node | None) -> Node | None:
    """A row's coefficient: 1 where none is written, 0 (None) where the row reads nothing."""
    return number(1) if coef is None and row.b is not None else coef


@dataclass(frozen=True, slots=True)
class _System:
    """What a block's rows need of coefficients and decays; empty texts are 1."""

    mixing: str
    full: str
    scale: str
    prefix: str
    suffix: str
    total: str
    values: tuple[str, ...]


@dataclass(slots=True)
class _Blocks:
    """What each block's rows need, printed block by block."""

    plan: PreparePlan
    printer: Printer

    def scopes(self) -> list[Scope]:
        """A scope per block with nothing printed yet."""
        found = [at(self.plan, self.printer, ROW.of(n)) for n in range(BLOCKS)]
        return [replace(scope, kept={}) for scope in found]

    def constants(self) -> list[list[Node | None]]:
        """What the lines of a system hold per row: coefficients, and factors of constants."""
        rows = self.plan.form.rows
        found = [[coefficient(r, r.coef) for r in rows]]
        if "scale" in self.plan.lines:
            found.append([p.scale or number(1) for p in splits(self.plan)])
        return found

    def vectors(self, scopes: list[Scope]) -> list[tuple[tuple[str, ...], str, str]]:
        """Per block, the lines that load the row vectors, and ``a`` and ``b``.

        Systems that share the vectors share what constants sum over them.
        """
        rows, found = self.plan.form.rows, []
        for scope in scopes:
            a = scope.operand([r.a for r in rows], "k")
            b = a
            if [r.b for r in rows] != [r.a for r in rows]:
                b = scope.operand([r.b for r in rows], "k")
            if self.plan.shared_axis:
                for nodes in self.constants():
                    scope.settle(nodes, self.plan.shared_axis)
            found.append((taken(self.printer), a.text, b.text))
        return found

    def coefficients(self, scope: Scope) -> tuple[str, str]:
        """The coefficient, and the factor that it shares with the constant."""
        full, *scales = (scope.inert(scope.rows(nodes)).text for nodes in self.constants())
        return full, scales[0] if scales else ""

    def system(self, n: int, scope: Scope) -> _System:
        """What a block's rows need of coefficients and decays."""
        rows, places = self.plan.form.rows, ROW.of(n)
        inside = prefix = suffix = total = ""
        if self.plan.form.decays and not self.plan.each:
            decays = BlockDecays(self.plan, self.printer, n)
            slots = [r.read_slot for r in rows]
            inside = decays.by_slot(places, slots, "inside")
            prefix = decays.by_slot(places, slots, "prefix")
            suffix, total = decays.suffix(places), decays.total(places)
        full, scale = self.coefficients(scope)
        mixing = times(f"gram_{n}{n}", f"{full}[:, None]", inside)
        seen = [i if r.b is None else r.rows_visible for i, r in enumerate(rows)]
        return _System(
            f"tl.where({visible(self.plan, places, seen)}, {mixing}, 0.0)", full, scale,
            prefix, suffix, total, taken(self.printer),
        )  # fmt: skip


Vectors = tuple[tuple[str, ...], str, str]


@dataclass(frozen=True, slots=True)
class _Grams:
    """Products ``b_i . a_j`` between blocks of rows."""

    plan: PreparePlan
    vectors: list[Vectors]
    each: list[EachDecays]
    readings: list[Reading]

    def product(self, i: int, j: int) -> str:
        """The product of two blocks; with the decays between them where they are inside."""
        b, a = self.vectors[i][2], self.vectors[j][1]
        if self.each and i == j:
            return self.each[i].within(b, self.readings[i], a)
        if self.each:
            b = self.each[i].early(b, self.readings[i])
            a = self.each[j].late(a, range(j + 1, i))
        return f"tl.dot({b}, tl.trans({a}){dot_precision(self.plan)})"

    def operands(self) -> tuple[str, ...]:
        """Lines that leave the row vectors with their decays, and the total."""
        found = []
        for n, decays in enumerate(self.each):
            _, a, b = self.vectors[n]
            found.append(decays.store("late_a", decays.late(a, range(n + 1, BLOCKS))))
            early = decays.early(b, self.readings[n], range(n))
            found.append(decays.store("early_b", early))
        return (*found, *each_total(self.plan)) if found else ()


def _lowers(systems: list[_System], grams: _Grams) -> Iterator[Lower]:
    """The blocks of L below the diagonal."""
    for i, j in block_pairs():
        between = (systems[b].total for b in range(j + 1, i))
        left = times(systems[i].full, systems[i].prefix, *between)
        yield Lower(i, j, grams.product(i, j), left, systems[j].suffix)


def _block(n: int, systems: list[_System], grams: _Grams) -> SolveBlock:
    own, totals = systems[n], [s.total for s in systems]
    suffix = times(own.suffix, *totals[n + 1 :]) if own.suffix else ""
    return SolveBlock(
        n=n, vectors=grams.vectors[n][0], gram=grams.product(n, n), values=own.values,
        mixing=own.mixing, gain=times(own.full, own.prefix, *totals[:n]), scale=own.scale,
        suffix=suffix,
    )  # fmt: skip


def _again(plan: PreparePlan) -> tuple[str, ...]:
    """Lines that find the rows' places anew behind the products of their vectors.

    The compiler cannot tell that they are the same: it would keep what it has of them, and move
    loads that need nothing else, beside vectors that fill the registers, which then spill. Systems
    that share the vectors have their products through the whole loop: it helps none of them.
    """
    if plan.each or plan.shared_axis:
        return ()
    late = replace(ROW, dim="late_m")
    (_, *others), zero = late.of(0).head(plan), "tl.minimum(length, 0)"
    lines = ["tl.debug_barrier()", f"late_m = tl.arange(0, {BLOCK}) + {zero}", *others]
    for block in range(BLOCKS):
        lines += late.of(block).lines(plan)
    return tuple(lines)


def emit_prepare(plan: PreparePlan) -> PrepareCode:
    """Print the solving kernel's expressions."""
    printer = printer_of(plan)
    blocks = _Blocks(plan, printer)
    scopes = blocks.scopes()
    vectors, each, readings = blocks.vectors(scopes), [], []
    for n in range(BLOCKS) if plan.each else ():
        each.append(EachDecays(plan, printer, n))
        readings.append(each[n].reading(ROW.of(n), read_slots(plan.form)))
        lines, a, b = vectors[n]
        vectors[n] = ((*lines, *taken(printer)), a, b)
    grams = _Grams(plan, vectors, each, readings)
    systems = [blocks.system(n, scope) for n, scope in enumerate(scopes)]
    positions, total_at = line_positions(plan)
    loop = shared_loop(plan)
    return PrepareCode(
        summary=summary_of(plan), index=tuple(system_index(plan)),
        blocks=tuple(_block(n, systems, grams) for n in range(BLOCKS)),
        lowers=tuple(_lowers(systems, grams)), again=_again(plan),
        system_loop=loop, depth=4 if loop else 0,
        system=system_line(plan), total=times(*(s.total for s in systems)),
        operands=grams.operands(),
        rows=ROWS, square=ROWS * ROWS, block_rows=BLOCK, positions=positions, total_at=total_at,
    )  # fmt: skip
