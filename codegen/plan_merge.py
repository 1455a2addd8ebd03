"""Plans of the kernels that combine a row's partials."""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.plan import Arg, ScalarArg, Spec
from attncc.codegen.plan_parts import inputs, outputs, partials, size_args
from attncc.codegen.plan_passes import Pass
from attncc.codegen.plan_softmax import MergePlan, TiledPlan
from attncc.codegen.softmax_checks import outside
from attncc.dsl.ir import Program

WIDE = 256
"""Columns from which values are wide."""

MOST, MOST_WARPS = 64, 8
FEWER = ((4, 2), (16, 4))
"""Partials of a row of wide values that a merge reads at a time, and its warps; others read fewer.
All of a row's partials are read at once where they fit, and nothing is idle where there are
thousands of rows of two partials each. Measured on an H200, 512 columns: 128 rows of 64 partials
took 6.5 us (32 at a time 8.2, 16 with eight warps 9.7), 4096 rows of two 6.7 us (about 45 with 32
at a time)."""


def merge_plan(
    program: Program, passes: tuple[Pass, ...], parts: tuple[TiledPlan, ...], spec: Spec
) -> MergePlan:
    """The kernel that combines every pass' partials and finishes them.

    Args:
        program: the declaration, its folds expanded.
        passes: of the form.
        parts: their plans as partials.
        spec: of the call.
    """
    like = parts[0]
    axes = (*like.grid_axes, *like.tile_axes)
    folds = tuple(c.fold for p in passes for c in p.columns)
    args: list[Arg] = []
    for p in passes:
        args += partials(f"part{p.index}", written=False, plain=p.plain)
    args += inputs(program, spec, tuple(outside(program, folds)), flat=True)
    args += outputs(program, folds, spec)
    args += [ScalarArg(f"splits{p.index}", "i32") for p in passes]
    args += [ScalarArg("rows", "i32"), *size_args(program, axes, like.fold.over, like.static)]
    widest = max(c.block for p in passes for c in p.columns)
    return MergePlan(
        op=program.name, phase="merge", template="triton/softmax_merge.py.jinja", program=program,
        args=tuple(args), static=spec.static, num_warps=MOST_WARPS if widest > WIDE else 4,
        num_stages=1,
        precision=max(p.precision for p in parts), fold=folds[0], passes=passes,
        grid_axes=like.grid_axes, tile_axes=like.tile_axes,
        packed=spec.packed, lengths=spec.lengths, aligned_end=like.aligned_end,
        lse=spec.return_lse, log_base=like.log_base, block_r=1,
        block_i=MOST if widest > WIDE else 16 if widest <= 128 else 8,
    )  # fmt: skip


MERGED_AT_ONCE = 2048
"""Numbers of a partial's rows that a merge of few partials takes together: 16 a thread."""
TWO = 2


def many_rows_plans(merge: MergePlan) -> tuple[MergePlan, ...]:
    """The merge of prompts' rows, many and of one or two partials each; none of wide values.

    A program for each row would read a few hundred bytes, and there are hundreds of thousands.
    """
    widest = max(c.block for p in merge.passes for c in p.columns)
    if widest > WIDE:
        return ()
    rows = MERGED_AT_ONCE // widest
    return (replace(merge, phase=f"merge_{TWO}", block_i=TWO, block_r=rows, num_warps=4),)


def fewer_plans(merge: MergePlan) -> tuple[MergePlan, ...]:
    """The merges of fewer partials than the usual one's, fewest first; none of narrow values."""
    widest = max(c.block for p in merge.passes for c in p.columns)
    if widest <= WIDE:
        return ()
    return tuple(
        replace(merge, phase=f"merge_{most}", block_i=most, num_warps=warps)
        for most, warps in FEWER
    )
