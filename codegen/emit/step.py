"""Triton text of the sequential kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    store_token,
    tensors_of,
    tile_lines,
    tile_place,
)
from attncc.codegen.emit.step_ahead import ahead_of
from attncc.codegen.emit.step_sums import (
    OWN_LOADS,
    emit_together,
    first_sums,
    load_own,
    together,
)
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan_scan import StepPlan
from attncc.codegen.terms import depends_on_state
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Input, Lifetime, Node, Select

NARROW = ("bf16", "fp16")
"""Element types that are widened exactly, by an instruction that costs nothing to repeat."""


@dataclass(frozen=True, slots=True)
class StepCode:
    """Printed pieces of ``scan_step.py.jinja``."""

    functions: tuple[str, ...]
    summary: tuple[str, ...]
    index: tuple[str, ...]
    load: tuple[str, ...]
    body: tuple[str, ...]
    finish: tuple[str, ...]


def printer_of(plan: StepPlan, *, exact: bool = True) -> Printer:
    """What prints a body, in ``row`` as its token's and ``t`` as its place in the sequence."""
    dims = tuple(t.axis for t in plan.tile)
    places = {t.axis: tile_place(t, t.axis) for t in plan.tile} | grid_places(plan)
    places[plan.program.scan or "T"] = Place(Var("row"))
    positions = {a: p.index for a, p in places.items()} | {"T": Var("t")}
    return Printer(
        dims,
        tensors_of(plan),
        places,
        positions,
        sizes_of(plan),
        scalars=scalars_of(plan),
        exact=exact,
    )


def index_lines(plan: StepPlan) -> list[str]:
    """Where a program works: its columns, its sequence, and where that lies."""
    parts = grid_parts(plan, plan.grid_axes)
    if plan.blocked and (blocks := plan.axis(plan.blocked).blocks) > 1:
        parts.insert(0, ("block", str(blocks)))
    if not plan.apart:
        lines = split_program_id(parts, "sequence")
    elif parts:
        lines = [*split_program_id(parts[:-1], parts[-1][0]), "sequence = tl.program_id(1)"]
    else:
        lines = ["sequence = tl.program_id(1)"]
    lines += tile_lines(plan)
    if plan.packed:
        lines.append("first = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)")
        lines.append("length = (tl.load(cu_seqlens_ptr + sequence + 1) - first).to(tl.int32)")
    else:
        lines += ["first = tl.full((), 0, tl.int64)", "length = tokens"]
    return lines + slot_lines(plan)


def _state_dims(plan: StepPlan, name: str) -> tuple[str, ...]:
    axes = plan.program.tensor(name).pattern.axes
    return tuple(t.axis for t in plan.tile if t.axis in axes)


def _shape(plan: StepPlan, dims: tuple[str, ...]) -> str:
    return ", ".join(str(plan.axis(d).block) for d in dims)


@dataclass(frozen=True, slots=True)
class Held:
    """One variable that goes from token to token: a state, or one row of a window.

    Attributes:
        name: of the variable.
        tensor: the state or window it belongs to.
        places: of the window's axis, in memory.
        old: the node that stands for it.
        new: its value after the token.
    """

    name: str
    tensor: str
    places: Mapping[str, Place]
    old: Node
    new: Node


def held(plan: StepPlan) -> list[Held]:
    """Every variable that the loop carries, in the order of states and rows."""
    states = dict(plan.body.states)
    windows = {w.name: w for w in plan.body.windows}
    found = []
    for name in plan.program.state_names:
        if name in states:
            t = plan.program.tensor(name)
            old = Input(t.name, t.pattern.axes, t.lifetime, t.kind, loc=t.loc)
            found.append(Held(name, name, {}, old, states[name]))
            continue
        w = windows[name]
        for j, (old_row, new_row) in enumerate(zip(w.old, w.new, strict=True)):
            places = {w.axis: Place(Var(str(j)))}
            found.append(Held(f"{name}_row{j}", name, places, old_row, new_row))
    return found


def _load(plan: StepPlan, printer: Printer) -> None:
    """The state tiles and everything no token changes."""
    for h in held(plan):
        dims = _state_dims(plan, h.tensor)
        if h.tensor in plan.given:
            value = load_initial(printer.child(**h.places), plan, h.tensor)
            text, dims = value.text, value.dims
            printer.lines.append(f"{h.name}_now = {text}  # [{', '.join(dims)}]")
        elif dims:
            printer.lines.append(f"{h.name}_now = tl.zeros([{_shape(plan, dims)}], tl.float32)")
        else:
            printer.lines.append(f"{h.name}_now = tl.full((), 0.0, tl.float32)")
        printer.known[h.old] = Var(f"{h.name}_now", _state_dims(plan, h.tensor))
    scan = plan.program.scan
    fixed = {n for n, arg in printer.tensors.items() if scan not in arg.pattern.axes}
    for node in walk(*plan.body.roots):
        if not isinstance(node, Input) or node.lifetime in (Lifetime.STATE, Lifetime.WINDOW):
            continue
        if set(node.axes) <= printer.places.keys() and node.name in fixed:
            printer.emit(node)


def _ask(plan: StepPlan, printer: Printer) -> None:
    """Load all of a token's inputs before any of them is waited for, behind the state's loads.

    Written where they are used, one would be asked for when a sum over the state has the one
    before: three times the latency of memory instead of once. Widening one passes it from warp to
    warp, and waits for it: so what was loaded is widened behind the last load.
    """
    stored: dict[Node, Var] = {}
    for node in walk(*plan.body.roots):
        inner = node.arg if isinstance(node, Select) else node
        if not isinstance(inner, Input) or inner.lifetime in (Lifetime.STATE, Lifetime.WINDOW):
            continue
        held = printer.places.keys() | ({node.over} if isinstance(node, Select) else set())
        if set(inner.axes) <= held:
            if inner.name in printer.tensors:
                _load_narrow(plan, printer, node, inner, stored)
            printer.emit(node)
    if plan.narrow:
        return
    for node, raw in stored.items():
        printer.known[node] = printer.name(f"{raw.text}.to(tl.float32)", raw.dims)


def _load_narrow(
    plan: StepPlan, printer: Printer, node: Node, inner: Input, stored: dict[Node, Var]
) -> None:
    """Load an input as it is stored; each use widens it, or all are widened behind the last."""
    if node in printer.known or printer.tensors[inner.name].dtype not in NARROW:
        return
    printer.tell(inner)
    own = printer
    if isinstance(node, Select):
        own = printer.child(**{node.over: Place(Var(str(node.at)))})
    arg = printer.tensors[inner.name]
    raw = (load_own(own, arg) if plan.own_loads else None) or own.load(arg, raw=True)
    stored[node] = raw
    printer.known[node] = Var(f"{raw.text}.to(tl.float32)", raw.dims)


def _taken(printer: Printer) -> tuple[str, ...]:
    lines = tuple(printer.lines)
    printer.lines.clear()
    printer._told = ""
    return lines


def emit(plan: StepPlan) -> StepCode:
    """Print a plan's expressions."""
    return printed(plan, printer_of(plan))


def printed(plan: StepPlan, printer: Printer) -> StepCode:
    """Print a plan's expressions with a printer of one's own."""
    _load(plan, printer)
    load = _taken(printer)
    if plan.single:
        _ask(plan, printer)
    elif plan.ahead:
        ahead = ahead_of(plan, printer)
        load, printer.lines = (*load, *ahead.first), [*ahead.here]
        printer.known.update(ahead.known)
    sums = first_sums(plan, printer) if plan.joint else []
    if sums:
        emit_together(plan, printer, sums)
    body, finish = _token(plan, printer)
    stateful = [n for n in walk(*plan.body.roots) if depends_on_state(n)]
    axes = union(*(axes_of(n) for n in stateful))
    columns = (
        f" and block of {plan.axis(plan.blocked).block} {plan.blocked}" if plan.blocked else ""
    )
    summary = (
        f"One program per sequence{''.join(f', {a}' for a in plan.grid_axes)}{columns}.",
        f"Axes of the values that depend on the state: {' '.join(axes)}; in the tile: "
        + ", ".join(f"{t.axis} {t.block}" for t in plan.tile) + ".",
    )  # fmt: skip
    functions = (*(OWN_LOADS if plan.own_loads else ()), *(together(len(sums)) if sums else ()))
    return StepCode(functions, summary, tuple(index_lines(plan)), load, body, finish)


def _token(plan: StepPlan, printer: Printer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """One token, and the stores behind the last one.

    Where the plan says so, the only token of a sequence stores its states before anything is read
    out of them: fewer programs wait for the sums of a read-out.
    """
    carried = held(plan)
    outputs = list(zip(plan.program.outputs, plan.body.outputs, strict=True))
    late = plan.single and plan.states_first
    values = {} if late else {o.name: printer.emit(n) for o, n in outputs}
    new = [printer.emit(h.new) for h in carried]
    if not late:
        store_results(printer, plan, values)
    for h, value in zip(carried, new, strict=True):
        dims = _state_dims(plan, h.tensor)
        text = printer.lift(value, dims)
        if value.dims != dims:
            text = f"tl.broadcast_to({text}, [{_shape(plan, dims)}])"
        printer.lines.append(f"{h.name}_next = {text}")
    printer.lines += [f"{h.name}_now = {h.name}_next" for h in carried]
    for h in carried:
        value = Var(f"{h.name}_now", _state_dims(plan, h.tensor))
        store_token(printer.child(**h.places), plan, h.tensor, value)
    body = _taken(printer)
    for h in carried:
        value = Var(f"{h.name}_now", _state_dims(plan, h.tensor))
        store_final(printer.child(**h.places), plan, h.tensor, value)
    if late:
        store_results(printer, plan, {o.name: printer.emit(n) for o, n in outputs})
    return body, _taken(printer)
