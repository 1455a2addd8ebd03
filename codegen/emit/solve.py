"""Triton text of ``prepare``: the triangular system of each chunk, solved by blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.codegen.emit.affine import (
    BLOCKS,
    block_pairs,
    dot_precision,
    line_positions,
    shared_loop,
    splits,
    summary_of,
    system_index,
    system_line,
    taken,
)
from attncc.codegen.emit.decays import BlockDecays, times, visible
from attncc.codegen.emit.rows import ROW, Scope, at, printer_of
from attncc.codegen.emit.triton import Printer
from attncc.codegen.forms import Row
from attncc.codegen.plan_affine import BLOCK, ROWS, PreparePlan
from attncc.codegen.render import Source, render
from attncc.codegen.terms import is_number, number
from attncc.dsl.ir import Node


@dataclass(frozen=True, slots=True)
class Lower:
    """A block of L below the diagonal: ``gram * left[:, None] * right[None, :]``."""

    i: int
    j: int
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class SolveBlock:
    """One block of rows of ``affine_prepare.py.jinja``.

    Attributes:
        n: its number.
        vectors: lines that load ``a`` and ``b``.
        values: lines that the coefficients and decays need.
        mixing: the block of L on the diagonal, over ``gram_nn``.
        gain: factor of the read of the state before the chunk.
        scale: factor of the columns; empty for 1.
        suffix: decay from the write to the chunk's end; empty where nothing decays.
    """

    n: int
    vectors: tuple[str, ...]
    a: str
    b: str
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
    system_loop: str
    depth: int
    system: str
    total: str
    dot_precision: str
    rows: int
    square: int
    block_rows: int
    positions: dict[str, int]
    total_at: int


def _coefficient(row: Row, coef: Node | None) -> Node | None:
    """A row's coefficient: 1 where none is written, 0 (None) where the row reads nothing."""
    return number(1) if coef is None and row.b is not None else coef


@dataclass(frozen=True, slots=True)
class _System:
    """What a block's rows need of coefficients and decays; empty texts are 1."""

    mixing: str
    full: str
    gain: str
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
        return [at(self.plan, self.printer, ROW.of(n)) for n in range(BLOCKS)]

    def vectors(self) -> list[tuple[tuple[str, ...], str, str]]:
        """Per block, the lines that load the row vectors, and ``a`` and ``b``."""
        rows, found = self.plan.form.rows, []
        for scope in self.scopes():
            a = scope.operand([r.a for r in rows], "k")
            b = a
            if [r.b for r in rows] != [r.a for r in rows]:
                b = scope.operand([r.b for r in rows], "k")
            found.append((taken(self.printer), a.text, b.text))
        return found

    def coefficients(self, scope: Scope) -> tuple[str, str, str]:
        """The whole coefficient, the one that is left after the split, and the scale."""
        rows, parts = self.plan.form.rows, splits(self.plan)
        full = scope.inert(scope.rows([_coefficient(r, r.coef) for r in rows]))
        pairs = zip(parts, rows, strict=True)
        gain = scope.rows([_coefficient(r, p.coef) for p, r in pairs])
        scale = ""
        if any(p.scale is not None and not is_number(p.scale, 1) for p in parts):
            scale = scope.inert(scope.rows([p.scale or number(1) for p in parts])).text
        return full.text, gain.text, scale

    def system(self, n: int, scope: Scope) -> _System:
        """What a block's rows need of coefficients and decays."""
        rows, places = self.plan.form.rows, ROW.of(n)
        inside = prefix = suffix = total = ""
        if self.plan.form.decays:
            decays = BlockDecays(self.plan, self.printer, n)
            slots = [r.read_slot for r in rows]
            inside = decays.by_slot(places, slots, "inside")
            prefix = decays.by_slot(places, slots, "prefix")
            suffix, total = decays.suffix(places), decays.total(places)
        full, gain, scale = self.coefficients(scope)
        mixing = times(f"gram_{n}{n}", f"{full}[:, None]", inside)
        seen = [i if r.b is None else r.rows_visible for i, r in enumerate(rows)]
        return _System(
            f"tl.where({visible(self.plan, places, seen)}, {mixing}, 0.0)", full, gain, scale,
            prefix, suffix, total, taken(self.printer),
        )  # fmt: skip


def _lowers(systems: list[_System]) -> Iterator[Lower]:
    """The blocks of L below the diagonal."""
    for i, j in block_pairs():
        between = (systems[b].total for b in range(j + 1, i))
        left = times(systems[i].full, systems[i].prefix, *between)
        yield Lower(i, j, left, systems[j].suffix)


def _block(vectors: tuple[tuple[str, ...], str, str], n: int, systems: list[_System]) -> SolveBlock:
    lines, a, b = vectors
    own, totals = systems[n], [s.total for s in systems]
    suffix = times(own.suffix, *totals[n + 1 :]) if own.suffix else ""
    return SolveBlock(
        n=n, vectors=lines, a=a, b=b, values=own.values, mixing=own.mixing,
        gain=times(own.gain, own.prefix, *totals[:n]), scale=own.scale, suffix=suffix,
    )  # fmt: skip


def emit_prepare(plan: PreparePlan) -> PrepareCode:
    """Print the solving kernel's expressions."""
    printer = printer_of(plan)
    blocks = _Blocks(plan, printer)
    vectors = blocks.vectors()
    systems = [blocks.system(n, scope) for n, scope in enumerate(blocks.scopes())]
    positions, total_at = line_positions(plan)
    loop = shared_loop(plan)
    return PrepareCode(
        summary=summary_of(plan), index=tuple(system_index(plan)),
        blocks=tuple(_block(v, n, systems) for n, v in enumerate(vectors)),
        lowers=tuple(_lowers(systems)), system_loop=loop, depth=4 if loop else 0,
        system=system_line(plan), total=times(*(s.total for s in systems)),
        dot_precision=dot_precision(plan),
        rows=ROWS, square=ROWS * ROWS, block_rows=BLOCK, positions=positions, total_at=total_at,
    )  # fmt: skip


def prepare_source(plan: PreparePlan) -> Source:
    """The generated file of the solving kernel."""
    return render(plan, emit_prepare(plan))
