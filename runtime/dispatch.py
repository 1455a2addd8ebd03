"""Calls that come again: by signature, straight to the launches.

The first call of a signature runs the ordinary way; the second is recorded meanwhile; later ones
skip binding and planning. What a signature does not hold is only what the device holds. Calls where
values are looked at, on CPUs, under a dispatch mode or with gradients always go the ordinary way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from attncc.dsl.errors import ToolchainError
from attncc.runtime import knobs
from attncc.runtime.recorded import Apart, Recorded, gather, record
from attncc.runtime.recorder import NotRecorded
from attncc.runtime.recording import KEPT
from attncc.runtime.replay import Replay, replay_of
from attncc.runtime.signature import Layout, Seen, read

if TYPE_CHECKING:
    from attncc.runtime.api import Op

MOST = 256
"""Signatures that an op remembers."""


class _Known:
    """A call that can be done again on any tensors of its signature; holds none of them."""

    __slots__ = ("_apart", "_replay", "_rest")

    def __init__(self, recorded: Recorded, replay: Replay) -> None:
        tensors = list(recorded.leaves.tensors.values())
        pointers = [t.data_ptr() for t in tensors]
        written = (*recorded.given, *recorded.pools)
        self._apart = Apart([Layout.of(t) for t in tensors], pointers, written)
        self._replay = replay
        self._rest = [0] * (replay.recording.registers - len(tensors))

    def separate(self, seen: Seen) -> bool:
        """Whether what is written shares no memory with anything else."""
        return self._apart.clash(seen.pointers) is None

    def run(self, op: Op, seen: Seen) -> Any:
        """Do it on these tensors."""
        replay = self._replay
        frame = replay.frame(seen.tensors)
        with replay.lock:
            replay.bind(seen.pointers + self._rest, seen.numbers)
            replay.run(frame)
        recording = replay.recording
        named: dict[str, Any] = {name: frame[register] for name, register in recording.results}
        return gather(op, named, partial=recording.partial)


def eligible(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may be done from memory: its tensors are on a GPU, and nobody watches."""
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    return (
        first is not None
        and first.is_cuda
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def values_are_read() -> bool:
    """Whether calls look at lengths, tables and slots, or kernels run on the host."""
    return knobs.check() or knobs.interpreting()


class Repeated:
    """What an op remembers of its calls, in the order they came."""

    def __init__(self) -> None:
        self._known: dict[object, _Known | None] = {}
        self._met: dict[object, None] = {}
        self._knobs: tuple[Any, ...] | None = None
        self._ordinary = False
        self._chosen = KEPT.chosen

    def run(self, op: Op, phase: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call; see ``Op``."""
        seen = read(phase, args, kwargs) if eligible(args, kwargs) and self._current() else None
        if seen is None:
            return op.ordinary(phase, args, kwargs)
        key = tuple(seen.key)
        known = self._known.get(key)
        if known is not None and known.separate(seen):
            return known.run(op, seen)
        if known is not None or not self._again(key):
            return op.ordinary(phase, args, kwargs)
        return self._recorded(op, phase, args, kwargs, key)

    def _current(self) -> bool:
        """Forget what other knobs or kernels decided; whether calls may be remembered at all."""
        now = knobs.snapshot()
        if now != self._knobs or self._chosen != KEPT.chosen:
            self._known.clear()
            self._met.clear()
            self._knobs, self._chosen = now, KEPT.chosen
            self._ordinary = values_are_read()
        return not self._ordinary

    def _again(self, key: object) -> bool:
        """Whether a signature has come before, and is to be recorded now."""
        if key in self._known:  # it cannot be
            return False
        if key in self._met:
            return True
        _bound(self._met)
        self._met[key] = None
        return False

    def _recorded(
        self, op: Op, phase: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: object
    ) -> Any:
        _bound(self._known)
        try:
            recorded = record(op, phase, args, kwargs, strict=False)
        except NotRecorded:
            self._known[key] = None
            return op.ordinary(phase, args, kwargs)
        known = None
        if recorded.recording is not None:
            with suppress(ToolchainError):  # a kernel that only its own launcher can launch
                known = _Known(recorded, replay_of(recorded.recording))
        self._known[key] = known
        self._met.pop(key, None)
        return recorded.result


def _bound(table: dict[object, Any]) -> None:
    """Make room for one more."""
    while len(table) >= MOST:
        table.pop(next(iter(table)), None)
