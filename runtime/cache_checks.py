"""Checks of the values in lengths, block tables and slots.

They are made where looking is free (CPU) or asked for (the check knob of ``runtime.knobs``), before
anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attncc.dsl.axes import Pattern
from attncc.dsl.errors import CacheError, PageError, SlotError
from attncc.runtime.pools import StatePool


def lengths(op: str, held: Sequence[int]) -> None:
    """No sequence holds less than nothing.

    Raises:
        CacheError: a length is negative.
    """
    for b, n in enumerate(held):
        if n < 0:
            raise CacheError(
                f"sequence {b} has a negative length", op=op, argument="cache.lengths", found=n
            )


def room(op: str, held: Sequence[int], new: Sequence[int], capacity: int) -> None:
    """The new tokens fit behind those that each sequence of a dense cache holds.

    Raises:
        CacheError: a sequence would pass its capacity.
    """
    for b, (n, t) in enumerate(zip(held, new, strict=True)):
        if n + t > capacity:
            raise CacheError(
                f"sequence {b} has no room for the new tokens",
                op=op, axis="S", expected=f"at most {capacity}", found=n + t,
            )  # fmt: skip


def pages(
    op: str, table: Sequence[list[int]], held: Sequence[int], new: Sequence[int],
    page: int, count: int,
) -> None:  # fmt: skip
    """Every sequence has the pages it reads and writes, and writes only rows nobody else uses.

    Args:
        op: name of the op.
        table: each sequence's row of the block table.
        held: tokens that each sequence holds.
        new: tokens that it brings.
        page: rows of a page.
        count: pages in all.

    Raises:
        PageError: pages are missing, a page does not exist, or a written one is someone else's too.
    """
    owned = []
    for b, (n, t) in enumerate(zip(held, new, strict=True)):
        need = -(-(n + t) // page)
        own = table[b][:need]
        missing = need - sum(p != -1 for p in own)
        if missing:
            raise PageError(
                f"sequence {b} lacks {missing} page{'s' if missing > 1 else ''} for its tokens",
                op=op, argument="cache.block_table",
                expected=f"{need} pages of {page} for {n} + {t} tokens", found=need - missing,
            )  # fmt: skip
        bad = next((p for p in own if not 0 <= p < count), None)
        if bad is not None:
            raise PageError(
                f"sequence {b} has a page that does not exist",
                op=op, argument="cache.block_table", expected=f"0 .. {count - 1}", found=bad,
            )  # fmt: skip
        owned.append(own)
    _alone(op, owned, held, new, page)


def _alone(
    op: str, owned: list[list[int]], held: Sequence[int], new: Sequence[int], page: int
) -> None:
    """No page that is written stands anywhere else, unless only rows before the write are read."""
    uses: dict[int, list[tuple[int, int]]] = {}
    for b, own in enumerate(owned):
        for i, p in enumerate(own):
            uses.setdefault(p, []).append((b, i))
    for b, (n, t) in enumerate(zip(held, new, strict=True)):
        for i in range(n // page, len(owned[b]) if t else 0):
            for c, j in uses[owned[b][i]]:
                writes = new[c] > 0 and j >= held[c] // page
                late = held[c] - j * page > max(n - i * page, 0)
                if (c, j) != (b, i) and (writes or late):
                    raise PageError(
                        f"sequence {b} writes a page that sequence {c} {_uses(writes)} as well",
                        op=op, argument="cache.block_table", expected="a page of its own",
                        found=owned[b][i],
                    )  # fmt: skip


def _uses(writes: bool) -> str:
    return "writes" if writes else "reads"


def slots(op: str, name: str, pool: StatePool, pattern: Pattern, tokens: Sequence[int]) -> None:
    """Slots lie in the pool, and no sequence writes one that another reads or writes.

    Args:
        op: name of the op.
        name: the state's.
        pool: the pool.
        pattern: the state's memory axes.
        tokens: number of tokens of each sequence.

    Raises:
        SlotError: one of these is not so; the message names the slot.
    """
    count = pool.pool.shape[pattern.dim_of("B")]
    reads: list[int] = pool.slots.tolist()
    for slot in reads:
        _inside(op, f"{name}.slots", slot, count)
    label = f"{name}.slots" if pool.out_slots is None else f"{name}.out_slots"
    writers: dict[int, int] = {}
    for b, slot in _written(op, label, pool, tokens):
        _inside(op, label, slot, count)
        if slot in writers:
            raise SlotError(
                "a slot is written twice",
                op=op, argument=label, expected="distinct slots (or -1)", found=slot,
            )  # fmt: skip
        if slot >= 0:
            writers[slot] = b
    for b, slot in enumerate(reads):
        if writers.get(slot, b) != b:
            raise SlotError(
                f"sequence {writers[slot]} writes a slot that sequence {b} reads",
                op=op, argument=label, expected="a slot of its own", found=slot,
            )  # fmt: skip


def _written(
    op: str, label: str, pool: StatePool, tokens: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Each sequence with each slot it writes."""
    if not pool.each_token:
        yield from enumerate(pool.written.tolist())
        return
    width = pool.written.shape[1]
    for b, (row, n) in enumerate(zip(pool.written.tolist(), tokens, strict=True)):
        if n > width:
            raise SlotError(
                f"sequence {b} has more tokens than out-slots",
                op=op, argument=label, axis="T", expected=f"at least {n}", found=width,
            )  # fmt: skip
        yield from ((b, slot) for slot in row[:n])


def _inside(op: str, label: str, slot: int, count: int) -> None:
    if not -1 <= slot < count:
        raise SlotError(
            "a slot outside the pool",
            op=op, argument=label, expected=f"-1 .. {count - 1}", found=slot,
        )  # fmt: skip
