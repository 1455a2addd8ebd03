"""A batch of fixed size over the pages of an owner: the tables that a captured graph reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from attncc.dsl.errors import CacheError
from attncc.runtime import checks
from attncc.runtime.caches import PagedCache
from attncc.runtime.owners.held import Held
from attncc.runtime.owners.units import each, int32, send, upload

if TYPE_CHECKING:
    from attncc.runtime.owners.pages import PageOwner


class PageBatch:
    """Rows of a batch, each with a sequence of a :class:`PageOwner` or with none.

        batch = pages.batch(8, capacity=4096)
        batch.set(handles)
        with batch.append(1) as cache:             # the same tensors every time
            graph.replay()                         # or attention.decode(q, k, v, cache)

    A row without a sequence has length 0 and pages of the batch's own, so that what a call appends
    there hurts nobody; its outputs mean nothing. Of the table only changed rows go to the
    device, and the lengths before every call, so that it may be warmed up and captured at will.

    Attributes:
        cache: the cache to give to calls; its tensors never change their addresses.
    """

    def __init__(self, owner: PageOwner, size: int, width: int, tokens: int) -> None:
        """See :meth:`PageOwner.batch`; ``width`` counts the places of a row of the table."""
        self._owner = owner
        self._capacity = width * owner.page
        if tokens > self._capacity:
            raise CacheError(
                "a row without a sequence does not fit the batch's capacity", op=owner.op,
                argument="tokens", expected=f"at most {self._capacity}", found=tokens,
            )  # fmt: skip
        self._padding = tokens
        self._pads = owner.take_padding(size, tokens)
        self._rows: list[int | None] = [None] * size
        self._table = torch.full((size, width), -1, dtype=torch.int32)
        # What the device has: of which sequence, in which version, and its length before a call.
        self._sent: list[tuple[Held | None, int]] = [(None, 0)] * size
        self._lengths = [0] * size
        self.cache = owner.tables(
            upload(self._table, owner.device), int32([0] * size, owner.device)
        )
        self.update()

    @property
    def handles(self) -> tuple[int | None, ...]:
        """The sequence of each row."""
        return tuple(self._rows)

    def set(self, handles: Sequence[int | None]) -> None:
        """Give rows their sequences, and bring the device up to date.

        Args:
            handles: distinct sequences by row; None, or nothing at the end, for a row without.

        Raises:
            CacheError: too many, one is unknown, named twice, or longer than the batch's capacity.
        """
        rows = self._owner.rows(handles, len(self._rows))
        for row, handle in enumerate(rows):
            self._fits(row, 0 if handle is None else len(self._owner.sequence(handle).pages))
        self._rows = rows
        self.update()

    def reserve(self, tokens: int | Sequence[int]) -> None:
        """Make room for what a call appends, and bring the device up to date.

        Args:
            tokens: new tokens, one number for all rows or one each.

        Raises:
            ExhaustedError: pages are missing; nothing was taken or written.
            CacheError: a sequence would pass the batch's capacity, or is there no more.
        """
        counts = each(self._owner.op, "tokens", self._rows, tokens)
        for row, (held, n) in enumerate(zip(self._held(), counts, strict=True)):
            self._fits(row, -(-(held.length + n) // self._owner.page))
            if self._rows[row] is None and n > self._padding:
                raise CacheError(
                    "more tokens than a row without a sequence has room for", op=self._owner.op,
                    argument="tokens", expected=f"at most {self._padding}", found=n,
                )  # fmt: skip
        self._owner.reserve(*self._live(counts))
        self.update()

    def advance(self, tokens: int | Sequence[int]) -> None:
        """Note that a call has appended tokens; the device has counted them itself.

        Raises:
            CacheError: no room was reserved for them; or, where values are looked at, the device
                has counted otherwise: the call did not run, or ran twice.
        """
        counts = each(self._owner.op, "tokens", self._rows, tokens)
        want = [n + t for n, t in zip(self._lengths, counts, strict=True)]
        if checks.looks(self.cache.lengths):
            found = self.cache.lengths.tolist()
            if found != want:
                raise CacheError(
                    "the device has other lengths than the owner", op=self._owner.op,
                    argument="cache.lengths", expected=want, found=found,
                    help="between reserve() and advance() stands one call with this cache",
                )  # fmt: skip
        self._owner.advance(*self._live(counts))
        self._lengths = want

    @contextmanager
    def append(self, tokens: int | Sequence[int]) -> Iterator[PagedCache]:
        """Reserve, give the cache for one call, and advance unless the call fails.

        Raises:
            ExhaustedError: pages are missing; nothing was taken or written.
            CacheError: as :meth:`reserve` and :meth:`advance`.
        """
        self.reserve(tokens)
        yield self.cache
        self.advance(tokens)

    def update(self) -> None:
        """Bring the device up to date after sequences were changed elsewhere (rolled back, say).

        Raises:
            CacheError: a sequence is there no more, or longer than the batch's capacity.
        """
        held = self._held()
        for row, s in enumerate(held):
            self._fits(row, len(s.pages))
        now = [(s, s.version) for s in held]
        stale = [r for r, (a, b) in enumerate(zip(now, self._sent, strict=True)) if _differ(a, b)]
        for row in stale:
            pages = held[row].pages
            self._table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self._table[row, len(pages) :] = -1
        device = self._owner.device
        if stale:
            rows = int32(stale, device).long()
            self.cache.block_table.index_copy_(0, rows, upload(self._table[stale], device))
        self._sent = list(now)
        # Always: the device counts in every call, also where one warmed up, failed or was repeated.
        self._lengths = [s.length for s in held]
        send(self.cache.lengths, torch.tensor(self._lengths, dtype=torch.int32))

    def close(self) -> None:
        """Give back the pages of rows without a sequence; the batch is not to be used again."""
        self._owner.give_padding_back(self._pads)
        self._pads, self._rows = [], []

    def _held(self) -> list[Held]:
        rows = zip(self._rows, self._pads, strict=True)
        return [pad if handle is None else self._owner.sequence(handle) for handle, pad in rows]

    def _live(self, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        rows = zip(self._rows, counts, strict=True)
        found = [(handle, n) for handle, n in rows if handle is not None]
        return [handle for handle, _ in found], [n for _, n in found]

    def _fits(self, row: int, pages: int) -> None:
        if pages > self._table.shape[1]:
            raise CacheError(
                f"row {row} would pass the batch's capacity", op=self._owner.op, axis="S",
                expected=f"at most {self._table.shape[1]} pages", found=pages,
            )  # fmt: skip


def _differ(now: tuple[Held, int], sent: tuple[Held | None, int]) -> bool:
    return now[0] is not sent[0] or now[1] != sent[1]
