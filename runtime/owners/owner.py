"""What owners of pages and of slots have in common: sequences by handle, and units they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from attncc.dsl.errors import CacheError
from attncc.runtime.owners.units import Handles, Units, distinct

Held = TypeVar("Held")


class Owner(Generic[Held]):
    """Sequences by handle, and the units that they take.

    Attributes:
        op: name of the op, for errors.
    """

    def __init__(self, op: str, units: Units) -> None:
        self.op = op
        self._units = units
        self._handles = Handles(op)
        self._sequences: dict[int, Held] = {}

    @property
    def free(self) -> int:
        """Units (pages or slots) that may be taken."""
        return self._units.free

    @property
    def handles(self) -> tuple[int, ...]:
        """The sequences there are."""
        return tuple(self._sequences)

    def sequence(self, handle: int) -> Held:
        """A sequence: to look at, not to change.

        Raises:
            CacheError: there is none of this handle.
        """
        found = self._sequences.get(handle)
        if found is None:
            raise CacheError("no such sequence", op=self.op, argument="handle", found=handle)
        return found

    def rows(self, handles: Sequence[int | None], size: int) -> list[int | None]:
        """The sequences of a batch's rows: these, then rows without one.

        Raises:
            CacheError: they are too many, or one is unknown or named twice.
        """
        if len(handles) > size:
            raise CacheError(
                "more sequences than rows", op=self.op, argument="handles",
                expected=f"at most {size}", found=len(handles),
            )  # fmt: skip
        distinct(self.op, handles)
        for handle in handles:
            if handle is not None:
                self.sequence(handle)
        return [*handles, *[None] * (size - len(handles))]
