"""State pools: states of many sequences in one tensor of slots, updated in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attncc.dsl.axes import Pattern


@dataclass(frozen=True, slots=True)
class StatePool:
    """A view over a pool of states; given as an op's state argument, it is updated in place.

        o = gated_delta_rule(q, k, v, g, beta, s=StatePool(pool, slots))

    Only outputs come back. Every slot that no sequence names stays bitwise untouched. Slot -1 reads
    a zero state, and as a slot to write it writes nothing (padding of a captured batch, or with an
    out-slot a sequence that starts afresh). A sequence may write the slot it
    reads; a slot that another sequence reads or writes must not be written (an error where values
    are looked at: on a CPU, or asked for by the check knob of ``runtime.knobs``).

    Attributes:
        pool: the state's pattern with B counting slots, for instance ``[slots, H, K, V]``, any
            strides with a dense innermost axis, fp32, bf16 or fp16.
        slots: int32 ``[B]``: the slot that each sequence starts from.
        out_slots: int32 ``[B]``: the slot its final state goes to, ``slots`` if None; or int32
            ``[B, T]``: token t's own slot, which receives the state after it (speculative
            decoding). In packed calls T is at least the longest sequence. -1 writes nothing.
    """

    pool: torch.Tensor
    slots: torch.Tensor
    out_slots: torch.Tensor | None = None

    @property
    def written(self) -> torch.Tensor:
        """The slots that are written, ``[B]`` or ``[B, T]``."""
        return self.slots if self.out_slots is None else self.out_slots

    @property
    def each_token(self) -> bool:
        """Whether every token has an out-slot."""
        return self.written.dim() == 2

    def read(self, pattern: Pattern) -> torch.Tensor:
        """The states that sequences start from, ``B`` counting sequences; zeros for slot -1."""
        dim = pattern.dim_of("B")
        if not self.pool.shape[dim]:
            shape = [*self.pool.shape[:dim], self.slots.numel(), *self.pool.shape[dim + 1 :]]
            return self.pool.new_zeros(shape)
        found = self.pool.index_select(dim, self.slots.clamp(min=0).long())
        none = (self.slots < 0).view(-1, *[1] * (self.pool.dim() - 1 - dim))
        return found.masked_fill(none, 0)

    def write(self, pattern: Pattern, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Put states ``[B, ...]`` into slots ``[B]``; -1 writes nothing. Reads the device."""
        dim = pattern.dim_of("B")
        (kept,) = torch.nonzero(slots >= 0, as_tuple=True)
        rows = states.index_select(dim, kept).to(self.pool.dtype)
        self.pool.index_copy_(dim, slots[kept].long(), rows)
