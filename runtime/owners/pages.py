"""Pages and the sequences that own them: appended to, forked, rolled back, given back.

The host knows every length and every page, so nothing here reads the device. A page with several
references (a shared prefix) is never written: whoever appends to it gets a copy first. Pages need
not be neighbours, so a sequence grows without moving; the pool grows by handing out more of the
pages in its allocation, which stays where it is (kernels know one address and a page number).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from attncc.dsl.axes import PAGE, PAGES
from attncc.dsl.errors import CacheError
from attncc.runtime import bind_caches, checks
from attncc.runtime.caches import PagedCache, Storage
from attncc.runtime.owners import kept
from attncc.runtime.owners.held import Held, append_plan, page_views
from attncc.runtime.owners.owner import Owner
from attncc.runtime.owners.page_batch import PageBatch
from attncc.runtime.owners.units import Units, distinct, each, int32


class PageOwner(Owner[Held]):
    """Owns the pages of a :class:`PagedCache` and the sequences in them.

        pages = ac.PageOwner.allocate(attention, sizes=sizes, pages=4096, page=16)
        a = pages.add()
        with pages.append([a], len(prompt)) as cache:
            attention(q, k, v, cache=cache)
        b = pages.fork(a)                          # the prefix is shared until one of them writes

    Everything that needs pages says how many are missing before it takes or writes anything.
    Copies and tables go to the device in stream order: use one stream, or order them yourself.
    """

    def __init__(self, op: Any, cache: PagedCache, *, pages: int | None = None) -> None:
        """Take over the pages of an allocation; whatever its table and lengths say is not read.

        Args:
            op: the op (or its declaration).
            cache: the pages, in any layout; nobody else may hand them out.
            pages: how many are handed out at first; :meth:`grow` adds more. All if None.

        Raises:
            CacheError: the op has no ``Cache``, or there are fewer pages.
            RankError, SizeError, StrideError: a tensor does not fit its pattern.
        """
        declaration = kept.declared(op)
        super().__init__(declaration.name, Units(declaration.name, "page", 0))
        sizes = checks.Sizes(self.op, {})
        bind_caches.add_sizes(self.op, declaration.tensors, cache, sizes)
        sizes.settle()
        sizes.need((PAGES, PAGE))
        self.page = sizes.found[PAGE]
        self._most = sizes.found[PAGES]
        self._cache = cache
        self._views = list(page_views(declaration, cache, sizes.found))
        self.device = cache.lengths.device
        self.grow(self._most if pages is None else pages)

    @staticmethod
    def allocate(
        op: Any,
        *,
        sizes: Mapping[str, int],
        pages: int,
        page: int,
        handed_out: int | None = None,
        layouts: Mapping[str, str] | None = None,
        dtype: Storage | Mapping[str, Storage] = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> PageOwner:
        """Allocate pages for an op and own them.

        Args:
            op: the op (or its declaration).
            sizes: sizes of every axis of its ``Cache`` tensors but B and S.
            pages: pages in the allocation.
            page: rows of a page.
            handed_out: pages that are handed out at first; all if None.
            layouts: as :class:`PagedCache` has them.
            dtype: storage, of all or by name.
            device: where they live.

        Raises:
            CacheError: the op has no ``Cache``, a size or a storage is missing, or a layout or a
                block does not fit.
        """
        cache = PagedCache.allocate(
            op, sizes={**sizes, "B": 0}, capacity=0, page=page, pages=pages, layouts=layouts,
            dtype=dtype, device=device,
        )  # fmt: skip
        return PageOwner(op, cache, pages=handed_out)

    # --- looking

    def length(self, handle: int) -> int:
        """Tokens that a sequence holds, without asking the device."""
        return self.sequence(handle).length

    def pages_of(self, handle: int) -> tuple[int, ...]:
        """A sequence's pages in order."""
        return tuple(self.sequence(handle).pages)

    def references(self, page: int) -> int:
        """How many sequences have a page."""
        return self._units.references(page)

    # --- sequences and pages

    def grow(self, pages: int) -> None:
        """Hand out more pages of the allocation; nothing moves.

        Raises:
            CacheError: the allocation has no more.
        """
        room = self._most - len(self._units)
        if not 0 <= pages <= room:
            raise CacheError(
                "the allocation has no more pages to hand out",
                op=self.op, argument="pages", expected=f"0 .. {room}", found=pages,
            )  # fmt: skip
        self._units.grow(pages)

    def add(self, tokens: int = 0, *, handle: int | None = None) -> int:
        """An empty sequence.

        Args:
            tokens: tokens that it gets pages for right away.
            handle: the caller's own number for it (that of another owner, say); counted up if None.

        Returns:
            Its handle.

        Raises:
            ExhaustedError: pages are missing; nothing was taken.
            CacheError: the handle is in use.
        """
        handle = self._handles.fresh(handle, self._sequences)
        (tokens,) = each(self.op, "tokens", [handle], tokens)
        found = Held(self._units.take(self._count(tokens)))
        self._handles.used(handle)
        self._sequences[handle] = found
        return handle

    def release(self, handle: int) -> None:
        """End a sequence; pages that nobody shares are free again."""
        self._units.drop(self.sequence(handle).pages)
        del self._sequences[handle]

    def fork(self, handle: int, tokens: int | None = None, *, child: int | None = None) -> int:
        """A sequence that starts with another's first tokens; it shares the pages, nothing moves.

        Args:
            handle: the sequence.
            tokens: how many of its tokens; all if None.
            child: the caller's own number for the new one; counted up if None.

        Returns:
            The new one's handle.

        Raises:
            CacheError: the sequence is shorter, or the handle is in use.
        """
        parent = self.sequence(handle)
        tokens = self._within(parent, tokens)
        child = self._handles.fresh(child, self._sequences)
        pages = parent.pages[: self._count(tokens)]
        self._units.share(pages)
        self._handles.used(child)
        self._sequences[child] = Held(pages, tokens)
        return child

    def truncate(self, handle: int, tokens: int, *, give_back: bool = True) -> None:
        """Roll a sequence back to its first tokens.

        Args:
            handle: the sequence.
            tokens: how many tokens stay.
            give_back: give back the pages behind them; else they stay reserved for it.

        Raises:
            CacheError: the sequence is shorter.
        """
        held = self.sequence(handle)
        held.length = self._within(held, tokens)
        left = held.pages[self._count(tokens) :]
        if left and give_back:
            self._units.drop(left)
            del held.pages[self._count(tokens) :]
            held.version += 1

    # --- appending

    def reserve(self, handles: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Make room behind what sequences hold: pages of their own to write into.

        A shared page that the new tokens would start in is copied, on the device.

        Args:
            handles: distinct sequences.
            tokens: new tokens, one number for all or one each.

        Raises:
            ExhaustedError: pages are missing; nothing was taken or copied.
            CacheError: a sequence is unknown or named twice.
        """
        distinct(self.op, handles)
        counts = each(self.op, "tokens", handles, tokens)
        held = [self.sequence(h) for h in handles]
        copies, extra = append_plan(held, counts, self.page, self._units)
        fresh = self._units.take(len(copies) + sum(extra))
        targets = [fresh.pop() for _ in copies]
        self._copy([s.pages[i] for s, i in copies], targets)
        for (s, i), page in zip(copies, targets, strict=True):
            self._units.drop([s.pages[i]])
            s.pages[i] = page
            s.version += 1
        for s, n in zip(held, extra, strict=True):
            s.pages += [fresh.pop() for _ in range(n)]
            s.version += bool(n)

    def advance(self, handles: Sequence[int], tokens: int | Sequence[int]) -> None:
        """Note that a call has appended tokens; the device has counted them itself.

        Raises:
            CacheError: a sequence has no such room of its own: it was not reserved.
        """
        distinct(self.op, handles)
        counts = each(self.op, "tokens", handles, tokens)
        held = [self.sequence(h) for h in handles]
        copies, extra = append_plan(held, counts, self.page, self._units)
        if copies or any(extra):
            raise CacheError(
                "tokens were appended that no room was reserved for", op=self.op,
                argument="tokens", help="call reserve() with the same numbers before the call",
            )  # fmt: skip
        for s, n in zip(held, counts, strict=True):
            s.length += n

    @contextmanager
    def append(self, handles: Sequence[int], tokens: int | Sequence[int]) -> Iterator[PagedCache]:
        """Reserve, give the cache for one call, and advance unless the call fails.

        Raises:
            ExhaustedError: pages are missing; nothing was taken or copied.
            CacheError: a sequence is unknown or named twice.
        """
        self.reserve(handles, tokens)
        yield self.view(handles)
        self.advance(handles, tokens)

    def view(self, handles: Sequence[int]) -> PagedCache:
        """The cache of some sequences as they are now, for one call; its tables are new tensors."""
        held = [self.sequence(h) for h in handles]
        width = max((len(s.pages) for s in held), default=0)
        rows = [[*s.pages, *[-1] * (width - len(s.pages))] for s in held]
        table = int32(rows, self.device).view(len(held), width)
        return replace(
            self._cache, block_table=table, lengths=int32([s.length for s in held], self.device)
        )

    def batch(self, size: int, capacity: int, *, tokens: int = 1) -> PageBatch:
        """A cache whose tables stay where they are, for a batch of fixed size and CUDA graphs.

        Args:
            size: sequences of the batch.
            capacity: most tokens that one of them may hold.
            tokens: most tokens that a call appends to a row without a sequence; the batch takes
                pages for them.

        Raises:
            ExhaustedError: there are no pages for the rows without a sequence.
        """
        return PageBatch(self, size, self._count(capacity), tokens)

    # --- for batches

    def tables(self, table: torch.Tensor, lengths: torch.Tensor) -> PagedCache:
        """The owned pages with other tables."""
        return replace(self._cache, block_table=table, lengths=lengths)

    def take_padding(self, rows: int, tokens: int) -> list[Held]:
        """Pages for rows of a batch that have no sequence.

        Raises:
            ExhaustedError: they are missing; none is taken.
        """
        (tokens,) = each(self.op, "tokens", [None], tokens)
        count = self._count(tokens)
        taken = self._units.take(rows * count)
        return [Held(taken[i * count : (i + 1) * count]) for i in range(rows)]

    def give_padding_back(self, padding: Sequence[Held]) -> None:
        """The pages of :meth:`take_padding` are free again."""
        for held in padding:
            self._units.drop(held.pages)

    def _count(self, tokens: int) -> int:
        """Pages of so many tokens."""
        return -(-tokens // self.page)

    def _within(self, held: Held, tokens: int | None) -> int:
        if tokens is None:
            return held.length
        if not 0 <= tokens <= held.length:
            raise CacheError(
                "the sequence has other tokens",
                op=self.op, argument="tokens", expected=f"0 .. {held.length}", found=tokens,
            )  # fmt: skip
        return tokens

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not sources:
            return
        both = int32([sources, targets], self.device).long()
        for tensor, dim in self._views:
            tensor.index_copy_(dim, both[1], tensor.index_select(dim, both[0]))
