"""Prints how a block of keys finds the pages that hold it."""

from __future__ import annotations

from attncc.codegen.emit.softmax_rows import Texts, atom, one_page, page_of, whole_pages
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.tiles import FEW_PAGES

AT_ONCE = 16
"""Blocks whose pages are read before the first one's keys."""


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


def first_pages(plan: TiledPlan) -> Texts:
    """The pages of a loop's first block, where each block finds those of the next one.

    Of small pages the first blocks' entries are read at once: one after another each would wait for
    memory before the pipeline is filled.
    """
    if not plan.pages_ahead:
        return ()
    lines = ["table = block_table_ptr + at_B * block_table_s0  # pages of the sequence"]
    if not whole_pages(plan):
        return (*lines, _pages_from(plan, "begin"))
    count = plan.block_n // plan.page
    lines.append(f"page_n = tl.arange(0, {count})  # pages of a block")
    if count < FEW_PAGES:
        return (*lines, _pages_from(plan, "begin"))
    place = f"begin // {plan.page} + nearby"
    return (
        *lines,
        f"nearby = tl.arange(0, {AT_ONCE})[:, None] * {count} + page_n[None, :]",
        f"pages = tl.load(table + {place}, mask=begin + nearby * {plan.page} < S, other=0)",
        f"pages = tl.sum(tl.where(nearby < {count}, pages, 0), 0)  # those of the first",
    )


def _pages_from(plan: TiledPlan, first: str) -> str:
    """The pages of the block whose first key is given; a place past the end is not read."""
    key, place = f"{first} + offs_n", f"({first} + offs_n) // {plan.page}"
    if one_page(plan):
        key, place = first, f"{atom(first)} // {plan.page}"
    elif whole_pages(plan):
        key, place = f"{first} + page_n * {plan.page}", f"{atom(first)} // {plan.page} + page_n"
    return f"pages = tl.load(table + {place}, mask={key} < S, other=0)"


def _paging_ahead(plan: TiledPlan) -> Texts:
    """The block's pages, and the load of the next block's.

    What Triton's pipeliner finds on the way to a product are the loads of one round of the loop. A
    load whose value comes from the round before is none of them: it keeps its distance of one
    block, and the keys get all of the stages. Rows of one page share its entry, and the arithmetic.
    """
    shift = f"n0 + {plan.block_n}"
    if one_page(plan):
        found: Texts = (
            "page = pages.to(tl.int64)  # the block lies in one page",
            f"page_first = at % {plan.page}",
            "page_at = page_first + offs_n",
        )
    elif whole_pages(plan):
        shape = f"[{plan.block_n // plan.page}, {plan.page}]"
        rows = f"tl.broadcast_to(pages.to(tl.int64)[:, None], {shape})"
        found = (
            f"page = tl.reshape({rows}, [{plan.block_n}])",
            f"page_at = offs_n % {plan.page}",
        )
    else:
        found = ("page = pages.to(tl.int64)", f"page_at = key % {plan.page}")
    return (*found, _pages_from(plan, shift))
