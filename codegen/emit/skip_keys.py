"""Prints the pass over a history's small values that comes before the loop over its long rows.

It evaluates the mask key by key, with the bounds of a tile's rows: the same three-valued evaluation
as in :mod:`attncc.codegen.emit.skip`, with the values themselves in place of a block's bounds.
"""

from __future__ import annotations

from attncc.codegen.emit.skip import leaves
from attncc.codegen.emit.softmax_rows import Texts, page_of, page_places, row_of_key
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.intervals import Interval, Text, truth
from attncc.codegen.plan_softmax import TiledPlan

LOOKED_AT = 512
"""Keys that are looked at together, a warp."""


def scan_lines(p: Printer, plan: TiledPlan) -> Texts:
    """Lines that move ``lo`` and ``hi`` to the first and behind the last key that some row may see.

    Args:
        p: of the tile's rows.
        plan: of the tile.
    """
    where = plan.fold.where
    if not plan.scanned or where is None:
        return ()
    outer, rows, body = p.lines, list[str](), list[str]()
    p.lines = rows
    keys, valid = ("n",), Var("b_valid", ("n",))
    place = "b_row" if row_of_key(plan) == "key_row" else "b"
    found = {plan.fold.over: Place(Var(place, keys), valid)}
    blocks = p.child(**found, **page_places(plan, "b_page", keys, valid))
    blocks.lines = body
    if place == "b_row":
        body.append("b_row = first_key + b  # [n] row of memory")
    if plan.page:
        body += page_of(plan, "b", "b_page", "b_valid")

    def of_key(name: str) -> Interval[str]:
        return _ends(blocks, name)

    some = truth(where, leaves(p, plan, of_key, plan.scanned, ("b", "b")), Text()).some
    p.lines = outer
    step, size = LOOKED_AT * plan.num_warps, plan.block_n
    return (
        *rows,
        f"some_lo = tl.zeros([{step}], tl.int32) + hi  # [n]",
        f"some_hi = tl.zeros([{step}], tl.int32) + lo  # [n]",
        f"for b0 in tl.range(lo, hi, {step}):",
        f"    b = b0 + tl.arange(0, {step})  # [n] position in the history",
        "    b_valid = b < hi",
        *(f"    {text}" for text in body),
        f"    some = b_valid & {some}",
        "    some_lo = tl.minimum(some_lo, tl.where(some, b, hi))",
        "    some_hi = tl.maximum(some_hi, tl.where(some, b + 1, lo))",
        "hi = tl.max(some_hi, 0)",
        f"lo = tl.maximum(lo, tl.min(some_lo, 0) // {size} * {size})",
        "hi = tl.maximum(hi, lo)",
    )  # fmt: skip


def _ends(blocks: Printer, name: str) -> Interval[str]:
    """A key's value as its own bounds; a NaN has none."""
    arg = blocks.tensors[name]
    var = blocks.load(arg)
    if arg.dtype.startswith(("i", "u")):
        return Interval(var.text, var.text)
    texts = (
        f'tl.where({var.text} != {var.text}, float("{sign}inf"), {var.text})' for sign in ("-", "")
    )
    return Interval(*(blocks.name(text, var.dims, f"{name}_end").text for text in texts))
