"""What a call does on the device, in a form that can be done again on other tensors.

A recording is a list of work over numbered registers, each of which holds a tensor: those of the
call first, then workspaces, results and what steps make. :mod:`attncc.runtime.recorder` makes it,
:mod:`attncc.runtime.replay` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from attncc.runtime.kernels import Kernel

Grid = tuple[int, int, int]


class Kept:
    """Tells when what is kept of calls is no longer right.

    Attributes:
        loaded: counts the times that loaded kernels were forgotten (after a fork).
        chosen: counts the times that kernels may be chosen otherwise (a new table of plans).
    """

    __slots__ = ("chosen", "loaded")

    def __init__(self) -> None:
        self.loaded = self.chosen = 0

    def forget(self) -> None:
        """Loaded kernels are gone."""
        self.loaded += 1
        self.chosen += 1

    def choose_again(self) -> None:
        """Calls must ask again which kernels they take."""
        self.chosen += 1


KEPT = Kept()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies: a view of the tensor in a register.

    Attributes:
        register: which tensor.
        offset: bytes from its first element.
        shape: of the view.
        strides: of the view, in elements.
        dtype: of the view.
    """

    register: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Register:
    """A whole tensor, as steps take it."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """A host number of the call, by its place among them."""

    index: int


Value = Place | Number | int | float


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's launch: the values are in parameter order; see :mod:`attncc.runtime.lanes`."""

    kernel: Kernel
    grid: Grid
    values: tuple[Value, ...]
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """What a lane gets from here on comes after what another one has so far."""

    lane: int
    on: int


@dataclass(frozen=True, slots=True)
class Step:
    """Device work that is no kernel of ours; ``outputs`` are the registers it fills."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A dense tensor that is allocated: a workspace, or a result that the caller did not give.

    ``zeroed``: counters (:mod:`attncc.runtime.arrivals`), zero before and after each launch.
    """

    register: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False

    @property
    def bytes(self) -> int:
        """Its size."""
        n = self.dtype.itemsize
        for extent in self.shape:
            n *= extent
        return n


@dataclass(frozen=True, slots=True)
class Recording:
    """A call to be done again on tensors of the same layout.

    Attributes:
        device: where it ran.
        inputs: how many registers are tensors of the call; they come first.
        registers: their number in all.
        work: launches, steps and waits in order; steps are on lane 0.
        workspaces: what kernels leave each other; never read before it is written.
        fresh: results that were allocated.
        results: the register of each result, by name, in the order they are returned.
        partial: the results are to be returned as a partial.
    """

    device: torch.device
    inputs: int
    registers: int
    work: tuple[Launch | Step | Wait, ...]
    workspaces: tuple[Buffer, ...]
    fresh: tuple[Buffer, ...]
    results: tuple[tuple[str, int], ...]
    partial: bool
