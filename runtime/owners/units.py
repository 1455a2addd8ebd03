"""Numbered units, pages or slots, of which each is free or used by one sequence or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from attncc.dsl.axes import Pattern
from attncc.dsl.errors import CacheError, ExhaustedError


class Units:
    """A free list with reference counts.

    Attributes:
        op: name of the op, for errors.
        unit: ``page`` or ``slot``.
    """

    def __init__(self, op: str, unit: str, count: int) -> None:
        self.op = op
        self.unit = unit
        self._references: list[int] = []
        self._free: list[int] = []
        self.grow(count)

    def __len__(self) -> int:
        """Units that are free or used."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Units that nobody uses."""
        return len(self._free)

    def grow(self, count: int) -> None:
        """Hand out ``count`` more units, numbered behind those there are."""
        first = len(self._references)
        self._references += [0] * count
        # Taken from the end: of units that were never used the lowest first.
        self._free[:0] = range(first + count - 1, first - 1, -1)

    def need(self, wanted: int) -> None:
        """Find out whether so many are free.

        Raises:
            ExhaustedError: they are not; says how many are missing.
        """
        if wanted > self.free:
            raise ExhaustedError(self.unit, wanted=wanted, free=self.free, op=self.op)

    def take(self, count: int) -> list[int]:
        """Units that were free, each with one reference.

        Raises:
            ExhaustedError: there are not enough; none is taken.
        """
        self.need(count)
        taken = [self._free.pop() for _ in range(count)]
        for unit in taken:
            self._references[unit] = 1
        return taken

    def share(self, units: Iterable[int]) -> None:
        """One more reference to each of some units in use."""
        for unit in units:
            assert self._references[unit] > 0
            self._references[unit] += 1

    def drop(self, units: Iterable[int]) -> None:
        """One reference less to each; without any it is free."""
        for unit in units:
            assert self._references[unit] > 0
            self._references[unit] -= 1
            if not self._references[unit]:
                self._free.append(unit)

    def references(self, unit: int) -> int:
        """How many sequences use a unit."""
        return self._references[unit]


class Handles:
    """Handles of sequences: whole numbers, given by the caller or counted up, never used twice."""

    def __init__(self, op: str) -> None:
        self.op = op
        self._next = 0

    def fresh(self, handle: int | None, live: Mapping[int, object]) -> int:
        """A handle that is not in use.

        Args:
            handle: the caller's choice, or None for the next number.
            live: those in use.

        Raises:
            CacheError: the caller's choice is in use.
        """
        if handle is None:
            return self._next
        if handle in live:
            raise CacheError(
                "a sequence of this handle is there", op=self.op, argument="handle", found=handle
            )
        return handle

    def used(self, handle: int) -> None:
        """Note a handle, so that it is not counted again."""
        self._next = max(self._next, handle + 1)


def distinct(op: str, handles: Sequence[int | None]) -> None:
    """No sequence stands twice.

    Raises:
        CacheError: one does.
    """
    seen = set()
    for handle in handles:
        if handle is not None and handle in seen:
            raise CacheError("a sequence is named twice", op=op, argument="handles", found=handle)
        seen.add(handle)


def each(
    op: str, argument: str, handles: Sequence[object], given: int | Sequence[int]
) -> list[int]:
    """A number for each sequence, from one for all or one each.

    Raises:
        CacheError: another number of them, or one below 0.
    """
    found = [given] * len(handles) if isinstance(given, int) else list(given)
    if len(found) != len(handles):
        raise CacheError(
            "one number a sequence is wanted",
            op=op, argument=argument, expected=len(handles), found=len(found),
        )  # fmt: skip
    if any(n < 0 for n in found):
        raise CacheError(
            "a negative number", op=op, argument=argument, expected="0 or more", found=min(found)
        )
    return found


def alone(
    tensor: torch.Tensor, pattern: Pattern, axis: str, sizes: Mapping[str, int]
) -> tuple[torch.Tensor, int]:
    """A view in which an axis is a dimension of its own, and which one that is."""
    dim = pattern.dim_of(axis)
    names = pattern.dims[dim]
    if len(names) == 1:
        return tensor, dim
    shape = [*tensor.shape[:dim], *(sizes[a] for a in names), *tensor.shape[dim + 1 :]]
    return tensor.view(shape), dim + names.index(axis)


def int32(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Host numbers on a device, without waiting for it."""
    return upload(torch.tensor(values, dtype=torch.int32), device)


def upload(held: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor on a device, without waiting for it."""
    found = torch.empty(held.shape, dtype=held.dtype, device=device)
    send(found, held)
    return found


def send(target: torch.Tensor, held: torch.Tensor) -> None:
    """Put a host tensor's values into a device tensor of its shape, without waiting for it.

    The pinned copy is torch's: it is not used again before the transfer has read it.
    """
    if target.is_cuda:
        target.copy_(held.pin_memory(), non_blocking=True)
    else:
        target.copy_(held)
