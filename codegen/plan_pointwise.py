"""Plan of ops that carry nothing and fold no history: element-wise code and sums over static axes.

Norms, gates, rotations: what a value needs lies in one row of the output. A program takes a tile of
rows; axes that are summed, and the output's innermost one, are inside the tile. A short axis that
inputs are picked along (the pairs of a rotation) is written out: every element is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Arg, KernelPlan, ScalarArg, Spec, TensorArg, in_chain
from attncc.codegen.positions import written_out
from attncc.codegen.scan_tiles import TileAxis, largest, power, summed_axes
from attncc.dsl.axes import Pattern, union
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import (
    Contract,
    Index,
    Input,
    Kind,
    Lifetime,
    Lit,
    Map,
    Node,
    Program,
    Red,
    Reduce,
    Select,
    Size,
    Take,
    Tensor,
)

POINTWISE_TILE = 2048
"""Elements of one program's tile: 16 a thread at 4 warps."""
WIDEST = 16384
"""Most elements of a tile that has to hold a whole sum: 64 a thread at 8 warps."""
MOST_ROWS = 64
ROW_AXIS = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointwisePlan(KernelPlan):
    """All rows of an op without a carry.

    Attributes:
        row_axes: axes of the outputs that are outside the tile, outermost first: with their places
            counted through they are one axis of rows.
        rows: rows of a tile.
        tile: the other axes of a tile.
        blocked: the axis that is cut into blocks, or "" for none.
        written: the short axis whose positions are computed one by one, or "" for none.
        packed: sequences lie end to end along T.
        exact: element-wise functions at fp32's own accuracy.
    """

    row_axes: tuple[str, ...]
    rows: int
    tile: tuple[TileAxis, ...]
    blocked: str
    written: str
    packed: bool
    exact: bool

    @property
    def blocks(self) -> int:
        """Programs that share a tile of rows."""
        return next((t.blocks for t in self.tile if t.axis == self.blocked), 1)


def plan_pointwise(program: Program, spec: Spec) -> PointwisePlan | Refusal:
    """The kernel of an op that carries nothing and folds no history.

    Args:
        program: no scan.
        spec: dtypes and static sizes.

    Returns:
        The plan, or what stands in the way.
    """
    refused = _refused(program, spec)
    if refused is not None:
        return refused
    static = dict(spec.static)
    nodes = tuple(o.value for o in program.outputs)
    summed = summed_axes(walk(*nodes))
    whole = _pattern(program.outputs[0].pattern, spec).axes
    written = written_out(nodes, static)
    written = written if all(written in o.pattern.axes for o in program.outputs) else ""
    first = tuple(a for a in whole if a != written)
    last = first[-1] if first and first[-1] in static else ""
    inside = union(summed, [last] if last else [])
    rows = tuple(a for a in first if a not in inside)
    refused = _placed(program, spec, {*whole, *inside})
    if refused is not None:
        return refused
    blocked = last if last and last not in summed else ""
    tile = tuple(TileAxis(a, static[a], power(static[a])) for a in inside)
    narrow = largest(nodes, {t.axis: t.block for t in tile if t.axis != blocked})
    if narrow > WIDEST:
        sizes = " x ".join(f"{t.axis} {t.block}" for t in tile if t.axis != blocked)
        return Refusal(f"a tile of {sizes} does not fit a program's registers", program.loc)
    times = static.get(written, 1)
    if blocked:
        width = min(power(static[blocked]), max(1, POINTWISE_TILE // (narrow * times)))
        tile = tuple(TileAxis(t.axis, t.size, width) if t.axis == blocked else t for t in tile)
    elements = times * largest(nodes, {t.axis: t.block for t in tile})
    args: list[Arg] = [*_inputs(nodes, program, spec)]
    args += [_tensor(o.name, o.pattern, spec, written=True) for o in program.outputs]
    args += [ScalarArg("rows_given", "i32"), *_sizes(args, rows, spec)]
    plan = PointwisePlan(
        op=program.name, phase="pointwise", template="triton/pointwise.py.jinja", program=program,
        args=tuple(args), static=spec.static, num_warps=4 if elements <= 4096 else 8,
        num_stages=1, precision="ieee", row_axes=rows, tile=tile, blocked=blocked,
        written=written,
        rows=min(MOST_ROWS, power(max(1, POINTWISE_TILE // elements))), packed=spec.packed,
        exact=any(spec.dtype(o.name) == "fp32" for o in program.outputs),
    )  # fmt: skip
    return in_chain(plan, spec)


def _pattern(pattern: Pattern, spec: Spec) -> Pattern:
    """Memory axes as passed: packed calls have no B beside T."""
    return pattern.without("B") if spec.packed and "T" in pattern.axes else pattern


def _tensor(name: str, pattern: Pattern, spec: Spec, *, written: bool = False) -> TensorArg:
    own = _pattern(pattern, spec)
    return TensorArg(name, own, spec.dtype(name), written, name in spec.aligned)


def _inputs(nodes: tuple[Node, ...], program: Program, spec: Spec) -> Iterator[Arg]:
    used = {n.name for n in walk(*nodes) if isinstance(n, Input)}
    for t in program.tensors:
        if t.name not in used:
            continue
        if t.scalar:
            yield ScalarArg(f"{t.name}_value", "i32" if t.kind is Kind.INT else "fp32")
        else:
            yield _tensor(t.name, t.pattern, spec)


def _sizes(args: list[Arg], rows: tuple[str, ...], spec: Spec) -> Iterator[ScalarArg]:
    """Sizes given at run time: of rows that are counted through, and inside groups of axes."""
    groups = (dim[1:] for a in args if isinstance(a, TensorArg) for dim in a.pattern.dims)
    static = dict(spec.static)
    for axis in union(rows[1:], *groups):
        if axis not in static:
            yield ScalarArg(f"n_{axis}", "i32")


def _refused(program: Program, spec: Spec) -> Refusal | None:
    """The first thing that is no element-wise code or sum of static extent."""
    kept = (Lifetime.CACHE, Lifetime.MEMORY, Lifetime.STATE, Lifetime.WINDOW)
    held = next((t for t in program.tensors if t.lifetime in kept), None)
    if program.scan is not None or held is not None:
        return Refusal("the op keeps or folds something", program.loc if held is None else held.loc)
    static = dict(spec.static)
    for node in walk(*(o.value for o in program.outputs)):
        reason = _unprintable(node, static, packed=spec.packed)
        if reason:
            return Refusal(reason, node.loc)
    return None


def _unprintable(node: Node, static: dict[str, int], *, packed: bool) -> str:
    match node:
        case Contract(over=over) | Reduce(red=Red.SUM, over=over):
            loose = [a for a in over if a not in static]
            return f"a sum over {loose[0]}, whose size is not compiled in" if loose else ""
        case Size(axis=axis) | Take(over=axis) if axis not in static:
            return f"the number of {axis} is not known inside the kernel"
        case Index(axis="B") | Index(axis="T") if packed:
            return "the place in a packed sequence is not known inside the kernel"
        case Input() | Lit() | Size() | Index() | Map() | Select() | Take():
            return ""
        case _:
            return f"no kernel code for {type(node).__name__.lower()}"


def _placed(program: Program, spec: Spec, axes: set[str]) -> Refusal | None:
    """The first object with an axis that a tile of the first output's rows has no place for."""
    first = program.outputs[0]
    wanted = _pattern(first.pattern, spec).axes
    inside = {*axes, "B"} if spec.packed else axes  # a packed row's sequence is none of its places
    for o in program.outputs:
        lacking = [a for a in wanted if a not in o.pattern.axes and a not in dict(spec.static)]
        foreign = [a for a in _pattern(o.pattern, spec).axes if a not in axes]
        if lacking or foreign or not set(axes_of(o.value)) <= inside:
            return Refusal(f"the output {o.name} has other rows than {first.name}", program.loc)
    if spec.packed and any(_whole(t) for t in program.tensors):
        return Refusal("something of a whole sequence in a packed call", program.loc)
    return None


def _whole(t: Tensor) -> bool:
    return "B" in t.pattern.axes and "T" not in t.pattern.axes
