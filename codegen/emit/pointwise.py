"""Triton text of ops that carry nothing: a tile of rows, element by element."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.scan import tile_place
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan import ScalarArg, TensorArg
from attncc.codegen.plan_pointwise import ROW_AXIS, PointwisePlan

ROWS = (ROW_AXIS,)


@dataclass(frozen=True, slots=True)
class PointwiseCode:
    """Printed pieces of ``pointwise.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    body: tuple[str, ...]


def emit(plan: PointwisePlan) -> PointwiseCode:
    """Print a plan's expressions."""
    printer = _printer(plan)
    for out in plan.program.outputs:
        value = printer.emit(out.value)
        printer.tell(out.value)
        inside = [] if plan.blocked in ("", *out.pattern.axes) else [Var("block == 0")]
        printer.store(printer.tensors[out.name], value, inside)
    tile = ", ".join(f"{t.axis} {t.block}" for t in plan.tile)
    summary = (
        f"One program per {plan.rows} rows ({' '.join(plan.row_axes) or 'there is one'}); "
        f"in the tile: {tile or 'nothing else'}.",
    )
    return PointwiseCode(summary, tuple(_index(plan)), tuple(printer.lines))


def _sizes(plan: PointwisePlan) -> dict[str, str]:
    found = {a: str(n) for a, n in plan.static}
    names = [a.name for a in plan.args if isinstance(a, ScalarArg) and a.name.startswith("n_")]
    return {**{n[2:]: n for n in names}, **found}


def _printer(plan: PointwisePlan) -> Printer:
    inside = Var("inside", ROWS)
    places = {a: Place(Var(f"at_{a}", ROWS), inside) for a in plan.row_axes}
    places |= {t.axis: tile_place(t, t.axis) for t in plan.tile}
    scalars = {
        t.name: f"{t.name}_value" for t in plan.program.tensors if t.scalar
    }  # absent ones are literals of the program
    return Printer(
        (*ROWS, *(t.axis for t in plan.tile)),
        {a.name: a for a in plan.args if isinstance(a, TensorArg)},
        places,
        {a: p.index for a, p in places.items()},
        _sizes(plan),
        scalars=scalars,
        exact=plan.exact,
    )


def _index(plan: PointwisePlan) -> list[str]:
    """Lines that find the tile's rows and the places along each axis."""
    lines = ["at = tl.program_id(0)"]
    if plan.blocks > 1:
        lines += [f"block = at % {plan.blocks}", f"at = at // {plan.blocks}"]
    lines += [
        f"left = at * {plan.rows} + tl.arange(0, {plan.rows})  # [rows], counted through",
        "inside = left < rows_given",
    ]
    sizes = _sizes(plan)
    for axis in reversed(plan.row_axes[1:]):
        lines += [f"at_{axis} = left % {sizes[axis]}", f"left = left // {sizes[axis]}"]
    if plan.row_axes:
        lines.append(f"at_{plan.row_axes[0]} = left")
    for t in plan.tile:
        text = f"tl.arange(0, {t.block})"
        if t.axis == plan.blocked and t.blocks > 1:
            text = f"block * {t.block} + {text}"
        lines.append(f"at_{t.axis} = {text}")
    return lines
