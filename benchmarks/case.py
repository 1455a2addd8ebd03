"""What a benchmark is: inputs, our call, the peers' calls, an oracle, and what bounds the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = dict[str, Any]
Outputs = Mapping[str, torch.Tensor]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Work:
    """A call that is ready to be repeated.

    Attributes:
        fn: runs it and returns its outputs by name, laid out as ours.
        buffers: outputs that ``fn`` writes in place; filled with NaN before the answer is checked.
        reset: puts back what ``fn`` changes (lengths of a cache); run before each series of calls.
        measure: ms of one run, for a work that measures itself (in a new process).
    """

    fn: Callable[[], Outputs]
    buffers: Outputs = field(default_factory=dict)
    reset: Callable[[], None] = _nothing
    measure: Callable[[], float] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of one output beside its oracle.

    Attributes:
        output: the output's name.
        index: which piece of it.
        oracle: fp64, on the same stored inputs.
        eager: the torch implementation with fp32 accumulation, rounded to ``dtype``.
        dtype: the dtype whose eps the budget takes.
    """

    output: str
    index: tuple[int | slice, ...]
    oracle: torch.Tensor
    eager: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Case:
    """One work, measured beside each of its peers.

    Attributes:
        group: the group's name.
        name: the case within the group.
        build: makes the inputs on a device, the same ones each time.
        ours: makes our call for a backend's name.
        peers: makes a peer's call, by the peer's name; imports the peer when called.
        parts: the oracle's pieces; all of the output where that is affordable.
        bytes: least bytes moved to and from memory.
        flops: floating-point operations of the usual algorithm.
        timing: ``events``, ``graph`` (CUDA-graph replay where both sides can be captured),
            ``host`` (host time per call) or ``process`` (works that measure themselves).
        reads: the traffic is nearly all reading: the read rate is its ceiling, not the copy's.
        backend: the only one of ours that the case is about; None for those asked for.
    """

    group: str
    name: str
    build: Callable[[torch.device], Inputs]
    ours: Callable[[Inputs, str], Work]
    peers: Mapping[str, Callable[[Inputs], Work]]
    parts: Callable[[Inputs], Iterator[Part]]
    bytes: int
    flops: float
    timing: str = "events"
    reads: bool = False
    backend: str | None = None

    @property
    def work(self) -> str:
        """``<group>/<case>``, the row's key beside the peer."""
        return f"{self.group}/{self.name}"


def generator(device: torch.device, seed: int = 0) -> torch.Generator:
    """A seeded generator on the device."""
    return torch.Generator(device=device).manual_seed(seed)


def nan_like(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output buffer in which nothing has been written yet."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
