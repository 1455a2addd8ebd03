"""Triton text of bodies that carry windows only: every token's rows are read where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime, Node, Select

TOKEN = ("t",)


@dataclass(frozen=True, slots=True)
class WindowCode:
    """Printed pieces of ``window.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    load: tuple[str, ...]
    early: tuple[str, ...]
    before: tuple[str, ...]
    body: tuple[str, ...]
    finish: tuple[str, ...]


@dataclass(slots=True)
class Back:
    """Prints values of tokens that lie ``back`` tokens before a token, or before each of several.

    A stored row of a window is the row that an earlier token pushed, or, before the first token, a
    row of the initial window.

    Attributes:
        plan: the plan.
        base: the printer.
        prefix: of the token's own variables: t, row, inside, started.
        dims: () for one token, or ``TOKEN`` for several of which any may be the first.
    """

    plan: WindowPlan
    base: Printer
    prefix: str = ""
    dims: tuple[str, ...] = ()
    printers: dict[int, Printer] = field(default_factory=dict)

    def at(self, back: int) -> Printer:
        """The printer of a distance."""
        if back not in self.printers:
            t, row, inside = (f"{self.prefix}{x}" for x in ("t", "row", "inside"))
            if back:
                if self.dims:
                    self.base.lines.append(f"{inside}_{back} = {inside} & ({t} >= {back})")
                    inside = f"{inside}_{back}"
                t, row = f"{t} - {back}", f"{row} - {back}"
            scan = self.plan.program.scan or "T"
            place = Place(Var(row, self.dims), Var(inside, self.dims))
            printer = self.base.child(**{scan: place})
            printer.positions = {**printer.positions, scan: Var(t, self.dims)}
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
        if not self.dims:  # of a later tile: all of its tokens have so many before them
            return value
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
    printer._told = ""
    return lines


def emit(plan: WindowPlan) -> WindowCode:
    """Print a plan's expressions."""
    printer = _printer(plan)
    load = _fixed(plan, printer)
    early, before = _early(plan, printer), _before(plan, printer)
    body = _group(plan, printer)
    _keep(plan, printer)
    columns = f", block of {plan.axis(plan.blocked).block} {plan.blocked}" if plan.blocked else ""
    grid = "".join(f", {a}" for a in plan.grid_axes)
    summary = (
        f"One program per {plan.tokens} tokens of a sequence{grid}{columns}; no program waits for",
        "another: the rows before its first token are computed again from memory.",
    )
    finish = _taken(printer)
    return WindowCode(summary, tuple(_index(plan)), load, early, before, body, finish)


def _fixed(plan: WindowPlan, printer: Printer) -> tuple[str, ...]:
    """What no token changes: parameters; every later printer knows them."""
    scan = plan.program.scan
    fixed = {n for n, arg in printer.tensors.items() if scan not in arg.pattern.axes}
    for node in walk(*plan.body.roots):
        given = node.arg if isinstance(node, Select) else node  # one weight of a window's row
        if isinstance(given, Input) and given.name in fixed:
            axes = set(given.axes) - ({node.over} if isinstance(node, Select) else set())
            if axes <= printer.places.keys():
                printer.emit(node)
    return _taken(printer)


def _names(plan: WindowPlan) -> list[tuple[Rows, int, str]]:
    """Every row that goes from token to token: its window, which one, and its variable."""
    return [(w, j, f"{w.name}_row{j}") for w in plan.body.windows for j in range(len(w.old))]


def _shape(plan: WindowPlan, name: str) -> tuple[tuple[str, ...], str]:
    axes = plan.program.tensor(name).pattern.axes
    tile = [t for t in plan.tile if t.axis in axes]
    return tuple(t.axis for t in tile), ", ".join(str(t.block) for t in tile)


def _assigned(plan: WindowPlan, printer: Printer, window: Rows, value: Var) -> str:
    """A row's value in the shape that it has from token to token."""
    dims, shape = _shape(plan, window.name)
    text = printer.lift(value, dims)
    if value.dims == dims:
        return text
    return f"tl.broadcast_to({text}, [{shape}])" if dims else text


def _early(plan: WindowPlan, printer: Printer) -> tuple[str, ...]:
    """Rows before a sequence's first token: those of the initial windows, or zeros."""
    for window, j, name in _names(plan):
        dims, shape = _shape(plan, window.name)
        if window.name in plan.given:
            place = Place(Var(str(j)))
            value = load_initial(printer.child(**{window.axis: place}), plan, window.name)
            printer.lines.append(f"{name} = {_assigned(plan, printer, window, value)}")
        else:
            text = f"tl.zeros([{shape}], tl.float32)" if dims else "tl.full((), 0.0, tl.float32)"
            printer.lines.append(f"{name} = {text}")
    return _taken(printer)


def _before(plan: WindowPlan, printer: Printer) -> tuple[str, ...]:
    """Rows before the first token of a later tile, from what earlier tokens were given."""
    printer.lines += [
        "before_t = start",
        "before_row = first + before_t",
        "before_inside = owned & (before_t < length)",
    ]
    back = Back(plan, _apart(printer), "before_")
    for window, j, name in _names(plan):
        value = back.row(window, len(window.old) - j)
        printer.lines.append(f"{name} = {_assigned(plan, printer, window, value)}")
    return _taken(printer)


def _apart(printer: Printer) -> Printer:
    """A printer whose children know what this one knows now."""
    return replace(printer, known=dict(printer.known))


def _group(plan: WindowPlan, printer: Printer) -> tuple[str, ...]:
    """A group of tokens: what they are given is loaded first, then each is worked on in turn."""
    tokens = [_token(plan, printer, u) for u in range(plan.group)]
    scan = plan.program.scan
    given = {n for n, arg in printer.tensors.items() if scan in arg.pattern.axes}
    for own in tokens:
        for node in walk(*plan.body.roots):
            if isinstance(node, Input) and node.name in given:
                own.emit(node)
    rows = {(w.name, j): Var(name, _shape(plan, w.name)[0]) for w, j, name in _names(plan)}
    for own in tokens:
        for window in plan.body.windows:
            own.known |= {old: rows[window.name, j] for j, old in enumerate(window.old)}
        values: Mapping[str, Var] = {
            o.name: own.emit(n)
            for o, n in zip(plan.program.outputs, plan.body.outputs, strict=True)
        }
        new = {w.name: own.emit(w.new[-1]) for w in plan.body.windows if w.new}
        store_results(own, plan, values)
        for window in plan.body.windows:
            for j in range(len(window.old)):
                last = j + 1 == len(window.old)
                rows[window.name, j] = new[window.name] if last else rows[window.name, j + 1]
    moved = [(name, _assigned(plan, printer, w, rows[w.name, j])) for w, j, name in _names(plan)]
    kept = [(name, text) for name, text in moved if name != text]
    printer.lines += [f"{name}_next = {text}" for name, text in kept]
    printer.lines += [f"{name} = {name}_next" for name, _ in kept]
    return _taken(printer)


def _token(plan: WindowPlan, printer: Printer, u: int) -> Printer:
    """The printer of one token of a group."""
    printer.lines.append(f"inside_{u} = t + {u} < length" if u else "inside_0 = t < length")
    text = f"t + {u}" if u else "t"
    scan = plan.program.scan or "T"
    place = Place(Var(f"first + {text}"), Var(f"inside_{u}"))
    own = printer.child(**{scan: place})
    own.known = dict(printer.known)
    own.positions = {**printer.positions, scan: Var(text)}
    return own


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
        values[window.name] = Back(plan, p, at, TOKEN).row(window, 0)
    p.lines.append("tl.debug_barrier()  # another thread may still read an initial row")
    for window in (w for w in plan.body.windows if w.old):
        place = Place(Var("j", TOKEN), Var(f"j < {len(window.old)}", TOKEN))
        store_final(p.child(**{window.axis: place}), plan, window.name, values[window.name])
