"""A batch of fixed size over the slots of an owner: the numbers that a captured graph reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from attncc.dsl.errors import CacheError
from attncc.runtime.owners.units import each, send
from attncc.runtime.pools import StatePool

if TYPE_CHECKING:
    from attncc.runtime.owners.states import StateOwner


class StateBatch:
    """Rows of a batch, each with a sequence of a :class:`StateOwner` or with none.

        batch = states.batch(8)
        batch.set(handles)
        graph.replay()                             # captured with **batch.arguments

        drafts = states.batch(8, tokens=4)
        drafts.set(handles)
        drafts.speculate()
        graph.replay()                             # captured with **drafts.arguments
        drafts.accept(counts)

    A row without a sequence has slot -1: it reads zeros and writes nothing.

    Attributes:
        arguments: keyword arguments of a call; their tensors never change their addresses.
    """

    def __init__(self, owner: StateOwner, size: int, tokens: int | None) -> None:
        """See :meth:`StateOwner.batch`."""
        self._owner = owner
        self._rows: list[int | None] = [None] * size
        self._sent = [-1] * size
        self._slots = torch.full((size,), -1, dtype=torch.int32, device=owner.device)
        self._drafts = None
        if tokens is not None:
            shape = (size, tokens)
            self._drafts = torch.full(shape, -1, dtype=torch.int32, device=owner.device)
        self.arguments = {
            name: StatePool(pool, self._slots, self._drafts) for name, pool in owner.pools.items()
        }

    @property
    def handles(self) -> tuple[int | None, ...]:
        """The sequence of each row."""
        return tuple(self._rows)

    def set(self, handles: Sequence[int | None]) -> None:
        """Give rows their sequences, and bring the device up to date.

        Args:
            handles: distinct sequences by row; None, or nothing at the end, for a row without.

        Raises:
            CacheError: too many, or one is unknown or named twice.
        """
        self._rows = self._owner.rows(handles, len(self._rows))
        self._forget_drafts()
        self.update()

    def update(self) -> None:
        """Bring the device up to date after slots were changed elsewhere.

        Raises:
            CacheError: a sequence is there no more.
        """
        slots = [-1 if h is None else self._owner.slot_of(h) for h in self._rows]
        if slots != self._sent:
            send(self._slots, torch.tensor(slots, dtype=torch.int32))
            self._sent = slots

    def speculate(self, tokens: int | Sequence[int] | None = None) -> None:
        """Take slots for the drafts of every row and bring the device up to date.

        Args:
            tokens: drafts, one number for all rows or one each; None for as many as the batch is
                for. The out-slots behind them write nothing.

        Raises:
            ExhaustedError: slots are missing; nothing was taken or written.
            CacheError: the batch is not for drafts or not for so many, or a sequence speculates.
        """
        op, table = self._owner.op, self._drafts
        if table is None:
            raise CacheError(
                "the batch is not for drafts", op=op, help="make it with batch(size, tokens=...)"
            )
        width = table.shape[1]
        counts = each(op, "tokens", self._rows, width if tokens is None else tokens)
        if max(counts, default=0) > width:
            raise CacheError(
                "more drafts than the batch is for", op=op, argument="tokens",
                expected=f"at most {width}", found=max(counts),
            )  # fmt: skip
        self.update()
        live = [r for r, h in enumerate(self._rows) if h is not None]
        handles = [h for h in self._rows if h is not None]
        found = dict(zip(live, self._owner.draft(handles, [counts[r] for r in live]), strict=True))
        rows = [found.get(r, ()) for r in range(len(self._rows))]
        out = [[*row, *[-1] * (width - len(row))] for row in rows]
        send(table, torch.tensor(out, dtype=torch.int32).view(table.shape))

    def accept(self, counts: int | Sequence[int]) -> None:
        """Keep the states after the accepted drafts, and bring the device up to date.

        Args:
            counts: accepted drafts, one number for all rows or one each.

        Raises:
            CacheError: a sequence does not speculate, or has fewer drafts; nothing changes.
        """
        numbers = each(self._owner.op, "counts", self._rows, counts)
        live = [(h, n) for h, n in zip(self._rows, numbers, strict=True) if h is not None]
        self._owner.accept([h for h, _ in live], [n for _, n in live])
        self._forget_drafts()
        self.update()

    def _forget_drafts(self) -> None:
        """A call before the next :meth:`speculate` must not write slots that others may have."""
        if self._drafts is not None:
            self._drafts.fill_(-1)
