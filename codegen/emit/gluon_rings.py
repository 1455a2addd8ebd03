"""Prints the tensor maps of the state pass: what a copy brings of a chunk, and from where.

A map starts at a sequence's first row of one system and ends with the sequence: coordinates are
small, and what lies behind is zeros where it is loaded and nowhere where it is stored. A chunk
whose tokens leave places over ends with zeros too, before the next one's rows: there the chunks are
an axis of the map, and the last one, which may be shorter, has a map of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.affine_checks import shared_gain
from attncc.codegen.affine_memory import BYTES
from attncc.codegen.emit.affine import line_positions
from attncc.codegen.emit.gluon import TYPES
from attncc.codegen.emit.rows import printer_of
from attncc.codegen.emit.triton import Place, Var
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_affine import BLOCK, ROWS, Part
from attncc.codegen.plan_gluon_mixing import DECAY
from attncc.codegen.plan_gluon_operands import lone_const
from attncc.codegen.plan_gluon_state import COLUMNS, WarpStatePlan
from attncc.codegen.plan_gluon_systems import BY_HALVES, square_size

TOTAL = 16
"""Numbers beside a chunk's lines, of which the first is its total decay."""
LEAST_PLACE = 32
"""fp32 numbers of the smallest place of a ring: 128 bytes."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A tensor map, and the ring that its copies go to.

    Attributes:
        name: of the ring.
        role: what it holds.
        also: other things it holds.
        base: first element of the sequence's part.
        shape: size of each memory axis.
        strides: of each, in elements.
        box: the shape of a place in the ring.
        copied: what one copy brings.
        at: coordinates of chunk ``step``.
        parts: of the copies to parts of a place: the first row there, rows, coordinates; or none.
        tail_base: first element of chunk ``last``, where that has a map of its own; else "".
        tail_shape: that map's sizes.
        tail_at: coordinates in it.
        view: the box as a matrix, or as one row.
        layout: of its places in shared memory.
        dtype: element type.
        bytes: of one copy.
        each: warpgroups have places of their own.
        places: of the ring.
    """

    name: str
    role: str
    also: tuple[str, ...]
    base: str
    shape: str
    strides: str
    box: str
    copied: str
    at: str
    parts: tuple[tuple[int, int, str], ...]
    tail_base: str
    tail_shape: str
    tail_at: str
    view: str
    layout: str
    dtype: str
    bytes: int
    each: bool
    places: int


def rings_of(plan: WarpStatePlan) -> tuple[Ring, ...]:
    """Everything that is loaded of a chunk."""
    shown, key, rows = plan.part is not Part.SUMMARY, plan.form.active[0], len(plan.form.rows)
    found = [_vectors(plan, "a", plan.a, ROWS, rows, key)]
    if plan.b and plan.b != plan.a:
        found.append(_vectors(plan, "b", plan.b, ROWS, rows, key))
    elif plan.b:
        found[0] = _with(found[0], "b")
    by_name = {plan.a: 0, **({plan.b: len(found) - 1} if plan.b else {})} if rows == 1 else {}
    for read, name in zip(plan.form.reads if shown else (), plan.vectors, strict=True):
        role = f"vector_{read.name}"
        if name in by_name:
            found[by_name[name]] = _with(found[by_name[name]], role)
        else:
            by_name[name] = len(found)
            found.append(_vectors(plan, role, name, plan.places, 1, key))
    if plan.const:
        found.append(_consts(plan))
    if plan.solve:
        found.append(_square(plan, "inverse", ROWS))
    squares = shown and not plan.mixing
    found += [_square(plan, f"mix_{r.name}", plan.places) for r in plan.form.reads if squares]
    return (*found, *_lines(plan), *([_totals(plan)] if plan.each or plan.totals else []))


def _consts(plan: WarpStatePlan) -> Ring:
    """The rows' constants.

    Where one row of a token alone has some, the token's rows are an axis with a single place: the
    others lie outside of it, and arrive as zeros.
    """
    rows, row = len(plan.form.rows), lone_const(plan)
    if row is None:
        return _vectors(plan, "const", plan.const, ROWS, rows, plan.blocked)
    arg, size = plan.tensor(plan.const), dict(plan.static)[plan.blocked]
    stride = arg.strides[arg.pattern.dim_of(plan.program.scan or "T")]
    axes = [
        ("gl.maximum(length, 1)", stride, ROWS // rows, f"step * {plan.tokens}"),
        ("1", stride, rows, str(-row)), (str(size), "1", COLUMNS, "column"),
    ]  # fmt: skip
    base = f"{arg.pointer} + {_first(plan, arg)}"
    return _made(plan, "const", base, axes, view=(ROWS, COLUMNS), dtype=arg.dtype, each=True)


def _operand(plan: WarpStatePlan, role: str, name: str, count: int) -> Ring:
    """Vectors with decays inside, as ``systems`` has left them, without places left over."""
    height = plan.axis(plan.form.active[0]).block
    axes = [
        ("gl.maximum(end, 1)", f"systems * {ROWS * height}", 1, "step"),
        *_rows(plan, count, height), (str(height), "1", height, "0"),
    ]  # fmt: skip
    base = f"{name}_ptr + first_system * {ROWS * height}"
    return _made(plan, role, base, axes, view=(count, height), dtype=plan.storage)


def _rows(plan: WarpStatePlan, places: int, stride: int) -> list[tuple[str, str, int, str]]:
    """The memory axes of rows or tokens in a buffer, without places left over."""
    if places == ROWS or plan.gathered:
        return [(str(places), str(stride), places, "0")]
    blocks = ROWS // BLOCK
    return [
        (str(blocks), str(BLOCK * stride), blocks, "0"),
        (str(BLOCK), str(stride), places // blocks, "0"),
    ]


def _totals(plan: WarpStatePlan) -> Ring:
    """A chunk's total decay: a number per element of the active axis, or one that comes first."""
    _, position = line_positions(plan)
    size, height = TOTAL, LEAST_PLACE  # the rest of the place arrives as zeros
    if plan.each:
        size = height = plan.axis(plan.form.active[0]).block
    axes = [
        ("gl.maximum(end, 1)", f"systems * {plan.line_stride}", 1, "step"),
        (str(size), "1", height, "0"),
    ]
    base = f"lines_ptr + first_system * {plan.line_stride} + {position}"
    return _made(plan, "total", base, axes, view=(1, height), dtype="fp32")


def out_map(plan: WarpStatePlan) -> Ring:
    """Where the output of a chunk goes."""
    [out] = plan.program.outputs
    return _vectors(plan, "out", out.name, plan.places, 1, plan.blocked)


def _with(ring: Ring, role: str) -> Ring:
    values = {n: getattr(ring, n) for n in Ring.__slots__}
    return Ring(**values | {"also": (*ring.also, role)})


def _made(
    plan: WarpStatePlan, role: str, base: str, axes: list[tuple[str, str, int, str]], *,
    view: tuple[int, int], dtype: str, each: bool = False,
) -> Ring:  # fmt: skip
    """A ring from its memory axes: size, stride, what a copy brings, where it starts."""
    numbers = 1
    for _, _, count, _ in axes:
        numbers *= count
    swizzle, bits = (128, 16) if dtype != "fp32" else (128 if role == "out" else 0, 32)
    return Ring(
        name=role, role=role, also=(), base=base, tail_base="", tail_shape="",
        tail_at="",
        shape=", ".join(size for size, _, _, _ in axes),
        strides=", ".join(stride for _, stride, _, _ in axes),
        box=", ".join(str(count) for _, _, count, _ in axes), parts=(),
        copied=", ".join(str(count) for _, _, count, _ in axes),
        at=", ".join(start for _, _, _, start in axes),
        view=f"{view[0]}, {view[1]}",
        layout=f"gl.NVMMASharedLayout({swizzle}, {bits}, rank={len(axes)})",
        dtype=TYPES[dtype], bytes=numbers * BYTES[dtype], each=each,
        places=plan.num_stages * (plan.consumers if each else 1),
    )  # fmt: skip


def _vectors(plan: WarpStatePlan, role: str, name: str, count: int, rows: int, axis: str) -> Ring:
    """Rows of an input or of the output: of the active axis whole, of the passive one a block."""
    if plan.each and axis == plan.form.active[0]:
        return _operand(plan, role, name, count)
    arg, static = plan.tensor(name), dict(plan.static)
    stride = arg.strides[arg.pattern.dim_of(plan.program.scan or "T")]
    size, whole = static[axis], axis == plan.form.active[0]
    width, column = (size, "0") if whole else (COLUMNS, "column")
    length = f"gl.maximum(length, 1) * {rows}" if rows > 1 else "gl.maximum(length, 1)"
    base, used = f"{arg.pointer} + {_first(plan, arg)}", plan.tokens * rows
    view, last = (count, width), (str(size), "1", width, column)
    if not ends_early(plan, role):
        axes = [(length, stride, count, f"step * {used}"), last]
        return _made(plan, role, base, axes, view=view, dtype=arg.dtype, each=not whole)
    chunks = ("gl.maximum(end, 1)", f"{used} * {stride}", 1, "step")
    axes = [chunks, (str(used), stride, count, "0"), last]
    found = _made(plan, role, base, axes, view=view, dtype=arg.dtype, each=not whole)
    left = f"gl.minimum(gl.maximum(length - last * {plan.tokens}, 1) * {rows}, {used})"
    values = {n: getattr(found, n) for n in Ring.__slots__} | {
        "tail_base": f"{base} + last.to(gl.int64) * ({used} * {stride})",
        "tail_shape": f"1, {left}, {size}", "tail_at": f"0, 0, {column}",
    }  # fmt: skip
    return Ring(**values)


def ends_early(plan: WarpStatePlan, role: str) -> bool:
    """Whether the places of rows, or of a chunk's output, hold more than the chunk has."""
    count = plan.places if role == "out" else ROWS if role in ("a", "b", "const") else 0
    rows = 1 if role == "out" else len(plan.form.rows)
    return plan.gathered and plan.tokens * rows < count


def _first(plan: WarpStatePlan, arg: TensorArg) -> str:
    """The offset of a sequence's first row of the program's system."""
    scan, grid = plan.program.scan or "T", {*plan.grid_axes, "B"}
    places = {a: Place(Var("0")) for a in arg.pattern.axes if a not in grid}
    places[scan] = Place(Var("0"), None, Var("first_row"))
    offset, _ = printer_of(plan).child(**places).offset(arg)
    return offset.text


def _square(plan: WarpStatePlan, name: str, places: int) -> Ring:
    """A chunk's square matrix; of a read-out's the rows of tokens, without places left over."""
    size = square_size(plan, name, halves=plan.halves)
    chunks = ("gl.maximum(end, 1)", f"systems * {size}", 1, "step")
    base = f"{name}_ptr + first_system * {size}"
    axes = [chunks, *_rows(plan, places, ROWS), (str(ROWS), "1", ROWS, "0")]
    found = _made(plan, name, base, axes, view=(places, ROWS), dtype=plan.storage)
    if not plan.halves or places != ROWS:
        return found
    half = ROWS // 2  # of the upper one's columns the first half alone, behind the lower one's rows
    values = {n: getattr(found, n) for n in Ring.__slots__} | {
        "shape": f"gl.maximum(end, 1), {half}, {BY_HALVES}",
        "strides": f"systems * {size}, {BY_HALVES}, 1", "copied": f"1, {half}, {ROWS}",
        "parts": ((0, half, f"step, 0, {ROWS}"), (half, half, "step, 0, 0")),
    }  # fmt: skip
    return Ring(**values)


def _lines(plan: WarpStatePlan) -> list[Ring]:
    """The vectors that the kernels before have left; one may serve rows and tokens."""
    _, prefix = shared_gain(plan.form) or (1.0, "")
    positions, _ = line_positions(plan)
    shown = plan.part is not Part.SUMMARY
    found: list[Ring] = []
    for name in plan.lines:
        read = name.startswith("prefix_")
        of_rows = read and name == f"prefix_{prefix}"
        if (read and not shown and not of_rows) or (name == DECAY and not plan.mixing):
            continue
        made = _line(plan, name, positions[name], plan.places if read else ROWS)
        found.append(_with(made, f"row_{name}") if of_rows else made)
    return found


def _line(plan: WarpStatePlan, name: str, position: int, places: int) -> Ring:
    chunks = ("gl.maximum(end, 1)", f"systems * {plan.line_stride}", 1, "step")
    rows = _rows(plan, places, 1)
    base = f"lines_ptr + first_system * {plan.line_stride} + {position}"
    return _made(plan, name, base, [chunks, *rows], view=(1, places), dtype="fp32")
