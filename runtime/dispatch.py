"""Calls that come again: by signature, straight to the launches.

The first call of a signature runs the ordinary way; the second is recorded meanwhile; later ones
skip binding and planning. What a signature does not hold is only what the device holds. Calls where
values are looked at, on CPUs, under a dispatch mode or with gradients always go the ordinary way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from attncc.dsl.errors import ToolchainError
from attncc.runtime import knobs
from attncc.runtime.quick import Take, take
from attncc.runtime.recorded import Apart, Recorded, gather, record
from attncc.runtime.recorder import NotRecorded
from attncc.runtime.recording import KEPT
from attncc.runtime.replay import Frame, Replay, replay_of
from attncc.runtime.signature import Layout, Seen, read

if TYPE_CHECKING:
    from attncc.runtime.api import Op

MOST = 256
"""Signatures that an op remembers."""
OFTEN = 3
"""Runs of a recording after which a comparison is written out for it."""


class _Known:
    """A call that can be done again on any tensors of its signature; holds none of them.

    The addresses of the last call that was found to overlap nowhere are kept: a call that has the
    same ones is not asked again, nor are they written again.
    """

    __slots__ = ("_apart", "_blank", "_clear", "_replay", "_rest", "_result", "_runs", "_take")

    def __init__(self, recorded: Recorded, replay: Replay) -> None:
        tensors = list(recorded.leaves.tensors.values())
        pointers = [t.data_ptr() for t in tensors]
        written = (*recorded.given, *recorded.pools)
        self._apart = Apart([Layout.of(t) for t in tensors], pointers, written)
        self._replay = replay
        self._rest = [0] * (replay.recording.registers - len(tensors))
        self._blank = replay.frame(()), [0] * replay.recording.registers
        self._clear: list[int] = []
        recording = replay.recording
        single = len(recording.results) == 1 and not recording.partial
        self._result = recording.results[0][1] if single else -1
        self._take: Take | None = None
        self._runs = 0

    def fits(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Frame, list[int], list[float]] | None:
        """A frame with the tensors of a call of this signature, addresses and host numbers.

        None where it is of another signature, or may be: what this says no to has to be read.
        """
        if self._take is None:
            return None
        frame, pointers = self._blank
        frame, pointers = frame.copy(), pointers.copy()
        numbers = self._take(args, kwargs, frame, pointers, torch.is_grad_enabled())
        if numbers is None:
            return None
        clear = self._clear
        if pointers == clear:
            return frame, clear, numbers
        if self._apart.clash(pointers) is not None:
            return None
        self._clear = pointers
        return frame, pointers, numbers

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note that a call was of this signature; one that comes often is told without reading."""
        self._runs += 1
        if self._runs == OFTEN:
            self._take = take(args, kwargs)

    def separate(self, seen: Seen) -> bool:
        """Whether what is written shares no memory with anything else."""
        return self._apart.clash(seen.pointers) is None

    def placed(self, seen: Seen) -> tuple[Frame, list[int], list[float]]:
        """What :meth:`run` takes."""
        return self._replay.frame(seen.tensors), seen.pointers + self._rest, seen.numbers

    def run(self, op: Op, frame: Frame, pointers: list[int], numbers: list[float]) -> Any:
        """Do it on the tensors of a frame."""
        replay = self._replay
        with replay.lock:
            replay.bind(pointers, numbers)
            replay.run(frame)
        if self._result >= 0:
            return frame[self._result]
        recording = replay.recording
        named: dict[str, Any] = {name: frame[register] for name, register in recording.results}
        return gather(op, named, partial=recording.partial)


def eligible(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may be done from memory: its tensors are on a GPU, and nobody watches."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return (
                value.is_cuda
                and not torch._C._len_torch_dispatch_stack()
                and torch._C._functorch.peek_interpreter_stack() is None
            )
    return False


def values_are_read() -> bool:
    """Whether calls look at lengths, tables and slots, or kernels run on the host."""
    return knobs.check() or knobs.interpreting()


@dataclass(frozen=True, slots=True)
class _Memory:
    """What is known of calls under one set of knobs and kernels.

    A thread that records while another one finds other knobs puts its recording into a memory that
    nobody looks at any more.
    """

    knobs: tuple[Any, ...]
    chosen: int
    ordinary: bool
    known: dict[object, _Known | None] = field(default_factory=dict)
    met: dict[object, None] = field(default_factory=dict)
    latest: dict[object, _Known] = field(default_factory=dict)

    def again(self, key: object) -> bool:
        """Whether a signature has come before, and is to be recorded now."""
        if key in self.known:  # it cannot be
            return False
        if key in self.met:
            return True
        _bound(self.met)
        self.met[key] = None
        return False


class Repeated:
    """What an op remembers of its calls, in the order they came."""

    def __init__(self) -> None:
        self.memory = _Memory((), -1, ordinary=True)

    def run(self, op: Op, phase: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call; see ``Op``."""
        memory = self._current() if eligible(args, kwargs) else None
        if memory is None or memory.ordinary:
            return op.ordinary(phase, args, kwargs)
        kind = phase, len(args), *kwargs
        last = memory.latest.get(kind)
        fitting = None if last is None else last.fits(args, kwargs)
        if last is not None and fitting is not None:
            return last.run(op, *fitting)
        seen = read(phase, args, kwargs)
        if seen is None:
            return op.ordinary(phase, args, kwargs)
        key = tuple(seen.key)
        known = memory.known.get(key)
        if known is not None and known.separate(seen):
            known.again(args, kwargs)
            memory.latest[kind] = known
            return known.run(op, *known.placed(seen))
        if known is not None or not memory.again(key):
            return op.ordinary(phase, args, kwargs)
        return self._recorded(op, phase, args, kwargs, key, memory)

    def _current(self) -> _Memory:
        """The memory, a new one if other knobs or kernels decided what is in it."""
        now, memory = knobs.snapshot(), self.memory
        if now != memory.knobs or memory.chosen != KEPT.chosen:
            memory = self.memory = _Memory(now, KEPT.chosen, values_are_read())
        return memory

    def _recorded(
        self, op: Op, phase: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: object,
        memory: _Memory,
    ) -> Any:  # fmt: skip
        _bound(memory.known)
        try:
            recorded = record(op, phase, args, kwargs, strict=False)
        except NotRecorded:
            memory.known[key] = None
            return op.ordinary(phase, args, kwargs)
        known = None
        if recorded.recording is not None:
            with suppress(ToolchainError):  # a kernel that only its own launcher can launch
                known = _Known(recorded, replay_of(recorded.recording))
        memory.known[key] = known
        memory.met.pop(key, None)
        return recorded.result


def _bound(table: dict[object, Any]) -> None:
    """Make room for one more."""
    while len(table) >= MOST:
        with suppress(RuntimeError, StopIteration):  # another thread changed it between the two
            table.pop(next(iter(table)), None)
