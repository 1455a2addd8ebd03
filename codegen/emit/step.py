"""Triton text of the sequential kernel."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.scan import (
    grid_parts,
    grid_places,
    scalars_of,
    sizes_of,
    split_program_id,
    store_results,
    tensors_of,
    tile_lines,
    tile_place,
)
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan_scan import StepPlan, final_name, initial_name
from attncc.codegen.render import Source, render
from attncc.codegen.terms import depends_on_state
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Input, Lifetime


@dataclass(frozen=True, slots=True)
class StepCode:
    """Printed pieces of ``scan_step.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    load: tuple[str, ...]
    body: tuple[str, ...]
    finish: tuple[str, ...]


def _printer(plan: StepPlan) -> Printer:
    dims = tuple(t.axis for t in plan.tile)
    places = {t.axis: tile_place(t, t.axis) for t in plan.tile} | grid_places(plan)
    places[plan.program.scan or "T"] = Place(Var("row"))
    positions = {a: p.index for a, p in places.items()} | {"T": Var("t")}
    return Printer(
        dims, tensors_of(plan), places, positions, sizes_of(plan), scalars=scalars_of(plan)
    )


def _index(plan: StepPlan) -> list[str]:
    parts = grid_parts(plan, plan.grid_axes)
    if plan.blocked and (blocks := plan.axis(plan.blocked).blocks) > 1:
        parts.insert(0, ("block", str(blocks)))
    lines = [*split_program_id(parts, "sequence"), *tile_lines(plan)]
    if plan.packed:
        lines.append("first = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)")
        lines.append("length = (tl.load(cu_seqlens_ptr + sequence + 1) - first).to(tl.int32)")
    else:
        lines += ["first = tl.full((), 0, tl.int64)", "length = tokens"]
    return lines


def _state_dims(plan: StepPlan, name: str) -> tuple[str, ...]:
    axes = plan.program.tensor(name).pattern.axes
    return tuple(t.axis for t in plan.tile if t.axis in axes)


def _shape(plan: StepPlan, dims: tuple[str, ...]) -> str:
    return ", ".join(str(plan.axis(d).block) for d in dims)


def _load(plan: StepPlan, printer: Printer) -> None:
    """The state tiles and everything no token changes."""
    for name in plan.program.state_names:
        dims = _state_dims(plan, name)
        if name in plan.given:
            value = printer.load(printer.tensors[initial_name(name)])
            printer.lines.append(f"{name}_now = {value.text}  # [{', '.join(dims)}]")
        elif dims:
            shape = _shape(plan, dims)
            printer.lines.append(f"{name}_now = tl.zeros([{shape}], tl.float32)")
        else:
            printer.lines.append(f"{name}_now = tl.full((), 0.0, tl.float32)")
    scan = plan.program.scan
    fixed = {n for n, arg in printer.tensors.items() if scan not in arg.pattern.axes}
    for node in walk(*plan.program.roots):
        if not isinstance(node, Input):
            continue
        if node.lifetime is Lifetime.STATE:
            printer.known[node] = Var(f"{node.name}_now", _state_dims(plan, node.name))
        elif set(node.axes) <= printer.places.keys() and node.name in fixed:
            printer.emit(node)


def _taken(printer: Printer) -> tuple[str, ...]:
    lines = tuple(printer.lines)
    printer.lines.clear()
    printer._told = ""
    return lines


def emit(plan: StepPlan) -> StepCode:
    """Print a plan's expressions."""
    program = plan.program
    printer = _printer(plan)
    _load(plan, printer)
    load = _taken(printer)
    values = {o.name: printer.emit(o.value) for o in program.outputs}
    new = {s.name: printer.emit(s.value) for s in program.states}
    store_results(printer, plan, values)
    for name, value in new.items():
        dims = _state_dims(plan, name)
        text = printer.lift(value, dims)
        if value.dims != dims:
            text = f"tl.broadcast_to({text}, [{_shape(plan, dims)}])"
        printer.lines.append(f"{name}_next = {text}")
    printer.lines += [f"{name}_now = {name}_next" for name in new]
    body = _taken(printer)
    for name in new:
        value = Var(f"{name}_now", _state_dims(plan, name))
        printer.store(printer.tensors[final_name(name)], value)
    held = [n for n in walk(*program.roots) if depends_on_state(n)]
    axes = union(*(axes_of(n) for n in held))
    columns = (
        f" and block of {plan.axis(plan.blocked).block} {plan.blocked}" if plan.blocked else ""
    )
    summary = (
        f"One program per sequence{''.join(f', {a}' for a in plan.grid_axes)}{columns}.",
        f"Axes of the values that depend on the state: {' '.join(axes)}; in the tile: "
        + ", ".join(f"{t.axis} {t.block}" for t in plan.tile) + ".",
    )  # fmt: skip
    return StepCode(summary, tuple(_index(plan)), load, body, _taken(printer))


def source(plan: StepPlan) -> Source:
    """The generated file of a plan."""
    return render(plan, emit(plan))
