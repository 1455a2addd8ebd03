"""Prints where a piece of work of CuTe-DSL prefill lies, and which keys it may see."""

from __future__ import annotations

from attncc.codegen.emit.cutedsl import Scalars
from attncc.codegen.emit.cutedsl_types import NUMBERS, Known, listed
from attncc.codegen.emit.gluon_softmax import WarpTexts
from attncc.codegen.emit.softmax_finish import group_of
from attncc.codegen.emit.softmax_rows import Texts, grid
from attncc.codegen.plan_cutedsl import CutePlan


def place_lines(
    plan: CutePlan, texts: WarpTexts, known: dict[str, Known]
) -> tuple[Texts, tuple[tuple[str, str], ...]]:
    """Lines of the function that finds a tile's keys, and names and types of what it finds."""
    where = texts.place
    known["item"] = Known("i32")
    ranges = {"row": ("(lane + 32 * i)", "m"), "b": ("(lane + 32 * i)", "n")}
    scalars = Scalars(known, {"m": "i", "n": "i"}, ranges)
    found = scalars.steps(_lines(plan, texts))
    names = [name for name, _ in where.known]
    wide = {name for name, how in where.known if how}
    kinds = tuple((name, "i64" if name in wide else "i32") for name in names)
    ends = ", ".join(f"{NUMBERS[kind]}({name})" for name, kind in kinds)
    return (*listed(found, "i", "PIECES"), f"return {ends}"), kinds


def _lines(plan: CutePlan, texts: WarpTexts) -> list[str]:
    """Lines of a Triton program that finds a tile's sequence and keys."""
    where, n = texts.place, plan.block_n
    lines = ["rest = item"]
    for axis, size in grid(plan):
        lines += [f"at_{axis} = (rest % {size}).to(tl.int64)", f"rest = rest // {size}"]
    lines += ["tile = tiles - 1 - rest"]
    lines += _SEQUENCE if plan.packed else [f"start = tile * {plan.block_m}"]
    if where.skips:
        lines += [
            f"row = start + tl.arange(0, {plan.block_m})",
            f"row_valid = row < T * {group_of(plan)}",
            *where.rows,
        ]
    own = where.bounds
    lines += [
        *where.setup,
        *where.limits,
        f"lo = {own.lo}",
        f"hi = {own.hi}",
        f"lo = (tl.minimum(lo, S) // {n} * {n}).to(tl.int32)",
        "hi = tl.maximum(tl.minimum(hi, S).to(tl.int32), lo)",
        *where.skips,
    ]
    if plan.first_part == 0:
        lines += [
            f"inner_lo = tl.cdiv({own.inner_lo}, {n}) * {n}",
            "inner_lo = tl.minimum(tl.maximum(inner_lo, lo), hi).to(tl.int32)",
        ]
    if plan.first_part < 2:
        least = "lo" if plan.first_part else "inner_lo"
        lines += [
            f"inner_hi = tl.maximum(tl.minimum({own.inner_hi}, hi), 0) // {n} * {n}",
            f"inner_hi = tl.maximum(inner_hi, {least}).to(tl.int32)",
        ]
    return lines


_SEQUENCE = [
    "sequence = tl.load(tile_table_ptr + 2 * tile)",
    "start = tl.load(tile_table_ptr + 2 * tile + 1)",
    "at_B = tl.maximum(sequence, 0).to(tl.int64)",
    "first = tl.load(cu_seqlens_ptr + at_B)",
    "T = tl.where(sequence < 0, 0, tl.load(cu_seqlens_ptr + at_B + 1) - first)",
    "first_key = tl.load(cu_seqlens_k_ptr + at_B).to(tl.int64)",
    "S = (tl.load(cu_seqlens_k_ptr + at_B + 1) - first_key).to(tl.int32)",
    "S = tl.where(sequence < 0, 0, S)",
]
