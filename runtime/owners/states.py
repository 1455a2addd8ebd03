"""Slots of state pools and the sequences that own them: taken, forked, speculated, given back.

The states and windows of one op share one slot number. Nothing here reads the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from attncc.dsl.errors import CacheError, SizeError
from attncc.dsl.ir import Lifetime
from attncc.runtime import checks
from attncc.runtime.caches import Storage
from attncc.runtime.owners import kept
from attncc.runtime.owners.owner import Owner
from attncc.runtime.owners.state_batch import StateBatch
from attncc.runtime.owners.units import Units, distinct, each, int32
from attncc.runtime.pools import StatePool


@dataclass(slots=True)
class Slot:
    """One sequence.

    Attributes:
        slot: where its state lies.
        drafts: slots of the states after each draft token, while it speculates; else None.
    """

    slot: int
    drafts: tuple[int, ...] | None = None


class StateOwner(Owner[Slot]):
    """Owns the slots of an op's states and windows, and the sequences in them.

        states = ac.StateOwner.allocate(gated_delta_rule, sizes=sizes, slots=256)
        a = states.add()
        o = gated_delta_rule(q, k, v, g, beta, **states.view([a]))
        o = gated_delta_rule.decode(*drafts, **states.speculate([a], 4))
        states.accept([a], [2])                    # keeps the state after the second draft

    A sequence starts with zeros. Everything that needs slots says how many are missing before it
    takes or writes anything. Copies go to the device in stream order.

    Attributes:
        pools: the pools by name, ``B`` counting slots.
    """

    LIFETIMES: ClassVar[tuple[Lifetime, ...]] = kept.FIXED

    def __init__(self, op: Any, pools: Mapping[str, torch.Tensor]) -> None:
        """Take over pools with one number of slots.

        Args:
            op: the op (or its declaration).
            pools: by name of its ``State`` and ``Window`` arguments, in their patterns.

        Raises:
            ArgumentError: a state without a memory axis B of its own.
            CacheError: the op keeps none of this name.
            DeviceError, RankError, SizeError: the pools do not fit together.
            DtypeError: no call takes a pool of that dtype.
        """
        declaration = kept.declared(op)
        self.op = declaration.name
        self.pools = dict(pools)
        self._dims: dict[str, int] = {}
        count = None
        tensors = kept.kept(declaration, self.LIFETIMES, self.pools)
        self.device = self.pools[tensors[0].name].device
        for t in tensors:
            pool = self.pools.get(t.name)
            if pool is None:
                continue
            kept.own_batch_axis(declaration, t)
            checks.rank(self.op, t.name, pool, t.pattern)
            checks.device(self.op, t.name, pool, self.device)
            checks.dtype(self.op, t.name, pool, checks.REAL)
            self._dims[t.name] = t.pattern.dim_of("B")
            found = pool.shape[self._dims[t.name]]
            if found != (found if count is None else count):
                raise SizeError(
                    "pools of different numbers of slots",
                    op=self.op, argument=t.name, axis="B", expected=count, found=found,
                )  # fmt: skip
            count = found
        super().__init__(self.op, Units(self.op, "slot", count or 0))

    @classmethod
    def allocate(
        cls,
        op: Any,
        *,
        sizes: Mapping[str, int],
        slots: int,
        names: Iterable[str] = (),
        dtype: torch.dtype | Mapping[str, Storage] = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Allocate pools for an op and own them.

        Args:
            op: the op (or its declaration).
            sizes: sizes of every axis of its states and windows but B; a window's axis counts the
                rows that the body sees, of which the last W - 1 are kept.
            slots: slots of each pool.
            names: which states and windows; all if there are none.
            dtype: storage of windows, whose rows are activations, or of anything by name.
            state_dtype: of states that ``dtype`` does not name.
            device: where they live.

        Raises:
            ArgumentError: a state without a memory axis B of its own.
            CacheError: the op keeps none, or a size or a storage is missing.
            DtypeError: no call takes a state or window of that dtype.
        """
        pools = kept.pools(
            kept.declared(op), sizes=sizes, slots=slots, device=device, names=names,
            stored=kept.Stored(dtype, state_dtype), lifetimes=cls.LIFETIMES,
        )  # fmt: skip
        return cls(op, pools)

    # --- looking

    def slot_of(self, handle: int) -> int:
        """Where a sequence's state lies."""
        return self.sequence(handle).slot

    # --- sequences and slots

    def add(self, *, handle: int | None = None) -> int:
        """A sequence whose states are zero.

        Args:
            handle: the caller's own number for it (that of another owner, say); counted up if None.

        Returns:
            Its handle.

        Raises:
            ExhaustedError: no slot is free.
            CacheError: the handle is in use.
        """
        handle, slot = self._new(handle)
        for name, pool in self.pools.items():
            pool.select(self._dims[name], slot).zero_()
        return handle

    def release(self, handle: int) -> None:
        """End a sequence; its slots are free again."""
        held = self.sequence(handle)
        self._units.drop([held.slot, *(held.drafts or ())])
        del self._sequences[handle]

    def fork(self, handle: int, *, child: int | None = None) -> int:
        """A sequence with a copy of another's states, made on the device.

        Args:
            handle: the sequence; it must not be speculating.
            child: the caller's own number for the new one; counted up if None.

        Returns:
            The new one's handle.

        Raises:
            ExhaustedError: no slot is free.
            CacheError: the handle is in use, or the sequence speculates.
        """
        (parent,) = self._settled([handle])
        child, slot = self._new(child)
        for name, pool in self.pools.items():
            dim = self._dims[name]
            pool.select(dim, slot).copy_(pool.select(dim, parent.slot))
        return child

    def view(self, handles: Sequence[int]) -> dict[str, StatePool]:
        """Arguments of a call that updates the states of some sequences in place.

        Raises:
            CacheError: a sequence is unknown, named twice, or speculates.
        """
        slots = int32([s.slot for s in self._settled(handles)], self.device)
        return {name: StatePool(pool, slots) for name, pool in self.pools.items()}

    # --- speculation

    def speculate(
        self, handles: Sequence[int], tokens: int | Sequence[int]
    ) -> dict[str, StatePool]:
        """Arguments of a call whose tokens are drafts: the state after each gets a slot of its own.

        The states that the sequences have stay as they are until :meth:`accept`.

        Args:
            handles: distinct sequences.
            tokens: drafts, one number for all or one each.

        Returns:
            Pools with out-slots ``[B, T]``, T the largest number.

        Raises:
            ExhaustedError: slots are missing; none was taken.
            CacheError: a sequence is unknown, named twice, or speculates already.
        """
        rows = self.draft(handles, tokens)
        width = max(map(len, rows), default=0)
        out = [[*row, *[-1] * (width - len(row))] for row in rows]
        table = int32(out, self.device).view(len(rows), width)
        slots = int32([self.sequence(h).slot for h in handles], self.device)
        return {name: StatePool(pool, slots, table) for name, pool in self.pools.items()}

    def draft(self, handles: Sequence[int], tokens: int | Sequence[int]) -> list[tuple[int, ...]]:
        """Take the slots of :meth:`speculate`: each sequence's, in the order of its drafts.

        Raises:
            ExhaustedError, CacheError: as there.
        """
        held = self._settled(handles)
        counts = each(self.op, "tokens", handles, tokens)
        taken = iter(self._units.take(sum(counts)))
        for s, n in zip(held, counts, strict=True):
            s.drafts = tuple(next(taken) for _ in range(n))
        return [s.drafts or () for s in held]

    def accept(self, handles: Sequence[int], counts: int | Sequence[int]) -> None:
        """Keep the states after the accepted drafts and give back all other slots; nothing moves.

        Args:
            handles: sequences that speculate.
            counts: accepted drafts, one number for all or one each; 0 keeps the state from before.

        Raises:
            CacheError: a sequence does not speculate, or has fewer drafts; nothing changes.
        """
        distinct(self.op, handles)
        held = [self.sequence(h) for h in handles]
        numbers = each(self.op, "counts", handles, counts)
        for handle, s, n in zip(handles, held, numbers, strict=True):
            if s.drafts is None or n > len(s.drafts):
                raise CacheError(
                    f"sequence {handle} has fewer drafts", op=self.op, argument="counts",
                    expected=f"at most {len(s.drafts or ())}", found=n,
                )  # fmt: skip
        for s, n in zip(held, numbers, strict=True):
            slots = (s.slot, *(s.drafts or ()))
            s.slot, s.drafts = slots[n], None
            self._units.drop(slots[:n] + slots[n + 1 :])

    def batch(self, size: int, *, tokens: int | None = None) -> StateBatch:
        """Arguments whose tensors stay where they are, for a batch of fixed size and CUDA graphs.

        Args:
            size: sequences of the batch.
            tokens: drafts of each in a speculative call; None for calls that update in place.
        """
        return StateBatch(self, size, tokens)

    def _new(self, handle: int | None) -> tuple[int, int]:
        handle = self._handles.fresh(handle, self._sequences)
        (slot,) = self._units.take(1)
        self._handles.used(handle)
        self._sequences[handle] = Slot(slot)
        return handle, slot

    def _settled(self, handles: Sequence[int]) -> list[Slot]:
        distinct(self.op, handles)
        held = [self.sequence(h) for h in handles]
        for handle, s in zip(handles, held, strict=True):
            if s.drafts is not None:
                raise CacheError(
                    f"sequence {handle} speculates", op=self.op, argument="handles",
                    help="call accept() first; accept([...], 0) keeps the state from before",
                )  # fmt: skip
        return held


class ConvWindow(StateOwner):
    """Owns the windows of an op: the last W - 1 rows of each sequence of a short convolution.

        windows = ac.ConvWindow.allocate(short_conv, sizes={"W": 4, "D": 2048}, slots=256)
        a = windows.add()                          # nothing seen yet: rows of zeros
        y = short_conv(x, w, **windows.view([a]))  # prefill and decode alike

    Slots are taken, forked and speculated with as those of states. An op that carries states as
    well has both in one :class:`StateOwner`, or its windows here where they live otherwise.
    """

    LIFETIMES: ClassVar[tuple[Lifetime, ...]] = (Lifetime.WINDOW,)
