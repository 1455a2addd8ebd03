"""Prints how a mask over history tensors tightens the loop over keys, a row of blocks at a time.

Each block's least and largest values bound what its keys can show; the same three-valued evaluation
as in :mod:`attncc.codegen.intervals` says of every block whether some row may see some key, and
whether all rows see all keys. The loop then runs from the first block of the former kind to the
last, without a mask through the first run of the latter.
"""

from __future__ import annotations

from collections.abc import Callable

from attncc.codegen.emit.softmax_rows import Texts, row_of_key
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.intervals import Interval, Text, positions_only, truth
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.softmax_checks import TOKENS
from attncc.dsl.graph import axes_of, kind_of, walk
from attncc.dsl.ir import Index, Input, Kind, Lit, Node

BLOCKS = 128  # looked at together


def skip_lines(p: Printer, plan: TiledPlan, clear: Node | None = None) -> Texts:
    """Lines that move ``lo`` and ``hi``, and define ``all_lo`` and ``all_hi``, in keys.

    Args:
        p: of the tile's rows.
        plan: of the tile.
        clear: a part of the mask; of it, not of the whole mask, all rows then see all keys from
            ``all_lo`` to ``all_hi``.
    """
    where = plan.fold.where
    if not plan.tighten or where is None:
        return ()
    outer, rows, body = p.lines, list[str](), list[str]()
    p.lines = rows
    blocks = p.child(**{plan.fold.over: Place(Var("b", ("n",)), Var("b_valid", ("n",)))})
    blocks.lines = body

    def of_block(name: str) -> Interval[str]:
        ends = (blocks.load(p.tensors[f"{name}_{end}"]).text for end in ("least", "most"))
        return Interval(*ends)

    leaf = leaves(p, plan, of_block, plan.stats, ("key_first", "key_last"))
    found = truth(where, leaf, Text())
    every = found.all if clear is None else truth(clear, leaf, Text()).all
    p.lines = outer
    n, size = plan.stat_block, plan.block_n
    shift = row_of_key(plan) == "key_row"
    plus, minus = (" + first_key", " - first_key") if shift else ("", "")
    return (
        *rows,
        f"first_block = ((lo{plus}) // {n}).to(tl.int32)",
        f"stop_block = tl.cdiv(hi{plus}, {n}).to(tl.int32)",
        "some_lo, some_hi = stop_block, first_block  # blocks with something to see",
        "all_lo, all_hi = stop_block, stop_block  # a run of blocks that all rows see",
        f"for b0 in tl.range(first_block, stop_block, {BLOCKS}):",
        f"    b = b0 + tl.arange(0, {BLOCKS})  # [n]",
        "    b_valid = b < stop_block",
        f"    key_first = b * {n}{minus}",
        f"    key_last = key_first + {n - 1}",
        *(f"    {text}" for text in body),
        f"    some = b_valid & {found.some}",
        f"    every = b_valid & {every}",
        "    some_lo = tl.minimum(some_lo, tl.min(tl.where(some, b, stop_block)))",
        "    some_hi = tl.maximum(some_hi, tl.max(tl.where(some, b + 1, first_block)))",
        "    all_lo = tl.minimum(all_lo, tl.min(tl.where(every, b, stop_block)))",
        "    ends = b_valid & ~every & (b > all_lo)",
        "    all_hi = tl.minimum(all_hi, tl.min(tl.where(ends, b, stop_block)))",
        f"lo = tl.maximum(lo, (some_lo * {n}{minus}).to(tl.int32)) // {size} * {size}",
        f"hi = tl.maximum(tl.minimum(hi, (some_hi * {n}{minus}).to(tl.int32)), lo)",
    )  # fmt: skip


def all_seen(plan: TiledPlan) -> tuple[str, str]:
    """The keys of the run of blocks that all rows see, as text."""
    minus = " - first_key" if row_of_key(plan) == "key_row" else ""
    by = f" * {plan.stat_block}{minus}"
    return f"(all_lo{by})", f"(all_hi{by})"


def leaves(
    p: Printer,
    plan: TiledPlan,
    of_keys: Callable[[str], Interval[str]],
    names: tuple[str, ...],
    positions: tuple[str, str],
) -> Callable[[Node], Interval[str] | None]:
    """Bounds of positions, of history inputs, and of what each row has for all keys.

    Args:
        p: of the tile's rows.
        plan: of the tile.
        of_keys: loads the bounds of a history input of some keys.
        names: the history inputs it can be asked for.
        positions: text of the least and the largest position of these keys.
    """
    over, seen = plan.fold.over, dict[Node, Interval[str]]()

    def leaf(node: Node) -> Interval[str] | None:
        if node in seen:
            return seen[node]
        match node:
            case Index(axis=axis) if axis == over:
                return Interval(*positions)
            case Index(axis=axis) if axis == TOKENS:
                return Interval("t_first", "t_last")
            case Input(name=name) if name in names:
                seen[node] = of_keys(name)
            case _ if over in axes_of(node) or isinstance(node, Lit) or positions_only(node):
                return None
            case _:
                seen[node] = _of_rows(p, node)
        return seen[node]

    return leaf


def _of_rows(p: Printer, node: Node) -> Interval[str]:
    """The least and the largest value among the tile's rows; a NaN makes it unbounded."""
    var = p.emit(node)
    if not var.dims and kind_of(node) is Kind.INT:
        return Interval(var.text, var.text)
    if not var.dims:
        least, most = (
            f'tl.where({var.text} != {var.text}, float("{sign}inf"), {var.text})'
            for sign in ("-", "")
        )
        return Interval(p.name(least, (), "row_").text, p.name(most, (), "row_").text)
    types = {p.tensors[n.name].dtype for n in walk(node) if isinstance(n, Input) and n.axes}
    ends = []
    for name, sign in (("min", 1), ("max", -1)):
        if types and all(t.startswith(("i", "u")) for t in types):
            text, far = var.text, str(sign * (2**63 - 1 if "i64" in types else 2**31 - 1))
        else:
            bad, good = (f'float("{s}inf")' for s in (("-", "") if sign > 0 else ("", "-")))
            text, far = f"tl.where({var.text} != {var.text}, {bad}, {var.text})", good
        ends.append(p.name(f"tl.{name}(tl.where(row_valid, {text}, {far}), 0)", (), "rows_").text)
    return Interval(*ends)
