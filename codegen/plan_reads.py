"""How a tile reads its keys and values: pages found ahead, rows by warps, columns in pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attncc.codegen.forms import SoftmaxFold
from attncc.codegen.plan import Spec
from attncc.codegen.plan_copies import ROWS
from attncc.codegen.plan_passes import Pass
from attncc.codegen.quantised import quantised_input
from attncc.codegen.softmax_checks import betweens

if TYPE_CHECKING:
    from attncc.codegen.plan_softmax import TiledPlan

COPIED = 512
"""Bytes of a tile that a warp copies with one instruction, 16 a thread."""

DEALT = True
"""Whether ranges of keys in pages are dealt out block by block (:func:`dealt`)."""

LEAST_COLUMNS = 32
"""Of a sum that is two products of half of them, each at least as wide as its copies."""


def how_read(plan: TiledPlan, spec: Spec, *, early: bool) -> TiledPlan:
    """The plan with the ways in which it reads its history.

    Args:
        plan: of one pass; its tile is fixed.
        spec: of the call.
        early: what :func:`pages_early` said.
    """
    early = early and plan.lengths and not plan.ahead
    return replace(
        plan, pages_ahead=early, dealt=early and dealt(plan),
        warp_rows=rows_by_warp(plan) if early else 0,
        paired=read_in_pairs(plan, plan.passes[0], spec),
    )  # fmt: skip


def pages_early(fold: SoftmaxFold, spec: Spec, rows: int) -> bool:
    """Whether each block of keys finds the pages of the next one, ahead of that one's keys.

    For the few rows of a decode step. Where a block's pages are loaded in its own round, Triton
    copies them through shared memory too, and divides the stages between them and the keys.

    Args:
        fold: the pass' first fold.
        spec: of the call.
        rows: about how many rows a sequence has.
    """
    return bool(spec.pages) and rows <= ROWS and not betweens(fold)


def dealt(plan: TiledPlan) -> bool:
    """Whether the first blocks of a range of keys are known before the sequence's length is.

    A length, an entry of the table and a key are three accesses of memory, each behind the one
    before. Range i of n has blocks i, i + n, ..., so the first two entries are asked for beside the
    length. A mask with a lower bound, or what else moves the first key, leaves ranges in one piece.
    """
    if not DEALT or plan.first_part < 2 or plan.scanned or plan.stats or plan.backward:
        return False
    mask = plan.fold.mask
    bands = [b for clause in mask.clauses for b in clause.bands] if mask else []
    power = plan.page & (plan.page - 1) == 0
    return power and all(b.s <= 0 for b in bands) and (mask is None or bool(mask.clauses))


def rows_by_warp(plan: TiledPlan) -> int:
    """Rows of a block that a warp copies at a time, where a warp's rows can be those of one page.

    Returns:
        The rows, or 0 where a block lies in one page, or pages and blocks do not divide each other:
        keys lie in order then.
    """
    page, keys = plan.page, plan.block_n
    if page >= keys or page & (page - 1) or keys < plan.num_warps:
        return 0
    element = 1 if plan.quantised else 4 if "fp32" in plan.operand[:1] else 2
    rows = max(1, COPIED // (element * max(plan.blocks_k[:1], default=16)))
    return rows if min(page, keys // plan.num_warps) % rows == 0 else 0


def read_in_pairs(plan: TiledPlan, own: Pass, spec: Spec) -> bool:
    """Whether e4m3 values are read as elements of 16 bits, two columns each.

    The matrix product takes values with keys side by side. What turns 16-bit elements on their way
    from shared memory does not exist for 8 bits, and moving bytes one by one takes longer than
    memory does (docs/performance.md). So even and odd columns are two sums, of 16-bit elements that
    are pulled apart in registers, and are put together after the loop.

    Args:
        plan: its tile is fixed; a wgmma would have its values in shared memory again.
        own: the pass.
        spec: of the call.
    """
    column = own.columns[0]
    if len(own.columns) > 1 or column.shared >= 0 or plan.block_m > ROWS:
        return False
    value, axes = column.fold.value, column.fold.value_axes
    scaled = quantised_input(spec.quantised, value[0]) if len(value) == 1 else None
    if scaled is None or len(axes) > 1 or scaled.name not in spec.aligned:
        return False
    whole = scaled.block == column.width == column.block
    return whole and column.block >= LEAST_COLUMNS
