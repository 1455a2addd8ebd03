"""Plans of the fold over the rows that a selection picked, and of everything a call launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from attncc.codegen.forms import Refusal, SelectedForm, Selection
from attncc.codegen.plan import Arg, KernelPlan, ScalarArg, Spec, in_chain
from attncc.codegen.plan_append import AppendPlan, page_size, plan_append
from attncc.codegen.plan_choices import choose_selected, selected_wanted
from attncc.codegen.plan_parts import inputs, outputs, partials, stored
from attncc.codegen.plan_passes import Pass, passes_of
from attncc.codegen.plan_selected import (
    ScorePlan,
    SelectPlan,
    layout,
    loose,
    named,
    picked,
    plan_count,
    plan_pick,
    plan_score,
    plan_sort,
    power,
)
from attncc.codegen.plan_softmax import MergePlan, SoftmaxPlan
from attncc.codegen.plan_table import Family
from attncc.codegen.quantised import Scaled
from attncc.codegen.selected_checks import only_folds, selected_problems
from attncc.codegen.softmax_checks import TOKENS, mergeable, outside
from attncc.codegen.target import shared_limit
from attncc.codegen.tiles import TURNED, Tiles, padded
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime, Node

WIDE = 256
"""Columns above which rows that pass through registers leave room for tiles of 32 rows only."""

TURNED_PICKED = replace(TURNED, num_stages=5)
TURNED_PAGED = replace(TURNED, block_n=32, num_stages=7)
"""With so many stages two blocks of picked rows are in shared memory, one of them on its way; what
finds a row's page takes registers, and leaves none for blocks of 64."""

FEW, MANY = 2, 32
"""Partials of a row of narrow values that a merge reads at a time, and another one."""

_TENSOR_MEMORY = 100
"""From this target on products add up in tensor memory, and weights pass through shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan(SoftmaxPlan):
    """A tile of a token's query rows against the rows of the history that were picked for it.

    Attributes:
        selection: what picks them.
        k: how many at most.
        block_m: query rows of a tile.
        block_n: picked rows of a block.
        widths_k: length of each dot's contraction.
        blocks_k: the same, padded to powers of two.
        operand: element type of each dot's operands.
        split: the picked rows are cut into a run-time number of ranges, and partials are written.
        turned: the weighted sum is [e, m]; the scores' products have a region of their own.
        block_t: 1, the tokens of a tile.
    """

    selection: Selection
    k: int
    block_m: int
    block_n: int
    widths_k: tuple[int, ...]
    blocks_k: tuple[int, ...]
    operand: tuple[str, ...]
    split: bool = False
    turned: bool = False
    block_t: int = 1


@dataclass(frozen=True, slots=True)
class SelectedPlans:
    """The kernels of one kind of call, in launch order.

    Attributes:
        append: writes new rows into caches first, if the call has any.
        score: orders the history for each token.
        count: counts the second digit.
        pick: collects what was found.
        sort: puts it in order.
        whole: the fold over the picked rows, if there is one.
        part: the same as partials, where a merge can finish them.
        idle: the same for calls whose programs leave multiprocessors idle, if it is another.
        merge: combines them.
        fewer: the same for fewer partials of a row, fewest first.
    """

    append: AppendPlan | None
    score: ScorePlan
    count: SelectPlan
    pick: SelectPlan
    sort: SelectPlan
    whole: GatherPlan | None
    part: GatherPlan | None
    idle: GatherPlan | None
    merge: MergePlan | None
    fewer: tuple[MergePlan, ...]

    @property
    def all(self) -> tuple[KernelPlan, ...]:
        """Every kernel that there is."""
        found = (self.append, self.score, self.count, self.pick, self.sort, self.whole, self.part)
        more = (self.idle, self.merge, *self.fewer)
        return tuple(plan for plan in (*found, *more) if plan is not None)


def plan_selected(form: SelectedForm, spec: Spec, phase: str) -> SelectedPlans | Refusal:
    """Plan the kernels of a selection and of the fold over what it picks.

    Args:
        form: the two stages.
        spec: dtypes, static sizes, layouts and options of the call.
        phase: ``prefill`` or ``decode``.

    Returns:
        The plans, or the reason (with its line) why there are none.
    """
    from attncc.codegen.plan_merge import fewer_plans  # likewise
    from attncc.codegen.plan_picked import in_picked_dialect, shared_out  # these extend those here

    refusal = next(selected_problems(form, spec), None)
    if refusal is not None:
        return refusal
    node, program = form.selection.node, form.program
    score = plan_score(form, spec, phase)
    append = plan_append(program, node.over, spec) if spec.lengths else None
    fewer: tuple[MergePlan, ...] = ()
    whole = part = merge = None
    if form.folds:
        passes = passes_of(form.folds, spec)
        whole = _gather(form, passes, spec, phase)
        if mergeable(only_folds(form), form.folds, spec):
            part = _split(form, whole, spec)
            merge = _merge(form, part, spec, MANY)
            fewer = fewer_plans(merge) or (_merge(form, part, spec, FEW),)
    written = [plan and in_picked_dialect(plan, spec, phase) for plan in (whole, part)]
    refused = next((plan for plan in written if isinstance(plan, Refusal)), None)
    if refused is not None:
        return refused
    last = written[1]
    assert not isinstance(last, Refusal)
    found: tuple[Any, ...] = (
        append, score, plan_count(form, score), plan_pick(form, score),
        plan_sort(form, score, spec), *written, shared_out(last), merge,
    )  # fmt: skip
    made: list[Any] = [plan if plan is None else in_chain(plan, spec) for plan in found]
    made.append(tuple(in_chain(plan, spec) for plan in fewer))
    return SelectedPlans(*made)


# --- the fold over what was picked -----------------------------------------------------------


def _gather(form: SelectedForm, passes: tuple[Pass, ...], spec: Spec, phase: str) -> GatherPlan:
    fold, program = form.folds[0], only_folds(form)
    widths = tuple(prod(spec.size(a) for a in d.over) for d in fold.dots)
    blocks = tuple(padded(w) for w in widths)
    operand = tuple(stored((*d.query, *d.key), spec) for d in fold.dots)
    [own] = passes
    wide = "fp32" in (*(c.type for c in own.columns), *operand)
    inner = tuple(a for a in fold.row_axes if a != TOKENS)
    rows = prod(dict(spec.static).get(a, 64) for a in inner)
    columns = sum(c.block for c in own.columns)
    quantised, through = _quantised(form, spec), _through_registers(form, spec)
    queries = sum(blocks)
    keys = queries + sum(c.block for c in own.columns if c.shared < 0)
    rule = _turned(spec, own, queries, rows, wide=wide or through)
    if rule is None:
        most = 32 if max(columns, *blocks) > WIDE and through else 64
        block_m = 16 if wide else max(16, min(most, power(rows)))
        block_n, stages = _gathered(spec, block_m, queries, keys, wide)
        rule = Tiles(block_m, block_n, 8 if max(columns, *blocks) > 128 else 4, stages)
    facts = {"columns": columns, "rows": rows, "picked": form.selection.node.k}
    wanted = selected_wanted(
        Family.PICKED, spec, phase, named(operand, wide, quantised), blocks, **facts
    )
    tiles, chosen = choose_selected(spec, wanted, rule)
    grid = tuple(a for a in fold.batch_axes if a not in ("B", TOKENS))
    plan = GatherPlan(
        op=program.name, phase=f"{phase}_picked", template="triton/select_fold.py.jinja",
        program=program, args=(), static=spec.static,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        precision="tf32x3" if wide else "ieee", fold=fold, passes=passes,
        grid_axes=grid, tile_axes=(TOKENS, *inner), packed=spec.packed, lengths=spec.lengths,
        aligned_end=True, lse=spec.return_lse, page=page_size(spec),
        selection=form.selection, k=form.selection.node.k, block_m=tiles.block_m,
        block_n=tiles.block_n, widths_k=widths, blocks_k=blocks, operand=operand,
        quantised=quantised, chosen=chosen, turned=tiles.still_turned,
    )  # fmt: skip
    rest = tuple(outside(only_folds(form), form.folds))
    args = [*_fold_inputs(form, spec, rest), *outputs(only_folds(form), (fold,), spec)]
    args += [*_fold_args(form, plan, spec)]
    return replace(plan, args=tuple(args))


def _turned(spec: Spec, own: Pass, queries: int, rows: int, *, wide: bool) -> Tiles | None:
    """Tiles whose sum is turned, for a value of 512 columns whose tile is the keys' tile too.

    Each of two warpgroups multiplies half of the value's columns, and half of a block's scores: by
    rows both would multiply all scores of 64 rows, 16 picked rows at a time.
    """
    [column, *more] = own.columns
    fits = spec.target.startswith("sm_90") and not wide and not more and rows > 32
    if not fits or column.shared < 0 or column.block != 512:
        return None
    element, tiles = 2, TURNED_PAGED if spec.pages else TURNED_PICKED
    room = (tiles.block_m + 2 * tiles.block_n) * queries + tiles.block_m * tiles.block_n
    return tiles if element * room <= shared_limit(spec.target) else None


def _histories(form: SelectedForm) -> set[str]:
    """Names of what the fold reads rows of."""
    below = [n for f in form.folds for n in (f.score, f.where, *f.value) if n is not None]
    return {n.name for n in walk(*below) if isinstance(n, Input) and n.lifetime is Lifetime.CACHE}


def _quantised(form: SelectedForm, spec: Spec) -> tuple[Scaled, ...]:
    """The picked rows that are stored as e4m3 beside scales."""
    return tuple(s for s in spec.quantised if s.name in _histories(form))


def _through_registers(form: SelectedForm, spec: Spec) -> bool:
    """Whether picked rows are widened, or cannot be copied to shared memory 16 bytes at a time."""
    return bool(_quantised(form, spec)) or not _histories(form) <= spec.aligned


def _gathered(
    spec: Spec, block_m: int, queries: int, keys: int, wide: bool
) -> tuple[int, int]:  # fmt: skip
    """Picked rows of a block, and stages: a row's place is loaded a stage before the row itself."""
    element, block_n = 4 if wide else 2, 32
    room = shared_limit(spec.target) - element * block_m * (queries + 64)
    while block_n > 16 and 2 * element * block_n * keys > room:
        block_n //= 2
    most = 3 if int(spec.target.removeprefix("sm_")) < _TENSOR_MEMORY else 2
    buffers = max(1, min(most, room // (element * block_n * keys)))
    return block_n, 2 * buffers - 1


def _fold_inputs(form: SelectedForm, spec: Spec, rest: tuple[Node, ...]) -> Iterator[Arg]:
    below = [n for f in form.folds for n in (f.score, f.where, *f.value) if n is not None]
    return inputs(form.program, spec, (*walk(*below), *rest), flat=True)


def _fold_args(form: SelectedForm, plan: GatherPlan, spec: Spec) -> Iterator[Arg]:
    yield picked(form, spec, written=False)
    yield from layout(spec)
    yield from (ScalarArg(n, "i32") for n in ("splits", "row_tiles"))
    roots = tuple(o.value for o in plan.program.outputs)
    yield from loose(form.program, roots, spec, (*plan.grid_axes, *plan.tile_axes))


def _split(form: SelectedForm, whole: GatherPlan, spec: Spec) -> GatherPlan:
    args = [*_fold_inputs(form, spec, ()), *_fold_args(form, whole, spec)]
    args += [*partials("part", written=True, plain=False), ScalarArg("rows", "i32")]
    phase = f"{whole.phase}_split"
    return replace(whole, phase=phase, args=tuple(args), split=True, lse=False)


def _merge(form: SelectedForm, part: GatherPlan, spec: Spec, at_once: int) -> MergePlan:
    from attncc.codegen.plan_merge import MOST  # as above

    program, grid = part.program, part.grid_axes
    grid = grid if spec.packed else ("B", *grid)
    args = [*partials("part0", written=False, plain=False)]
    args += inputs(program, spec, tuple(outside(program, form.folds)), flat=True)
    args += outputs(program, form.folds, spec)
    args += [ScalarArg("splits0", "i32"), ScalarArg("rows", "i32")]
    roots = tuple(o.value for o in program.outputs)
    args += loose(program, roots, spec, (*grid, *part.tile_axes))
    columns = sum(c.block for p in part.passes for c in p.columns)
    if at_once == MANY and max(c.block for p in part.passes for c in p.columns) > WIDE:
        at_once = MOST
    each = max(1, min(8, at_once * columns // (32 * 64)))  # 64 numbers of a thread
    warps = 1 << (each.bit_length() - 1)
    return MergePlan(
        op=program.name, phase="merge" if at_once > FEW else f"merge_{FEW}",
        template="triton/softmax_merge.py.jinja", program=program,
        args=tuple(args), static=spec.static, num_warps=warps, num_stages=1,
        precision=part.precision,
        fold=part.fold, passes=part.passes, grid_axes=grid, tile_axes=part.tile_axes,
        packed=spec.packed, lengths=spec.lengths, aligned_end=True, lse=spec.return_lse,
        log_base=2, block_r=1, block_i=at_once,
    )  # fmt: skip
