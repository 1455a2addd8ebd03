"""Parameters and small facts that the plans of the softmax family share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from attncc.codegen.forms import Refusal, SoftmaxFold
from attncc.codegen.plan import Arg, ScalarArg, Spec, TensorArg
from attncc.codegen.plan_append import block_table, vector
from attncc.codegen.softmax_checks import TOKENS, inner_sums, tensor_pattern
from attncc.codegen.tiles import Tiles
from attncc.dsl.axes import Pattern, parse
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Between, Contract, Input, Kind, Node, Program, Reduce, Size, Take


def aligned_folds(folds: tuple[SoftmaxFold, ...]) -> tuple[SoftmaxFold, ...] | Refusal:
    """The folds with one division of their axes into programs and rows."""
    rows = {*folds[0].batch_axes, *folds[0].row_axes}
    shared = {a for f in folds for a in f.batch_axes}
    order = (*folds[0].batch_axes, *folds[0].row_axes)
    found = []
    for fold in folds:
        if {*fold.batch_axes, *fold.row_axes} != rows:
            return Refusal("folds with different rows in one output", fold.node.loc)
        batch = tuple(a for a in order if a in shared)
        found.append(
            replace(fold, batch_axes=batch, row_axes=tuple(a for a in order if a not in shared))
        )
    return tuple(found)


def inputs(
    program: Program, spec: Spec, roots: tuple[Node, ...], *, flat: bool = False
) -> Iterator[Arg]:
    """Parameters for the inputs below the roots (``flat``: the roots are all there is)."""
    nodes = roots if flat else tuple(walk(*roots))
    names = {n.name for n in nodes if isinstance(n, Input)}
    for t in program.tensors:
        if t.name not in names:
            continue
        if t.scalar:
            yield ScalarArg(f"p_{t.name}", "i32" if t.kind is Kind.INT else "fp32")
        else:
            pattern = tensor_pattern(program, spec, t)
            yield TensorArg(t.name, pattern, spec.dtype(t.name), False, t.name in spec.aligned)
    for own in spec.quantised:
        if own.name in names:
            yield TensorArg(own.scales, own.pattern, own.dtype, False, own.aligned)


def outputs(program: Program, folds: tuple[SoftmaxFold, ...], spec: Spec) -> Iterator[TensorArg]:
    """Parameters for what is written."""
    dtypes = dict(spec.dtypes)
    for o in program.outputs:
        pattern = o.pattern.without("B") if spec.packed else o.pattern
        dtype = dtypes.get(o.name, stored(folds[0].value, spec))
        yield TensorArg(f"out_{o.name}", pattern, dtype, True, o.name in spec.aligned)
    if spec.return_lse:
        yield TensorArg("out_lse", lse_pattern(folds[0], spec.packed), "fp32", True, False)


def layout_args(*, packed: bool, lengths: bool, paged: bool) -> Iterator[Arg]:
    """Parameters that say where sequences lie and how long they are."""
    if packed:
        yield vector("cu_seqlens")
        yield vector("tile_table")
        if not lengths:
            yield vector("cu_seqlens_k")
    else:
        yield ScalarArg("T", "i32")
    if paged:
        yield block_table()
    if lengths:
        yield vector("lengths")
    elif not packed:
        yield ScalarArg("S", "i32")


def size_args(
    program: Program, axes: Iterable[str], over: str, static: tuple[tuple[str, int], ...]
) -> Iterator[ScalarArg]:
    """Run-time sizes of a kernel's grid and tile, and whatever the body asks for."""
    asked = {n.axis for n in walk(*program.roots) if isinstance(n, Size)}
    loose = {*axes, *asked} - {TOKENS, over} - dict(static).keys()
    return (ScalarArg(f"n_{a}", "i32") for a in sorted(loose))


def stat_args(stats: tuple[str, ...], args: list[Arg]) -> Iterator[Arg]:
    """The least and the largest value of each block of keys, laid out as the input itself."""
    for arg in args:
        if isinstance(arg, TensorArg) and arg.name in stats:
            yield TensorArg(f"{arg.name}_least", arg.pattern, arg.dtype, False, False)
            yield TensorArg(f"{arg.name}_most", arg.pattern, arg.dtype, False, False)


def lse_pattern(fold: SoftmaxFold, packed: bool) -> Pattern:
    """The lse as kernels take it: one memory axis an axis, and a last one of size 1."""
    axes = [a for a in (*fold.batch_axes, *fold.row_axes) if not (packed and a == "B")]
    return Pattern((*((a,) for a in axes), ("one",)))


def partials(prefix: str, *, written: bool, plain: bool) -> list[Arg]:
    """Parameters for one pass' partial results; a plain sum has only ``u``."""
    names = ("u",) if plain else ("m", "l", "u")
    return [TensorArg(f"{prefix}_{n}", parse("i"), "fp32", written, True) for n in names]


def stored(nodes: Iterable[Node], spec: Spec) -> str:
    """The element type that operands are stored in; fp32 if any of them is.

    Beside a quantised key, which is widened to fp16, a bf16 query becomes fp16 with a power of two
    for each row.
    """
    names = {n.name for n in walk(*nodes) if isinstance(n, Input) and n.axes}
    types = {spec.operand(name) for name in names}
    if types == {"bf16", "fp16"} and names & {s.name for s in spec.quantised}:
        return "fp16"
    return types.pop() if len(types) == 1 else "fp32"


def rows_of(tile_axes: tuple[str, ...], spec: Spec, phase: str) -> int:
    """About how many rows one sequence has; a group sized at run time counts as 64."""
    sizes = dict(spec.static)
    tokens = 1 if phase == "decode" else 1 << 20
    tokens = tokens if spec.packed else dict(spec.buckets).get(TOKENS, tokens)
    return tokens * prod(sizes.get(a, 64) for a in tile_axes if a != TOKENS)


def first_part(fold: SoftmaxFold, tiles: Tiles, uniform: set[str]) -> int:
    """The first loop that exists: few rows, or a mask without a clear inside, have only masked."""
    mask = fold.mask
    if tiles.block_m == 16:
        return 2
    if mask is None:
        return 1
    if len(mask.clauses) != 1 or mask.clauses[0].residual:
        return 2
    bands = mask.clauses[0].bands
    if any(not set(axes_of(b.offset)) <= uniform for b in bands):
        return 2
    return 0 if any(b.s > 0 for b in bands) else 1


UNROLLED = 4
"""Steps of an inner sum that are unrolled; a longer one stays a loop."""


def unrolled(node: Contract | Reduce, spec: Spec) -> bool:
    """Whether the loop of an inner sum is unrolled."""
    return prod(spec.size(a) for a in node.over) <= UNROLLED


def score_tiles(fold: SoftmaxFold) -> int:
    """About how many values a score keeps of each of a tile's elements."""
    wide = [n for n in walk(fold.score) if isinstance(n, (Between, Take))]
    return len(fold.dots) + 2 * len(wide) + 2 * len(inner_sums(fold))
