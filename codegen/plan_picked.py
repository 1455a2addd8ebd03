"""Plans of warp-specialised tiles over picked rows whose keys are their values too (Gluon).

The division of labour is that of :mod:`attncc.codegen.plan_shared`. What differs is where a block's
keys come from: the rows of the history that a selection picked lie anywhere, and Hopper's tensor
maps copy neighbours only. So a warpgroup of its own copies them, 16 bytes a thread and copy, into
the same rings, whose barriers count each thread's copies as they end. That is how the sparse
attention of FlashMLA (DeepSeek, 2025) reads its rows on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_choices import softmax_wanted
from attncc.codegen.plan_gathered import GatherPlan
from attncc.codegen.plan_shared import (
    ELEMENT_WISE,
    HALF,
    LSE,
    MORE,
    ROWS,
    TARGETS,
    SharedChoice,
    carried,
    product_sum,
    shared_bytes,
    tiles_of,
)
from attncc.codegen.plan_table import RULE, Family, decide
from attncc.codegen.softmax_checks import TOKENS, betweens, inner_sums
from attncc.codegen.target import shared_limit
from attncc.codegen.tiles import Tiles
from attncc.codegen.warp_forms import above
from attncc.dsl.ir import Input, Lit

LOADERS = 4
"""Warps that copy picked rows: 36 copies of 16 bytes a thread make a block of 512 + 64 columns."""
CHOSEN = ("block_n", "stages", "late", "ahead", "staged", "shares")
"""What an entry of a table may say of it."""
MORE_LOADING = 72
"""32-bit registers of a thread that loads where the columns of pieces are found at run time."""
LATE, AHEAD, STAGED, SHARES = True, False, True, 1
"""The rule's answers for :attr:`PickedPlan.late`, ``ahead``, ``staged`` and ``idle_shares``: the
first two are those that dense keys took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedPlan(GatherPlan):
    """A tile of 64 rows of a token over picked rows, whose columns two warpgroups share.

    ``num_warps`` counts the warps of one warpgroup, ``num_stages`` the blocks of picked rows in
    shared memory; the other attributes are those of :class:`SharedPlan`.

    Attributes:
        part_e: columns of the value a warpgroup.
        consumers: warpgroups that multiply.
        consumer_registers: 32-bit registers of the second one's threads.
        producer_registers: of the threads of the warps that load.
        copied: picked rows that are copied at once: a block's.
        loaders: warps that load.
        late: the second warpgroup multiplies when the next block's scores are there.
        ahead: a block's scores are multiplied before the values of the one before it.
        released: the merge may be launched while this kernel runs; it waits for its end.
        staged: sums pass through the place of their keys, and leave in whole lines of memory.
        shares: programs among which the columns of a row's value are shared out; each multiplies
            all of its scores.
        idle_shares: the same of a call whose programs leave multiprocessors idle.
    """

    part_e: int
    consumers: int
    consumer_registers: int
    producer_registers: int
    copied: int
    loaders: int
    late: bool
    ahead: bool
    released: bool
    staged: bool
    shares: int
    idle_shares: int


def in_picked_dialect(whole: GatherPlan, spec: Spec, phase: str) -> GatherPlan | Refusal:
    """The plan in the dialect that the call names, or that the table of measured plans names.

    Args:
        whole: the plan of the Triton tile.
        spec: of the call.
        phase: ``prefill`` or ``decode``; entries are for ``<phase>_picked``.

    Returns:
        The given plan, its warp-specialised form, or why a dialect that was asked for by name
        cannot have it.
    """
    if spec.dialect not in (None, Dialect.GLUON):
        return whole
    [own] = whole.passes
    values = "+".join("key" if c.shared >= 0 else str(c.block) for c in own.columns)
    rows = _rows(whole, spec)
    dtype = whole.operand[0] if whole.operand else "fp32"
    wanted = softmax_wanted(
        spec, f"{phase}_picked", dtype, whole.blocks_k, values, rows, len(whole.fold.dots)
    )
    chosen, fixed = decide(
        type(wanted)(Family.WARP, wanted.facts, wanted.sizes), spec.target, spec.tuned
    )
    if spec.dialect is None and chosen == RULE:
        return whole
    held: dict[str, Any] = {k: v for k, v in fixed if k in CHOSEN}
    found = picked_plan(whole, spec, chosen, SharedChoice(**held))
    return whole if isinstance(found, Refusal) and spec.dialect is None else found


def picked_plan(
    whole: GatherPlan, spec: Spec, chosen: str = RULE, choice: SharedChoice | None = None
) -> PickedPlan | Refusal:
    """The warp-specialised form of a tile over picked rows whose keys are its values too.

    Args:
        whole: the plan of the Triton tile: all picks, or a range of them as partials.
        spec: of the call.
        chosen: who chose it.
        choice: what may be chosen freely.

    Returns:
        The plan, or why the tile has no such form.
    """
    choice = choice or SharedChoice()
    tiles = tiles_of(choice)
    reason = _problem(whole, spec, tiles)
    if reason is not None:
        return Refusal(reason, whole.fold.node.loc)
    return PickedPlan(**carried(whole, spec, tiles, chosen) | {
        "template": "gluon/select_shared.py.jinja", "copied": tiles.block_n, "loaders": LOADERS,
        "late": LATE if choice.late is None else choice.late,
        "ahead": AHEAD if choice.ahead is None else choice.ahead,
        "staged": _staged(choice) and whole.split and _fits_in_place(tiles), "shares": 1,
        "idle_shares": (choice.shares or SHARES) if whole.split else 1,
    })  # fmt: skip


def _staged(choice: SharedChoice) -> bool:
    return STAGED if choice.staged is None else choice.staged


def _fits_in_place(tiles: Tiles) -> bool:
    """Whether a warpgroup's sums, in fp32, are as large as its blocks of keys, in 16 bits."""
    return 2 * tiles.num_stages * tiles.block_n == 4 * ROWS


def shared_out(part: GatherPlan | None) -> PickedPlan | None:
    """The partials of a call of few programs: more of them, which leave less each.

    Args:
        part: the plan of partials, in whatever dialect.
    """
    if not isinstance(part, PickedPlan) or part.idle_shares == 1:
        return None
    shares = part.idle_shares
    return replace(
        part, phase=f"{part.phase}_{shares}", shares=shares, part_e=part.part_e // shares,
        producer_registers=MORE_LOADING,
    )  # fmt: skip


# --- what the skeleton does not cover --------------------------------------------------------


def _rows(whole: GatherPlan, spec: Spec) -> int:
    """Query rows of a token; those sized at run time count as many."""
    sizes, found = dict(spec.static), 1
    for axis in whole.tile_axes:
        found *= 1 if axis == TOKENS else sizes.get(axis, ROWS)
    return found


def _problem(whole: GatherPlan, spec: Spec, tiles: Tiles) -> str | None:
    """The first reason why a tile has no such form."""
    fold = whole.fold
    [own] = whole.passes
    checks = (
        (spec.target not in TARGETS, f"it is written for {', '.join(TARGETS)}, not {spec.target}"),
        (spec.return_lse, LSE),
        (whole.packed, "sequences lie end to end"),
        (bool(whole.quantised), "the history is quantised"),
        (len(own.columns) != 1 or bool(fold.beside), "several folds"),
        (bool(betweens(fold) or inner_sums(fold)), "sums between positions, or over products"),
        (fold.where is not None and not isinstance(fold.where, Lit), "a mask beside the picks"),
        (_rows(whole, spec) <= ROWS // 2, "half of a tile's rows would be empty"),
    )
    found = next((reason for failed, reason in checks if failed), None)
    return found or _operand_problem(whole, spec, tiles) or _score_problem(whole)


def _operand_problem(whole: GatherPlan, spec: Spec, tiles: Tiles) -> str | None:
    [columns] = whole.passes[0].columns
    types = {*whole.operand, columns.type}
    checks = (
        (columns.shared != 0 or columns.width != 2 * HALF, "values are not the keys"),
        (any(w not in MORE for w in whole.widths_k[1:]), f"further products not of {MORE}"),
        (len(types) != 1 or not types <= {"bf16", "fp16"}, "operands of several or wide types"),
        (shared_bytes(whole.widths_k, tiles) > shared_limit(spec.target), "blocks do not fit"),
    )
    found = next((reason for failed, reason in checks if failed), None)
    keys = (_copy_problem(whole, dot.key, dot.over) for dot in whole.fold.dots)
    return found or next((reason for reason in keys if reason), None)


def _copy_problem(whole: GatherPlan, key: tuple[Any, ...], axes: tuple[str, ...]) -> str | None:
    """Why rows cannot be copied 16 bytes at a time."""
    [node, *more] = key
    if more or not isinstance(node, Input):
        return "keys are computed"
    arg = whole.tensor(node.name)
    if not arg.aligned or arg.pattern.dims[-1] != axes:
        return f"rows of {node.name} [{arg.pattern}] are not in pieces of 16 bytes"
    return None


def _score_problem(whole: GatherPlan) -> str | None:
    """Products have to be added first; all else has to be element by element."""
    fold = whole.fold
    if product_sum(fold.score, fold.dots) is None:
        return "products that are not added to each other"
    dots = frozenset(d.node for d in fold.dots)
    roots = [(root, dots) for root in (fold.score, fold.sink) if root is not None]
    roots += [(out.value, frozenset({fold.node})) for out in whole.program.outputs]
    for root, closed in roots:
        for node in above(root, closed):
            if not isinstance(node, ELEMENT_WISE):
                return f"{type(node).__name__.lower()} in the score or around it"
    return None
