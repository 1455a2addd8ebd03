"""Plans of the softmax family: the tiled fold, the merge of its splits, and appending to caches.

The fold works on a score tile ``[m, n]``: rows are the query's own axes, tokens slowest, packed
into one index; columns are history positions. So one skeleton serves prefill and decode, and any
group size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from attncc.codegen.forms import Refusal, SoftmaxFold, SoftmaxForm
from attncc.codegen.plan import Arg, KernelPlan, ScalarArg, Spec, TensorArg
from attncc.codegen.softmax_checks import TOKENS, mergeable, outside, problems, tensor_pattern
from attncc.codegen.tiles import Tiles, choose_tiles, padded
from attncc.dsl.axes import Pattern, parse
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Input, Kind, Lifetime, Node, Program, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxPlan(KernelPlan):
    """What the kernels of one fold share.

    Attributes:
        fold: the softmax-weighted sum.
        grid_axes: axes with one program instance per point, slowest first (packed: without B).
        tile_axes: axes packed into the rows of a tile, slowest (T) first.
        packed: sequences lie end to end along T.
        lengths: the history's length before the call comes from the device.
        aligned_end: the last query stands at the end of the history (the op's own cache).
        width_e: columns of the weighted sum.
        block_e: the same, padded to a power of two.
        lse: the natural-log lse is also written.
    """

    fold: SoftmaxFold
    grid_axes: tuple[str, ...]
    tile_axes: tuple[str, ...]
    packed: bool
    lengths: bool
    aligned_end: bool
    width_e: int
    block_e: int
    lse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledPlan(SoftmaxPlan):
    """One tile of query rows against the keys it may see, blocks of keys in a loop.

    Attributes:
        block_m: rows of a tile.
        block_n: keys of a block.
        widths_k: length of each dot's contraction.
        blocks_k: the same, padded to powers of two.
        first_part: which loops exist: 0 masked, 1 fully visible, 2 masked; from this one on.
        shared: the dot whose key tile is also the value tile, or -1.
        split: the keys are cut into a run-time number of ranges, and partials are written.
        log_base: base of the partial maxima and sums (2).
        operand: element type of each dot's operands.
        value_type: element type of the value tile.
    """

    block_m: int
    block_n: int
    widths_k: tuple[int, ...]
    blocks_k: tuple[int, ...]
    first_part: int
    shared: int
    split: bool
    log_base: int
    operand: tuple[str, ...]
    value_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan(SoftmaxPlan):
    """Partials of one row combined, then sink, epilogue, output and lse.

    Attributes:
        block_i: splits combined at a time.
        log_base: base of the partials' logarithms.
    """

    block_i: int
    log_base: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendPlan(KernelPlan):
    """New rows of every history copied behind what a cache already holds.

    Attributes:
        histories: names of the caches.
        packed: new rows lie end to end along T.
        over: the history axis.
        block: elements of a row copied by one program instance.
    """

    histories: tuple[str, ...]
    packed: bool
    over: str
    block: int


@dataclass(frozen=True, slots=True)
class SoftmaxPlans:
    """The kernels of one kind of call.

    Attributes:
        whole: the fold in one pass.
        split: the fold as partials, where a merge can finish it.
        merge: combines the partials.
        append: writes new rows into caches first, if the call has any.
    """

    whole: TiledPlan
    split: TiledPlan | None
    merge: MergePlan | None
    append: AppendPlan | None


def plan_softmax(
    program: Program, form: SoftmaxForm, spec: Spec, phase: str
) -> SoftmaxPlans | Refusal:
    """Plan the kernels of a softmax form.

    Args:
        program: the traced declaration.
        form: its score form.
        spec: dtypes, static sizes, layouts and options of the call.
        phase: ``prefill`` or ``decode``.

    Returns:
        The plans, or the reason (with its line) why there are none.
    """
    if len(form.folds) != 1:
        return Refusal("several softmax folds", form.folds[1].node.loc)
    fold = form.folds[0]
    refusal = next(problems(program, fold, spec), None)
    if refusal is not None:
        return refusal
    whole = _tiled(program, fold, spec, phase)
    split = merge = None
    if mergeable(program, fold, spec):
        split = _split(program, whole)
        merge = _merge(program, whole, spec)
    append = _append(program, fold, spec) if spec.lengths else None
    plans = SoftmaxPlans(whole, split, merge, append)
    for plan in filter(None, (whole, split, merge, append)):
        [(name, count)] = Counter(p.name for p in plan.parameters).most_common(1)
        if count > 1:
            return Refusal(f"two kernel parameters are called {name}")
    return plans


def _tiled(program: Program, fold: SoftmaxFold, spec: Spec, phase: str) -> TiledPlan:
    static = dict(spec.static)
    widths = tuple(prod(static[a] for a in d.over) for d in fold.dots)
    blocks = tuple(padded(w) for w in widths)
    width_e = prod(static[a] for a in fold.value_axes)
    value_type = _stored(fold.value, spec)
    operand = tuple(_stored((*d.query, *d.key), spec) for d in fold.dots)
    tile_axes = (TOKENS, *(a for a in fold.row_axes if a != TOKENS))
    narrow = "fp32" not in (value_type, *operand)
    shared = _shared(fold)
    rows = _rows(tile_axes, spec, phase)
    tiles = choose_tiles(spec.target, 2 if narrow else 4, blocks, padded(width_e), rows, shared)
    grid = tuple(a for a in fold.batch_axes if not (spec.packed and a == "B"))
    plan = TiledPlan(
        op=program.name, phase=phase, template="triton/softmax_tiled.py.jinja", program=program,
        args=(), static=spec.static, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        precision="ieee" if narrow else "tf32x3", fold=fold, grid_axes=grid, tile_axes=tile_axes,
        packed=spec.packed, lengths=spec.lengths, aligned_end=program.history_axis == fold.over,
        width_e=width_e, block_e=padded(width_e), lse=spec.return_lse, block_m=tiles.block_m,
        block_n=tiles.block_n, widths_k=widths, blocks_k=blocks,
        first_part=_first_part(fold, tiles, {*grid, "B"}), shared=shared, split=False, log_base=2,
        operand=operand, value_type=value_type,
    )  # fmt: skip
    inputs = _inputs(program, spec, _roots(program))
    args: list[Arg] = [*inputs, *_outputs(program, fold, spec), *_layout_args(plan)]
    args += [ScalarArg("tiles", "i32"), *_sizes(program, plan)]
    return replace(plan, args=tuple(args))


def _layout_args(plan: TiledPlan) -> Iterator[Arg]:
    """Arguments that say where sequences lie and how long they are."""
    if plan.packed:
        yield _vector("cu_seqlens")
        yield _vector("tile_table")
        if not plan.lengths:
            yield _vector("cu_seqlens_k")
    else:
        yield ScalarArg("T", "i32")
    if plan.lengths:
        yield _vector("lengths")
    elif not plan.packed:
        yield ScalarArg("S", "i32")


def _split(program: Program, whole: TiledPlan) -> TiledPlan:
    """The same fold writing partials: no output, no lse, no sink."""
    fold, where = whole.fold, whole.fold.softmax.where
    kept = walk(fold.softmax.score, *fold.value, *(() if where is None else (where,)))
    done = {n.name for n in kept if isinstance(n, Input)}
    dropped = {f"out_{o.name}" for o in program.outputs} | {"out_lse"}
    dropped |= {t.name for t in program.tensors if t.name not in done}
    dropped |= {f"p_{t.name}" for t in program.tensors if t.name not in done}
    args = [a for a in whole.args if a.name not in dropped]
    args += _partials(written=True)
    args += [ScalarArg("splits", "i32"), ScalarArg("rows", "i32")]
    return replace(whole, phase=f"{whole.phase}_split", args=tuple(args), split=True, lse=False)


def _merge(program: Program, whole: TiledPlan, spec: Spec) -> MergePlan:
    fold = whole.fold
    inputs = _inputs(program, spec, tuple(outside(program, fold)), flat=True)
    args: list[Arg] = [*_partials(written=False), *inputs, *_outputs(program, fold, spec)]
    args += [ScalarArg("splits", "i32"), ScalarArg("rows", "i32"), *_sizes(program, whole)]
    return MergePlan(
        op=program.name, phase="merge", template="triton/softmax_merge.py.jinja", program=program,
        args=tuple(args), static=spec.static, num_warps=4, num_stages=1, precision="ieee",
        fold=fold, grid_axes=whole.grid_axes, tile_axes=whole.tile_axes, packed=spec.packed,
        lengths=spec.lengths, aligned_end=whole.aligned_end, width_e=whole.width_e,
        block_e=whole.block_e, lse=spec.return_lse, log_base=whole.log_base,
        block_i=16 if whole.block_e <= 128 else 8,
    )  # fmt: skip


def _append(program: Program, fold: SoftmaxFold, spec: Spec) -> AppendPlan | None:
    caches = [t for t in program.tensors if t.lifetime is Lifetime.CACHE]
    args: list[Arg] = []
    for t in caches:
        new = Pattern(tuple(tuple(TOKENS if a == fold.over else a for a in d) for d in t.pattern))
        new = new.without("B") if spec.packed else new
        name, dtype = f"new_{t.name}", spec.dtype(t.name)
        given = dict(spec.dtypes).get(name, dtype)
        args.append(TensorArg(name, new, given, False, name in spec.aligned))
        args.append(TensorArg(t.name, t.pattern, dtype, True, t.name in spec.aligned))
    args.append(_vector("lengths"))
    if spec.packed:
        args += [_vector("cu_seqlens"), ScalarArg("sequences", "i32"), ScalarArg("steps", "i32")]
    else:
        args.append(ScalarArg("T", "i32"))
    args += [ScalarArg("S", "i32"), ScalarArg("chunks", "i32")]  # S: rows a cache has room for
    loose = {a for t in caches for a in t.pattern.axes} - {"B", fold.over}
    args += [ScalarArg(f"n_{a}", "i32") for a in sorted(loose - dict(spec.static).keys())]
    return AppendPlan(
        op=program.name, phase="append", template="triton/append.py.jinja", program=program,
        args=tuple(args), static=spec.static, num_warps=4, num_stages=1, precision="ieee",
        histories=tuple(t.name for t in caches), packed=spec.packed, over=fold.over, block=1024,
    )  # fmt: skip


# --- parts of plans --------------------------------------------------------------------------


def _inputs(
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


def _outputs(program: Program, fold: SoftmaxFold, spec: Spec) -> Iterator[TensorArg]:
    dtypes = dict(spec.dtypes)
    for o in program.outputs:
        pattern = o.pattern.without("B") if spec.packed else o.pattern
        dtype = dtypes.get(o.name, _stored(fold.value, spec))
        yield TensorArg(f"out_{o.name}", pattern, dtype, True, o.name in spec.aligned)
    if spec.return_lse:
        yield TensorArg("out_lse", lse_pattern(fold, spec.packed), "fp32", True, False)


def lse_pattern(fold: SoftmaxFold, packed: bool) -> Pattern:
    """The lse as kernels take it: one memory axis an axis, and a last one of size 1."""
    axes = [a for a in (*fold.batch_axes, *fold.row_axes) if not (packed and a == "B")]
    return Pattern((*((a,) for a in axes), ("one",)))


def _vector(name: str) -> TensorArg:
    return TensorArg(name, parse("i"), "i32", False, False)


def _partials(*, written: bool) -> list[Arg]:
    return [TensorArg(f"part_{n}", parse("i"), "fp32", written, True) for n in ("m", "l", "u")]


def _sizes(program: Program, plan: SoftmaxPlan) -> Iterator[ScalarArg]:
    """Run-time sizes the kernel needs: grid, tile, and whatever the body asks for."""
    asked = {n.axis for n in walk(*program.roots) if isinstance(n, Size)}
    axes = {*plan.grid_axes, *plan.tile_axes, *asked}
    loose = axes - {TOKENS, plan.fold.over} - dict(plan.static).keys()
    return (ScalarArg(f"n_{a}", "i32") for a in sorted(loose))


def _stored(nodes: Iterable[Node], spec: Spec) -> str:
    """The element type that operands are stored in; fp32 if any of them is."""
    types = {spec.dtype(n.name) for n in walk(*nodes) if isinstance(n, Input) and n.axes}
    return types.pop() if len(types) == 1 else "fp32"


def _shared(fold: SoftmaxFold) -> int:
    """The dot whose key tile is the value tile as well (a latent cache), or -1."""
    for i, dot in enumerate(fold.dots):
        if dot.key == fold.value and dot.over == fold.value_axes:
            return i
    return -1


def _rows(tile_axes: tuple[str, ...], spec: Spec, phase: str) -> int:
    """About how many rows one sequence has; a group sized at run time counts as 64."""
    sizes = dict(spec.static)
    tokens = 1 if phase == "decode" else 1 << 20
    tokens = tokens if spec.packed else dict(spec.buckets).get(TOKENS, tokens)
    return tokens * prod(sizes.get(a, 64) for a in tile_axes if a != TOKENS)


def _first_part(fold: SoftmaxFold, tiles: Tiles, uniform: set[str]) -> int:
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


def _roots(program: Program) -> tuple[Node, ...]:
    return tuple(o.value for o in program.outputs)
