"""Prints how a block of keys finds the pages that hold it."""

from __future__ import annotations

from attncc.codegen.emit.softmax_rows import Texts, atom, one_page, page_of, whole_pages
from attncc.codegen.plan_softmax import TiledPlan


def order_lines(plan: TiledPlan) -> Texts:
    """``offs_n``: the key of a block that each row of its tile holds.

    A copy of 16 bytes a thread takes ``warp_rows`` rows a warp, and the next warp those behind
    them: in the order of the history every thread would meet every small page. Sums over keys have
    no order, so each warp takes keys that lie side by side in one page, or in as few as there are.
    """
    lines = f"tl.arange(0, {plan.block_n})"
    if not plan.warp_rows:
        return (f"offs_n = {lines}  # [n]",)
    rows, turn = plan.warp_rows, plan.num_warps * _unit(plan)
    copied = plan.num_warps * rows
    first = f"line // {turn} * {turn} + " if turn < plan.block_n else ""
    return (
        f"line = {lines}  # [n] row of a tile; each warp copies keys of one page",
        f"offs_n = {first}line % {copied} // {rows} * {_unit(plan)} "
        f"+ line % {turn} // {copied} * {rows} + line % {rows}  # [n]",
    )


def _unit(plan: TiledPlan) -> int:
    """Keys side by side that one warp takes."""
    return min(plan.page, plan.block_n // plan.num_warps)


def _each_row(plan: TiledPlan) -> str:
    """The page of each row of a tile, from those of a block."""
    count = plan.block_n // plan.page
    if not plan.warp_rows:
        spread = f"tl.broadcast_to(pages[:, None], [{count}, {plan.page}])"
        return f"tl.reshape({spread}, [{plan.block_n}])"
    unit, rows = _unit(plan), plan.warp_rows
    turns = plan.block_n // (plan.num_warps * unit)
    beside = count // turns
    shape = [unit // rows, beside, plan.num_warps // beside * rows]
    if turns == 1:
        spread = f"tl.broadcast_to(pages[None, :, None], {shape})"
    else:
        apart = f"tl.reshape(pages, [{turns}, 1, {beside}, 1])"
        spread = f"tl.broadcast_to({apart}, {[turns, *shape]})"
    return f"tl.reshape({spread}, [{plan.block_n}])"


def paging_lines(plan: TiledPlan) -> Texts:
    """Where a block of keys lies in the pages: ``page`` and ``page_at`` of each key."""
    if not plan.page:
        return ()
    if plan.pages_ahead:
        return _paging_ahead(plan)
    if not one_page(plan):
        return page_of(plan, "key", "page", "key_valid")
    return (
        f"at_table = block_table_ptr + at_B * block_table_s0 + at // {plan.page}",
        "page = tl.load(at_table).to(tl.int64)  # the block lies in one page",
        f"page_first = at % {plan.page}",
        "page_at = page_first + offs_n",
    )


def early_pages(plan: TiledPlan) -> Texts:
    """The first pages, ahead of new rows that are written, where only one loop reads keys."""
    return _first_two(plan, "lo") if _one_loop(plan) else ()


def first_pages(plan: TiledPlan) -> Texts:
    """The pages of a loop's first two blocks, where each block finds those of the one after next.

    One block's alone would leave the second block waiting for memory before it can be copied.
    """
    return () if _one_loop(plan) else _first_two(plan, "begin")


def _one_loop(plan: TiledPlan) -> bool:
    return plan.first_part == 2 and not plan.scanned


def _first_two(plan: TiledPlan, first: str) -> Texts:
    if not plan.pages_ahead:
        return ()
    lines = ["table = block_table_ptr + at_B * block_table_s0  # pages of the sequence"]
    if whole_pages(plan):
        lines.append(f"page_n = tl.arange(0, {plan.block_n // plan.page})  # pages of a block")
    if plan.dealt:  # before the length is there: all that the table has room for
        own = first if plan.split else "0"
        pages, later = (_pages_from(plan, key, "room") for key in (own, f"{own} + {_apart(plan)}"))
        return (*lines, f"pages = {pages}.to(tl.int64)", f"later = {later}")
    later = _pages_from(plan, f"{first} + {plan.block_n}")
    return (*lines, f"pages = {_pages_from(plan, first)}.to(tl.int64)", f"later = {later}")


def _apart(plan: TiledPlan) -> str:
    """Keys from one block of a range to its next."""
    return "apart" if plan.dealt and plan.split else str(plan.block_n)


def _pages_from(plan: TiledPlan, first: str, end: str = "S") -> str:
    """The pages of the block whose first key is given; a place past the end is not read."""
    key, place = f"{first} + offs_n", f"({first} + offs_n) // {plan.page}"
    if one_page(plan):
        key, place = first, f"{atom(first)} // {plan.page}"
    elif whole_pages(plan):
        key, place = f"{first} + page_n * {plan.page}", f"{atom(first)} // {plan.page} + page_n"
    return f"tl.load(table + {place}, mask={key} < {end}, other=0)"


def _paging_ahead(plan: TiledPlan) -> Texts:
    """The block's pages, and the load of those of the block after the next one.

    What Triton's pipeliner finds on the way to a product are the loads of one round of the loop. A
    load whose value comes from an earlier round is none of them: it keeps its distance of two
    blocks, and the keys get all of the stages. (Hence the conversion: a loop that hands a value on
    as it is is not pipelined.) Rows of one page share its entry, and the arithmetic.
    """
    shift = f"n0 + 2 * {_apart(plan)}" if _apart(plan) == "apart" else f"n0 + {2 * plan.block_n}"
    if one_page(plan):
        found: Texts = (
            "page = pages  # the block lies in one page",
            f"page_first = at % {plan.page}",
            "page_at = page_first + offs_n",
        )
    elif whole_pages(plan):
        found = (
            f"page = {_each_row(plan)}",
            f"page_at = offs_n % {plan.page}",
        )
    else:
        found = ("page = pages", f"page_at = key % {plan.page}")
    return (*found, "pages = later.to(tl.int64)", f"later = {_pages_from(plan, shift)}")
