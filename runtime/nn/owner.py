"""A layer's sequences that come and go: one handle each in all owners of pages and slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from attncc.dsl.errors import CacheError
from attncc.runtime.caches import Storage
from attncc.runtime.nn.kept import Kept, stored
from attncc.runtime.owners.page_batch import PageBatch
from attncc.runtime.owners.pages import PageOwner
from attncc.runtime.owners.state_batch import StateBatch
from attncc.runtime.owners.states import StateOwner
from attncc.runtime.owners.units import distinct, each
from attncc.runtime.pools import StatePool

if TYPE_CHECKING:
    from attncc.runtime.nn.module import LayerModule


class LayerOwner:
    """Owns what a layer keeps for sequences that come and go, in pages and slots.

        owner = attncc.nn.LayerOwner(layer, slots=64, pages=4096, page=16)
        a = owner.add()
        with owner.append([a], len(prompt)) as kept:
            y = layer(prompt[None], kept=kept)
        b = owner.fork(a)

    Attributes:
        pages: a :class:`PageOwner` for each op with a history, by name of its node.
        states: a :class:`StateOwner` for each op with states or windows, by name of its node.
    """

    def __init__(
        self, module: LayerModule, *, slots: int = 0, pages: int = 0, page: int = 16,
        dtype: Storage | Mapping[str, Storage] | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """Allocate.

        Args:
            module: the layer.
            slots: of each pool of states and windows; a sequence takes one, each draft one more.
            pages: of each op's histories.
            page: rows of a page.
            dtype: storage of histories and windows; the module's if None.
            state_dtype: of states.

        Raises:
            CacheError: the layer keeps nothing.
        """
        self.name = module.layer.name
        self.pages: dict[str, PageOwner] = {}
        self.states: dict[str, StateOwner] = {}
        self._objects: dict[str, dict[str, str]] = {}
        self._drafts: dict[int, int] = {}
        self._next = 0
        for node, grows, names in module.keeping:
            sizes = module.sizes_of(node)
            own: Any = dtype or stored(module, node)
            if grows:
                self.pages[node.name] = PageOwner.allocate(
                    node.op, sizes=sizes, pages=pages, page=page, dtype=own, device=module.device
                )
            if names:
                self._objects[node.name] = names
                self.states[node.name] = StateOwner.allocate(
                    node.op, sizes=sizes, slots=slots, dtype=own, state_dtype=state_dtype,
                    device=module.device,
                )  # fmt: skip
        if not (self.pages or self.states):
            raise CacheError("the layer keeps nothing between calls", op=self.name)

    @property
    def owners(self) -> tuple[PageOwner | StateOwner, ...]:
        """All of them."""
        return (*self.pages.values(), *self.states.values())

    def add(self) -> int:
        """A sequence that has seen nothing.

        Returns:
            Its handle, in every owner.

        Raises:
            ExhaustedError: no slot is free; nothing was taken.
        """
        return self._everywhere(lambda owner, handle: owner.add(handle=handle))

    def fork(self, handle: int) -> int:
        """A sequence that has seen what another has: pages are shared, states copied.

        Raises:
            ExhaustedError: no slot is free; nothing was taken.
            CacheError: there is no such sequence, or it speculates.
        """
        self.settled([handle])
        return self._everywhere(lambda owner, child: owner.fork(handle, child=child))

    def _everywhere(self, take: Any) -> int:
        handle = self._next
        with ExitStack() as undo:
            for owner in self.owners:
                take(owner, handle)
                undo.callback(owner.release, handle)
            undo.pop_all()
        self._next += 1
        return handle

    def release(self, handle: int) -> None:
        """End a sequence.

        Raises:
            CacheError: there is none of this handle.
        """
        for owner in self.owners:
            owner.release(handle)
        self._drafts.pop(handle, None)

    @contextmanager
    def append(self, handles: Sequence[int], tokens: int | Sequence[int]) -> Iterator[Kept]:
        """What one call takes that appends tokens to sequences.

        Where the call fails, no history has become longer; states and windows that its ops had
        updated by then stay so, and the sequences are to be released.

        Args:
            handles: distinct sequences.
            tokens: new tokens, one number for all or one each.

        Raises:
            ExhaustedError: pages are missing; no sequence has become longer.
            CacheError: a sequence is unknown, named twice, or speculates.
        """
        self.settled(handles)
        pools = self.named_pools({n: o.view(handles) for n, o in self.states.items()})
        with ExitStack() as stack:
            caches = {
                n: stack.enter_context(o.append(handles, tokens)) for n, o in self.pages.items()
            }
            yield Kept(caches, pools)

    @contextmanager
    def speculate(self, handles: Sequence[int], tokens: int) -> Iterator[Kept]:
        """What one call takes whose tokens are drafts: :meth:`accept` says how many are kept.

        Where the call fails, nothing is left of the drafts.

        Raises:
            ExhaustedError: pages or slots are missing; nothing was appended.
            CacheError: a sequence is unknown, named twice, or speculates already.
        """
        self.settled(handles)
        with ExitStack() as stack:
            caches = {
                n: stack.enter_context(o.append(handles, tokens)) for n, o in self.pages.items()
            }
            undo, taken = stack.enter_context(ExitStack()), {}
            for name, owner in self.states.items():
                taken[name] = owner.speculate(handles, tokens)
                undo.callback(owner.accept, handles, 0)
            yield Kept(caches, self.named_pools(taken))
            undo.pop_all()
        self._drafts |= dict.fromkeys(handles, tokens)

    def settled(self, handles: Sequence[int]) -> None:
        """Sequences are known, named once and do not speculate.

        Raises:
            CacheError: one is not; pages alone would not notice drafts.
        """
        distinct(self.name, handles)
        for handle in handles:
            self.owners[0].sequence(handle)
            if handle in self._drafts:
                raise CacheError(
                    f"sequence {handle} speculates", op=self.name, argument="handles",
                    expected="sequences whose drafts were accepted or given back", found=handle,
                )  # fmt: skip

    def accept(self, handles: Sequence[int], counts: int | Sequence[int]) -> None:
        """Keep what the first drafts of each sequence left, and roll the rest back.

        Args:
            handles: distinct sequences that speculate.
            counts: drafts that are kept, one number for all or one each.

        Raises:
            CacheError: a sequence is named twice, does not speculate, or has fewer drafts; nothing
                changes.
        """
        distinct(self.name, handles)
        counts = each(self.name, "counts", handles, counts)
        for handle, count in zip(handles, counts, strict=True):
            if not 0 <= count <= self._drafts.get(handle, -1):
                raise CacheError(
                    f"sequence {handle} has fewer drafts", op=self.name, argument="counts",
                    expected=f"0 .. {self._drafts.get(handle, 0)}", found=count,
                )  # fmt: skip
        for states in self.states.values():
            states.accept(handles, counts)
        for pages in self.pages.values():
            for handle, count in zip(handles, counts, strict=True):
                left = pages.length(handle) - self._drafts[handle] + count
                pages.truncate(handle, left, give_back=False)
        for handle in handles:
            del self._drafts[handle]

    def batch(self, size: int, capacity: int = 0, *, tokens: int = 1) -> LayerBatch:
        """A batch of fixed size whose tensors stay where they are, for CUDA graphs.

        Args:
            size: sequences of the batch.
            capacity: most tokens that one of them may hold.
            tokens: most tokens that a call appends to a row without a sequence.
        """
        return LayerBatch(
            self,
            {n: o.batch(size, capacity, tokens=tokens) for n, o in self.pages.items()},
            {n: o.batch(size) for n, o in self.states.items()},
        )

    def named_pools(self, taken: Mapping[str, Mapping[str, StatePool]]) -> dict[str, StatePool]:
        """Pools by name of the layer's object, from those by node and argument."""
        return {
            self._objects[node][name]: pool
            for node, pools in taken.items()
            for name, pool in pools.items()
        }


class LayerBatch:
    """Rows of a batch, each with a sequence of a :class:`LayerOwner` or with none.

    Attributes:
        kept: what calls take; its tensors never change their addresses.
    """

    def __init__(
        self, owner: LayerOwner, pages: Mapping[str, PageBatch], states: Mapping[str, StateBatch]
    ) -> None:
        """See :meth:`LayerOwner.batch`."""
        self._owner, self._pages, self._states = owner, pages, states
        self._rows: tuple[int, ...] = ()
        pools = owner.named_pools({n: b.arguments for n, b in states.items()})
        self.kept = Kept({n: b.cache for n, b in pages.items()}, pools)

    def set(self, handles: Sequence[int | None]) -> None:
        """Give rows their sequences; None, or nothing at the end, for a row without.

        Raises:
            CacheError: too many, or one is unknown, named twice, too long, or speculates.
        """
        rows = tuple(h for h in handles if h is not None)
        self._owner.settled(rows)
        for pages in self._pages.values():
            pages.set(handles)
        for states in self._states.values():
            states.set(handles)
        self._rows = rows

    @contextmanager
    def append(self, tokens: int | Sequence[int]) -> Iterator[Kept]:
        """Make room, give what the call takes, and note what it has appended unless it fails.

        Raises:
            ExhaustedError: pages are missing; nothing was written.
            CacheError: a sequence would pass the capacity, is there no more, or speculates.
        """
        self._owner.settled(self._rows)
        for states in self._states.values():
            states.update()  # drafts that were accepted since have moved a state
        with ExitStack() as stack:
            for batch in self._pages.values():
                stack.enter_context(batch.append(tokens))
            yield self.kept

    def close(self) -> None:
        """Give back the pages of rows without a sequence; the batch is not to be used again."""
        for batch in self._pages.values():
            batch.close()
