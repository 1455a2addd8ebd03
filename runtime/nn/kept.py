"""What a layer keeps between calls: a cache for each of its ops, a pool for each state and window.

For a fixed set of sequences :meth:`LayerModule.allocate` makes it at once; where sequences come and
go, a :class:`LayerOwner` has one owner of pages or slots for each op and one handle a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncc.dsl.axes import PAGE
from attncc.dsl.errors import CacheError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT, Dtype, LayerNode
from attncc.runtime.caches import Cache, Storage
from attncc.runtime.owners.allocation import allocate
from attncc.runtime.owners.page_batch import PageBatch
from attncc.runtime.owners.pages import PageOwner
from attncc.runtime.owners.state_batch import StateBatch
from attncc.runtime.owners.states import StateOwner
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import Quantised

if TYPE_CHECKING:
    from attncc.runtime.nn.module import LayerModule


@dataclass(frozen=True, slots=True)
class Kept:
    """What one call of a layer reads and writes of the past.

    Attributes:
        caches: by name of the op's node.
        pools: by name of the state or window among the layer's objects.
    """

    caches: Mapping[str, Cache]
    pools: Mapping[str, StatePool]

    @property
    def lengths(self) -> torch.Tensor | None:
        """Tokens that each sequence holds, on the device; None where nothing grows."""
        return next((c.lengths for c in self.caches.values()), None)


def capacity(module: LayerModule, kept: Kept) -> int:
    """Most tokens that a sequence may come to hold; 0 where nothing grows."""
    most = 0
    for node, grows, _ in keeping(module):
        cache = kept.caches.get(node.name) if grows else None
        if cache is not None and node.op is not None:
            t = next(t for t in node.op.tensors if t.lifetime is Lifetime.CACHE)
            dims = cache.pattern(node.op.name, t)
            table = getattr(cache, "block_table", None)
            rows = cache.tensors[t.name].shape[dims.dim_of("S" if table is None else PAGE)]
            most = max(most, rows if table is None else rows * table.shape[1])
    return most


def keeping(module: LayerModule) -> Iterator[tuple[LayerNode, bool, dict[str, str]]]:
    """The ops of a layer that keep something: node, whether it grows, and pools' objects."""
    for node in module.layer.nodes:
        if node.op is None:
            continue
        bound = dict(node.binds)
        held = [t for t in node.op.tensors if t.lifetime in KEPT and t.name in bound]
        pools = {t.name: bound[t.name] for t in held if t.lifetime is not Lifetime.CACHE}
        if held:
            yield node, len(pools) < len(held), pools


def stored(module: LayerModule, node: LayerNode) -> dict[str, Storage]:
    """What histories and windows of an op are stored as: the module's dtype, or e4m3 by the layer.

    Scales are the history's own: powers of two, so that quantising rows twice changes no bit.
    """
    assert node.op is not None
    quantised = Quantised(scale="ue8m0")
    objects = {name: module.layer.object(target) for name, target in node.binds}
    return {
        t.name: quantised if objects[t.name].dtype is Dtype.E4M3 else module.dtype
        for t in node.op.tensors
        if t.lifetime in (Lifetime.CACHE, Lifetime.WINDOW) and t.name in objects
    }


def fixed(
    module: LayerModule, batch: int, capacity: int, page: int | None, dtype: Any,
    state_dtype: torch.dtype,
) -> Kept:  # fmt: skip
    """Everything for a fixed set of sequences, empty; see :meth:`LayerModule.allocate`."""
    caches: dict[str, Cache] = {}
    pools: dict[str, StatePool] = {}
    for node, _, names in keeping(module):
        found = allocate(
            node.op, sizes={**module.sizes_of(node), "B": batch}, capacity=capacity, page=page,
            dtype=dtype or stored(module, node), state_dtype=state_dtype, device=module.device,
        )  # fmt: skip
        if found.cache is not None:
            caches[node.name] = found.cache
        pools |= {names[n]: pool for n, pool in found.states.items()}
    return Kept(caches, pools)


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
        for node, grows, names in keeping(module):
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

        Args:
            handles: distinct sequences.
            tokens: new tokens, one number for all or one each.

        Raises:
            ExhaustedError: pages are missing; no sequence has become longer.
            CacheError: a sequence is unknown, named twice, or speculates.
        """
        pools = self._pools({n: o.view(handles) for n, o in self.states.items()})
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
        with ExitStack() as stack:
            caches = {
                n: stack.enter_context(o.append(handles, tokens)) for n, o in self.pages.items()
            }
            undo, taken = stack.enter_context(ExitStack()), {}
            for name, owner in self.states.items():
                taken[name] = owner.speculate(handles, tokens)
                undo.callback(owner.accept, handles, 0)
            yield Kept(caches, self._pools(taken))
            undo.pop_all()
        self._drafts |= dict.fromkeys(handles, tokens)

    def accept(self, handles: Sequence[int], counts: Sequence[int]) -> None:
        """Keep what the first drafts of each sequence left, and roll the rest back.

        Args:
            handles: sequences that speculate.
            counts: drafts of each that are kept.

        Raises:
            CacheError: a sequence does not speculate, or has fewer drafts; nothing changes.
        """
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
            {n: o.batch(size, capacity, tokens=tokens) for n, o in self.pages.items()},
            {n: o.batch(size) for n, o in self.states.items()},
            self._pools,
        )

    def _pools(self, taken: Mapping[str, Mapping[str, StatePool]]) -> dict[str, StatePool]:
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
        self, pages: Mapping[str, PageBatch], states: Mapping[str, StateBatch], named: Any
    ) -> None:
        """See :meth:`LayerOwner.batch`."""
        self._pages, self._states = pages, states
        pools = named({n: b.arguments for n, b in states.items()})
        self.kept = Kept({n: b.cache for n, b in pages.items()}, pools)

    def set(self, handles: Sequence[int | None]) -> None:
        """Give rows their sequences; None, or nothing at the end, for a row without.

        Raises:
            CacheError: too many, or one is unknown, named twice or too long.
        """
        for pages in self._pages.values():
            pages.set(handles)
        for states in self._states.values():
            states.set(handles)

    @contextmanager
    def append(self, tokens: int | Sequence[int]) -> Iterator[Kept]:
        """Make room, give what the call takes, and note what it has appended unless it fails.

        Raises:
            ExhaustedError: pages are missing; nothing was written.
            CacheError: a sequence would pass the capacity.
        """
        with ExitStack() as stack:
            for batch in self._pages.values():
                stack.enter_context(batch.append(tokens))
            yield self.kept

    def close(self) -> None:
        """Give back the pages of rows without a sequence; the batch is not to be used again."""
        for batch in self._pages.values():
            batch.close()
