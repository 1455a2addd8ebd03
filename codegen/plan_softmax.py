"""Plans of the softmax family: the tiled fold, the merge of its splits, and appending to caches.

The fold works on a score tile ``[m, n]``: rows are the query's own axes, tokens slowest, packed
into one index; columns are history positions. So one skeleton serves prefill and decode, and any
group size. Folds that share score and mask share a pass; several passes write partials, and the
merge finishes them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from attncc.codegen.forms import Refusal, SoftmaxFold, SoftmaxForm
from attncc.codegen.intervals import tightened_by
from attncc.codegen.plan import (
    Arg,
    KernelPlan,
    ScalarArg,
    Spec,
    TensorArg,
    in_chain,
)
from attncc.codegen.plan_append import AppendPlan, append_inside, page_size, plan_append
from attncc.codegen.plan_choices import choose_softmax, softmax_wanted
from attncc.codegen.plan_copies import copied_ahead, runs_ahead, without_descriptors
from attncc.codegen.plan_parts import (
    UNROLLED,
    aligned_folds,
    first_part,
    inputs,
    layout_args,
    outputs,
    partials,
    rows_of,
    score_tiles,
    size_args,
    stat_args,
    stored,
    unrolled,
)
from attncc.codegen.plan_passes import Pass, passes_of
from attncc.codegen.plan_reads import how_read, pages_early
from attncc.codegen.quantised import Scaled, with_room
from attncc.codegen.scanned_keys import scanned_keys
from attncc.codegen.softmax_checks import (
    TOKENS,
    betweens,
    inner_sums,
    mergeable,
    problems,
)
from attncc.codegen.tiles import choose_tiles, padded
from attncc.dsl.axes import parse
from attncc.dsl.ir import Program

FEW_ROWS = 64
"""Up to this many rows a sequence, the last program to finish merges its tile's partials itself."""

FEW_COLUMNS = 256
"""The same for the columns of a row: more take registers that the loop over keys has not."""

MERGED_SPLITS, MERGED_ELEMENTS = 8, 512
"""Splits that it combines at a time, and elements of their partials a warp."""

STAT_BLOCK = 64
"""Keys of a block whose least and largest values bound what a mask may show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxPlan(KernelPlan):
    """What the kernels of one fold share.

    Attributes:
        fold: the weighted sum, the first of several.
        passes: what this kernel folds, or merges.
        grid_axes: axes with one program instance per point, slowest first (packed: without B).
        tile_axes: axes packed into the rows of a tile, slowest (T) first.
        packed: sequences lie end to end along T.
        lengths: the history's length before the call comes from the device.
        aligned_end: the last query stands at the end of the history (the op's own cache).
        lse: the natural-log lse is also written.
        page: rows of a page of the history, 0 where it does not lie in pages.
        quantised: histories stored as e4m3 beside scales.
    """

    fold: SoftmaxFold
    passes: tuple[Pass, ...]
    grid_axes: tuple[str, ...]
    tile_axes: tuple[str, ...]
    packed: bool
    lengths: bool
    aligned_end: bool
    lse: bool
    page: int = 0
    quantised: tuple[Scaled, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledPlan(SoftmaxPlan):
    """One tile of query rows against the keys it may see, blocks of keys in a loop.

    Attributes:
        plain: a plain sum.
        block_m: rows of a tile.
        block_n: keys of a block.
        widths_k: length of each dot's contraction.
        blocks_k: the same, padded to powers of two.
        first_part: which loops exist: 0 masked, 1 fully visible, 2 masked; from this one on.
        split: the keys are cut into a run-time number of ranges, and partials are written.
        log_base: base of the partial maxima and sums (2).
        operand: element type of each dot's operands.
        backward: blocks of keys are visited from the last to the first.
        tighten: predicates hide blocks of keys beyond the mask's bands.
        stats: history inputs whose least and largest value per block of keys tighten the loop.
        stat_block: keys of such a block.
        unrolled: the loops of inner sums are.
        turned: the weighted sum is [e, m]; the scores' products have a region of their own.
        ahead: the scores of a block are multiplied before the values of the one before it.
        scanned: history inputs whose value at each key tightens the loop.
        appends: caches whose new rows it writes itself, before it reads them.
        grows: the last program of a sequence to merge adds its tokens to its length.
        pages_ahead: a block's pages are looked up in the round of the block before it.
        dealt: a range of n has every n-th block, so that the pages of its first ones are asked
            for before the sequence's length is there.
        warp_rows: rows that a warp copies at a time, where each warp's are of one page; else 0.
        paired: e4m3 values are read two columns at a time.
        fused: how the last program of a tile to finish merges the partials, if it does.
    """

    plain: bool
    block_m: int
    block_n: int
    widths_k: tuple[int, ...]
    blocks_k: tuple[int, ...]
    first_part: int
    split: bool
    log_base: int
    operand: tuple[str, ...]
    backward: bool
    tighten: bool
    stats: tuple[str, ...]
    stat_block: int
    unrolled: bool
    turned: bool = False
    ahead: bool = False
    pages_ahead: bool = False
    dealt: bool = False
    warp_rows: int = 0
    paired: bool = False
    scanned: tuple[str, ...] = ()
    appends: tuple[str, ...] = ()
    grows: bool = False
    fused: MergePlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan(SoftmaxPlan):
    """Partials of rows combined, then sink, epilogue, output and lse.

    Attributes:
        block_r: rows combined at a time.
        block_i: splits combined at a time.
        log_base: base of the partials' logarithms.
    """

    block_r: int
    block_i: int
    log_base: int


@dataclass(frozen=True, slots=True)
class SoftmaxPlans:
    """The kernels of one kind of call.

    Attributes:
        whole: all in one kernel, where there is one pass.
        parts: each pass as partials, where a merge can finish them.
        merge: combines the partials, unless the pass itself does (``fused``).
        fewer: the same for fewer partials of a row, fewest first, where values are wide.
        append: writes new rows into caches first, if the call has any and no part does it.
    """

    whole: TiledPlan | None
    parts: tuple[TiledPlan, ...]
    merge: MergePlan | None
    fewer: tuple[MergePlan, ...]
    append: AppendPlan | None

    @property
    def split(self) -> TiledPlan | None:
        """The first pass as partials."""
        return self.parts[0] if self.parts else None


def plan_softmax(
    program: Program, form: SoftmaxForm, spec: Spec, phase: str
) -> SoftmaxPlans | Refusal:
    """Plan the kernels of a softmax form.

    Args:
        program: the traced declaration; its form holds it with the folds expanded.
        form: its score form.
        spec: dtypes, static sizes, layouts and options of the call.
        phase: ``prefill`` or ``decode``.

    Returns:
        The plans, or the reason (with its line) why there are none.
    """
    from attncc.codegen.plan_gluon import in_dialect  # its plans extend those of this module
    from attncc.codegen.plan_merge import fewer_plans, many_rows_plans, merge_plan
    from attncc.codegen.plan_shared import has_parts, parts_like

    program = form.program
    folds = aligned_folds(form.folds)
    if isinstance(folds, Refusal):
        return folds
    refusal = next(problems(program, folds, spec), None)
    if refusal is not None:
        return refusal
    passes = passes_of(folds, spec)
    whole = _tiled(program, passes[0], spec, phase) if len(passes) == 1 else None
    written = in_dialect(whole, spec)
    if isinstance(written, Refusal):
        return written
    whole = written
    parts: tuple[TiledPlan, ...] = ()
    fewer: tuple[MergePlan, ...] = ()
    merge = None
    if mergeable(program, folds, spec) and has_parts(whole, spec):
        parts = tuple(_split(_tiled(program, p, spec, phase), program, spec) for p in passes)
        parts = parts_like(whole, parts, spec)
        merge = merge_plan(program, passes, parts, spec)
        few = rows_of(merge.tile_axes, spec, phase) <= FEW_ROWS
        if len(parts) == 1 and few and max(c.block for c in passes[0].columns) <= FEW_COLUMNS:
            parts, merge = (_fused(parts[0], merge, spec),), None
        else:
            fewer = fewer_plans(merge) or (() if few else many_rows_plans(merge))
    elif whole is None:
        return Refusal("an epilogue over several folds that reads positions", folds[1].node.loc)
    over = program.history_axis or folds[0].over
    append = plan_append(program, over, spec) if spec.lengths else None
    parts = append_inside(program, spec, whole, parts)
    for plan in filter(None, (whole, *parts, merge, append)):
        [(name, count)] = Counter(p.name for p in plan.parameters).most_common(1)
        if count > 1:
            return Refusal(f"two kernel parameters are called {name}")
    return SoftmaxPlans(
        None if whole is None else in_chain(whole, spec),
        tuple(in_chain(part, spec) for part in parts),
        None if merge is None else in_chain(merge, spec),
        tuple(in_chain(other, spec) for other in fewer),
        None if append is None else in_chain(append, spec),
    )


def _tiled(program: Program, own: Pass, spec: Spec, phase: str) -> TiledPlan:
    fold = own.lead
    widths = tuple(prod(spec.size(a) for a in d.over) for d in fold.dots)
    blocks = tuple(padded(w) for w in widths)
    operand = tuple(stored((*d.query, *d.key), spec) for d in fold.dots)
    tile_axes = (TOKENS, *(a for a in fold.row_axes if a != TOKENS))
    narrow = "fp32" not in (*(c.type for c in own.columns), *operand)
    shared = min((c.shared for c in own.columns), default=-1)
    rows = rows_of(tile_axes, spec, phase)
    columns = sum(c.block for c in own.columns)
    sums = inner_sums(fold)
    tiles = choose_tiles(
        spec.target, 2 if narrow else 4, blocks, columns, rows, shared, scores=score_tiles(fold),
        more_queries=sum(blocks) * sum(UNROLLED - 1 for n in sums if unrolled(n, spec)),
    )  # fmt: skip
    values = "+".join("key" if c.shared >= 0 else str(c.block) for c in own.columns)
    scores = score_tiles(fold) + len(sums)
    dtype = operand[0] if narrow and operand else "fp32"
    dtype += "+e4m3" if spec.quantised else ""
    wanted = softmax_wanted(spec, phase, dtype, blocks, values, rows, scores)
    early = pages_early(fold, spec, rows)
    tiles, chosen = choose_softmax(spec, wanted, tiles, pages_ahead=early)
    ahead = copied_ahead(program, fold, own.columns, operand, spec) and tiles.num_stages > 1
    if not (ahead and all(unrolled(n, spec) for n in sums)):
        tiles = without_descriptors(tiles, max((*blocks, columns)), 2 if narrow else 4)
    tiles = with_room(tiles, spec.quantised, max(widths, default=0)) if narrow else tiles
    grid = tuple(a for a in fold.batch_axes if not (spec.packed and a == "B"))
    aligned = program.history_axis == fold.over
    lengths = spec.lengths and aligned
    stats = tightened_by(program, fold, spec) if phase == "prefill" else None
    behind = runs_ahead(own, tiles, spec, copied=ahead)
    plan = TiledPlan(
        op=program.name, phase=phase, template="triton/softmax_tiled.py.jinja", program=program,
        args=(), static=spec.static, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        precision="ieee" if narrow else "tf32x3", fold=fold, passes=(own,), grid_axes=grid,
        tile_axes=tile_axes, packed=spec.packed, lengths=lengths, aligned_end=aligned,
        lse=spec.return_lse, page=page_size(spec) if lengths else 0, plain=own.plain,
        block_m=tiles.block_m, block_n=tiles.block_n, widths_k=widths, blocks_k=blocks,
        first_part=first_part(fold, tiles, {*grid, "B"}) if stats is None else 0, split=False,
        log_base=2, operand=operand, backward=bool(betweens(fold)), tighten=stats is not None,
        stats=stats or (), quantised=spec.quantised,
        stat_block=STAT_BLOCK, unrolled=all(unrolled(n, spec) for n in sums), chosen=chosen,
        turned=tiles.still_turned, ahead=behind,
        scanned=scanned_keys(fold) if phase == "decode" else (),
    )  # fmt: skip
    plan = how_read(plan, spec, early=early)
    args: list[Arg] = [*inputs(program, spec, tuple(o.value for o in program.outputs))]
    args += [*outputs(program, (fold,), spec), *_layout(plan), *stat_args(plan.stats, args)]
    args += [ScalarArg("tiles", "i32"), *_sizes(program, plan)]
    return replace(plan, args=tuple(args))


def _split(whole: TiledPlan, program: Program, spec: Spec) -> TiledPlan:
    """The same pass writing partials: no output, no lse, no sink."""
    fold, [own] = whole.fold, whole.passes
    values = [v for c in own.columns for v in c.fold.value]
    kept = tuple(n for n in (fold.score, fold.where, *values) if n is not None)
    args: list[Arg] = [*inputs(program, spec, kept)]
    args += [*_layout(whole), *stat_args(whole.stats, args)]
    args += [ScalarArg("tiles", "i32"), *_sizes(program, whole)]
    args += partials("part", written=True, plain=own.plain)
    args += [ScalarArg("splits", "i32"), ScalarArg("rows", "i32")]
    suffix = f"split{own.index}" if own.index else "split"
    return replace(whole, phase=f"{whole.phase}_{suffix}", args=tuple(args), split=True, lse=False)


def _fused(split: TiledPlan, merge: MergePlan, spec: Spec) -> TiledPlan:
    """The pass with its merge: whoever of a tile's programs counts the last arrival does it."""
    rows = rows_of(merge.tile_axes, spec, "decode" if "decode" in split.phase else "prefill")
    widest = max(c.block for c in split.passes[0].columns)
    room = MERGED_ELEMENTS * split.num_warps // (MERGED_SPLITS * widest)
    block_r = max(1, min(room, split.block_m, 1 << max(rows - 1, 0).bit_length()))
    merge = replace(merge, block_r=block_r, block_i=MERGED_SPLITS, num_warps=split.num_warps)
    have = {a.name for a in split.args} | {a.name for a in merge.args if "part0" in a.name}
    more = [a for a in merge.args if a.name not in have and a.name != "splits0"]
    counter = TensorArg("arrivals", parse("i"), "i32", True, True)
    return replace(split, args=(*split.args, *more, counter), fused=merge)


def _layout(plan: TiledPlan) -> Iterator[Arg]:
    dealt = [ScalarArg("room", "i32")] if plan.dealt else []
    return iter(
        [*layout_args(packed=plan.packed, lengths=plan.lengths, paged=bool(plan.page)), *dealt]
    )


def _sizes(program: Program, plan: SoftmaxPlan) -> Iterator[ScalarArg]:
    return size_args(program, (*plan.grid_axes, *plan.tile_axes), plan.fold.over, plan.static)
