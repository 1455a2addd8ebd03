"""Triton text of ops that carry nothing: a tile of rows, element by element."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.scan import tile_place
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan import ScalarArg, TensorArg
from attncc.codegen.plan_pointwise import ROW_AXIS, PointwisePlan
from attncc.codegen.positions import at_position, inputs_with
from attncc.dsl.ir import Output, Select

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
    if plan.written:
        _split_inputs(plan, printer)
    for out in plan.program.outputs:
        inside = [] if plan.blocked in ("", *out.pattern.axes) else [Var("block == 0")]
        if plan.written:
            _store_written(plan, printer, out, inside)
            continue
        value = printer.emit(out.value)
        printer.tell(out.value)
        printer.store(printer.tensors[out.name], value, inside)
    tile = ", ".join(f"{t.axis} {t.block}" for t in plan.tile)
    summary = (
        f"One program per {plan.rows} rows ({' '.join(plan.row_axes) or 'there is one'}); "
        f"in the tile: {tile or 'nothing else'}.",
    )
    return PointwiseCode(summary, tuple(_index(plan)), tuple(printer.lines))


def _positions(plan: PointwisePlan) -> range:
    return range(dict(plan.static)[plan.written])


def _flat(plan: PointwisePlan, arg: TensorArg) -> bool:
    """Whether a tensor's innermost elements are the tile's last axis and the written one's."""
    last = plan.tile[-1].axis if plan.tile else ""
    return arg.pattern.dims[-1][-2:] == (last, plan.written)


def _flat_printer(plan: PointwisePlan, printer: Printer) -> Printer:
    """A printer that finds the two as one run of elements."""
    t = plan.tile[-1]
    dim = f"{t.axis}_{plan.written}"
    count = len(_positions(plan))
    valid = Var(f"at_{dim} < {t.size * count}", (dim,)) if t.partial else None
    dims = tuple(dim if d == t.axis else d for d in printer.dims)
    places = {t.axis: Place(Var("0")), plan.written: Place(Var(f"at_{dim}", (dim,)), valid)}
    inner = printer.child(**places)
    inner.dims = dims
    return inner


def _shape(plan: PointwisePlan, dims: tuple[str, ...]) -> str:
    blocks = {ROW_AXIS: plan.rows} | {t.axis: t.block for t in plan.tile}
    return ", ".join(str(blocks[d]) for d in dims)


def _split_inputs(plan: PointwisePlan, printer: Printer) -> None:
    """Load inputs whose written axis is innermost whole, and take its positions apart."""
    count = len(_positions(plan))
    for node in inputs_with(plan.written, (o.value for o in plan.program.outputs)):
        arg = printer.tensors[node.name]
        if not _flat(plan, arg):
            continue
        printer.tell(node)
        inner = _flat_printer(plan, printer)
        whole = inner.load(arg)
        axis = plan.tile[-1].axis
        dims = tuple(axis if d == f"{axis}_{plan.written}" else d for d in whole.dims)
        parts = [f"{node.name}_at{r}" for r in range(count)]
        halves = "2, " * (count.bit_length() - 1)
        text = f"tl.reshape({whole.text}, [{_shape(plan, dims)}, {halves.rstrip(', ')}])"
        printer.lines += _split(text, parts, node.name)
        for r, name in enumerate(parts):
            printer.known[Select(node, plan.written, r)] = Var(name, dims)


def _split(text: str, parts: list[str], stem: str) -> list[str]:
    """Lines that take the last dimensions of 2 apart: the last one tells even from odd."""
    if len(parts) == 2:
        return [f"{parts[0]}, {parts[1]} = tl.split({text})"]
    even, odd = f"{stem}_even", f"{stem}_odd"
    lines = [f"{even}, {odd} = tl.split({text})"]
    return lines + _split(even, parts[::2], even) + _split(odd, parts[1::2], odd)


def _joined(texts: list[str]) -> str:
    """The values side by side in new last dimensions of 2."""
    if len(texts) == 1:
        return texts[0]
    return f"tl.join({_joined(texts[::2])}, {_joined(texts[1::2])})"


def _store_written(
    plan: PointwisePlan, printer: Printer, out: Output, inside: list[Var]
) -> None:  # fmt: skip
    """Store each position, or all of them together where they lie side by side."""
    arg = printer.tensors[out.name]
    values = [printer.emit(at_position(out.value, plan.written, r)) for r in _positions(plan)]
    printer.tell(out.value)
    if not _flat(plan, arg):
        for r, value in enumerate(values):
            printer.child(**{plan.written: Place(Var(str(r)))}).store(arg, value, inside)
        return
    axis = plan.tile[-1].axis
    dims = printer.order(*(v.dims for v in values), (ROW_AXIS, axis))
    texts = [f"tl.broadcast_to({printer.lift(v, dims)}, [{_shape(plan, dims)}])" for v in values]
    texts = [v.text if v.dims == dims else t for v, t in zip(values, texts, strict=True)]
    inner = _flat_printer(plan, printer)
    run = tuple(f"{axis}_{plan.written}" if d == axis else d for d in dims)
    sizes = _shape(plan, dims[:-1]) + f", {plan.tile[-1].block * len(values)}"
    inner.store(arg, inner.name(f"tl.reshape({_joined(texts)}, [{sizes}])", run), inside)


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
    if plan.written and any(_flat(plan, a) for a in plan.args if isinstance(a, TensorArg)):
        t = plan.tile[-1]
        block = t.block * len(_positions(plan))
        start = f"block * {block} + " if t.axis == plan.blocked and t.blocks > 1 else ""
        lines.append(f"at_{t.axis}_{plan.written} = {start}tl.arange(0, {block})")
    return lines
