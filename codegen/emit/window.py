"""Triton text of bodies that carry windows only: every token's rows are read where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attncc.codegen.emit.scan import (
    grid_parts,
    grid_places,
    load_initial,
    scalars_of,
    sizes_of,
    slot_lines,
    split_program_id,
    store_final,
    store_results,
    tensors_of,
    tile_lines,
    tile_place,
)
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.passes.expand_windows import Rows
from attncc.codegen.plan_window import WindowPlan
from attncc.codegen.render import Source, render
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime, Node, Select

TOKEN = ("t",)


@dataclass(frozen=True, slots=True)
class WindowCode:
    """Printed pieces of ``window.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    body: tuple[str, ...]
    finish: tuple[str, ...]


@dataclass(slots=True)
class Back:
    """Prints values of tokens that lie ``back`` tokens before the tile's own.

    A stored row of a window is the row that an earlier token pushed, or, before the first token, a
    row of the initial window.
    """

    plan: WindowPlan
    base: Printer
    prefix: str = ""  # of the tile's own variables: t, row, inside, started
    printers: dict[int, Printer] = field(default_factory=dict)

    def at(self, back: int) -> Printer:
        """The printer of a distance."""
        if back not in self.printers:
            t, row, inside = (f"{self.prefix}{x}" for x in ("t", "row", "inside"))
            if back:
                self.base.lines.append(f"{inside}_{back} = {inside} & ({t} >= {back})")
                t, row, inside = f"{t} - {back}", f"{row} - {back}", f"{inside}_{back}"
            scan = self.plan.program.scan or "T"
            place = Place(Var(row, TOKEN), Var(inside, TOKEN))
            printer = self.base.child(**{scan: place})
            printer.positions = {**printer.positions, scan: Var(t, TOKEN)}
            self.printers[back] = printer
        return self.printers[back]

    def emit(self, node: Node, back: int = 0) -> Var:
        """A value of the token so far back."""
        printer = self.at(back)
        for below in walk(node):
            stored = self._stored(below)
            if stored is not None and below not in printer.known:
                window, j = stored
                distance = len(window.old) - j + back
                printer.known[below] = self.row(window, distance)
        return printer.emit(node)

    def _stored(self, node: Node) -> tuple[Rows, int] | None:
        match node:
            case Select(arg=Input(name=name, lifetime=Lifetime.WINDOW), at=at):
                return next(w for w in self.plan.body.windows if w.name == name), at
            case _:
                return None

    def row(self, window: Rows, back: int) -> Var:
        """The row that the token ``back`` before pushed; 0 where nothing was."""
        value = self.emit(dict(self.plan.rows)[window.name], back)
        p = self.base
        initial = Var("0.0")
        t = f"{self.prefix}t"
        if window.name in self.plan.given:
            kept = len(window.old)
            at = f"{t} + {kept - back}" if kept >= back else f"{t} - {back - kept}"
            early = p.name(f"{self.prefix}started & ({t} < {back}) & ({at} >= 0)", TOKEN, "early")
            place = Place(Var(at, TOKEN), early)
            initial = load_initial(p.child(**{window.axis: place}), self.plan, window.name)
        dims = p.order(TOKEN, value.dims, initial.dims)
        after = p.lift(Var(f"{t} >= {back}", TOKEN), dims)
        text = f"tl.where({after}, {p.lift(value, dims)}, {p.lift(initial, dims)})"
        return p.name(text, dims, "pushed")


def _printer(plan: WindowPlan) -> Printer:
    dims = (*TOKEN, *(t.axis for t in plan.tile))
    places = {t.axis: tile_place(t, t.axis) for t in plan.tile} | grid_places(plan)
    positions = {a: p.index for a, p in places.items()}
    return Printer(
        dims, tensors_of(plan), places, positions, sizes_of(plan), scalars=scalars_of(plan)
    )


def _index(plan: WindowPlan) -> list[str]:
    parts = grid_parts(plan, plan.grid_axes)
    if plan.blocked and (blocks := plan.axis(plan.blocked).blocks) > 1:
        parts.insert(0, ("block", str(blocks)))
    lines = [*split_program_id(parts, "tile"), *tile_lines(plan)]
    if plan.packed:
        lines += [
            "found = tl.load(tiles_ptr + 2 * tile)  # below 0: an unused place of the table",
            "owned = found >= 0",
            "sequence = tl.maximum(found, 0)",
            "start = tl.load(tiles_ptr + 2 * tile + 1)",
            "first = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)",
            "length = (tl.load(cu_seqlens_ptr + sequence + 1) - first).to(tl.int32)",
        ]
    else:
        lines += [
            "owned = tile >= 0",
            "sequence = tile // tiles_each",
            f"start = (tile % tiles_each) * {plan.tokens}",
            "first = tl.full((), 0, tl.int64)",
            "length = tokens_given",
        ]
    return [*lines, *slot_lines(plan)]


def _taken(printer: Printer) -> tuple[str, ...]:
    lines = tuple(printer.lines)
    printer.lines.clear()
    return lines


def emit(plan: WindowPlan) -> WindowCode:
    """Print a plan's expressions."""
    printer = _printer(plan)
    back = Back(plan, printer)
    values: Mapping[str, Var] = {
        o.name: back.emit(n) for o, n in zip(plan.program.outputs, plan.body.outputs, strict=True)
    }
    store_results(back.at(0), plan, values)
    body = _taken(printer)
    _keep(plan, printer)
    columns = f", block of {plan.axis(plan.blocked).block} {plan.blocked}" if plan.blocked else ""
    grid = "".join(f", {a}" for a in plan.grid_axes)
    summary = (
        f"One program per {plan.tokens} tokens of a sequence{grid}{columns}; no program waits for",
        "another: rows that earlier tokens pushed are computed again from memory.",
    )
    return WindowCode(summary, tuple(_index(plan)), body, _taken(printer))


def _keep(plan: WindowPlan, p: Printer) -> None:
    """Store the last rows of each window: those that the last tokens pushed, or initial ones."""
    values = {}
    for window in (w for w in plan.body.windows if w.old):
        last, at = len(window.old), f"{window.name}_"
        p.lines += [
            f"# the last {last} rows of {window.name}",
            f"{at}t = length - {last} + j",
            f"{at}row = first + {at}t",
            f"{at}started = j < {last}",
            f"{at}inside = {at}started & ({at}t >= 0)",
        ]
        values[window.name] = Back(plan, p, at).row(window, 0)
    p.lines.append("tl.debug_barrier()  # another thread may still read an initial row")
    for window in (w for w in plan.body.windows if w.old):
        place = Place(Var("j", TOKEN), Var(f"j < {len(window.old)}", TOKEN))
        store_final(p.child(**{window.axis: place}), plan, window.name, values[window.name])


def source(plan: WindowPlan) -> Source:
    """The generated file of a plan."""
    return render(plan, emit(plan))
