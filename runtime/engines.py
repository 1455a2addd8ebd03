"""Launches what a recording holds: by the driver, or in Triton's interpreter.

A *frame* holds the tensors of one run by register.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attncc.runtime.driver import Block, Call, Cuda, Function, cuda
from attncc.runtime.lanes import TOGETHER, beside, spare_events
from attncc.runtime.recording import Launch, Number, Place, Recording, Step, Wait

STREAMS = 16
"""Streams that launches are kept laid out for, and workspaces in :mod:`attncc.runtime.replay`."""

Frame = list[torch.Tensor | None]


class Engine(Protocol):
    """Launches the kernels of a recording.

    Attributes:
        scratch: registers behind the recording's own for global scratch of launches, with bytes.
    """

    scratch: list[tuple[int, int]]

    def bind(self, pointers: list[int]) -> None:
        """Set every register's address."""

    def put(self, register: int, pointer: int) -> None:
        """Set one register's address."""

    def number(self, index: int, value: float) -> None:
        """Set a host number."""

    def aim(self, stream: int, *, captured: bool) -> None:
        """Launch on this stream, and the lanes beside it, from now on.

        Args:
            stream: handle of the caller's stream.
            captured: into a graph: the events between lanes are no others' then.
        """

    def launch_all(self) -> None:
        """Every launch and wait in order, where only addresses have to be known."""

    def launch(self, index: int, frame: Frame) -> None:
        """One launch or wait."""

    def join(self) -> None:
        """Let the caller's stream wait for what a run that failed has on other lanes."""


@dataclass(slots=True)
class _Aimed:
    """A recording's launches and waits on one stream and those beside it.

    Attributes:
        streams: handle of each lane's.
        events: of the waits, in order.
        commands: for each launch its number, for a wait None; and the driver's calls.
    """

    streams: list[int]
    events: list[int]
    commands: list[tuple[int | None, tuple[Call, ...]]]


class DeviceEngine:
    """Launches by the driver. See :class:`Engine`.

    Lanes wait for each other through events, one for each wait. A run notes all of them while it
    holds the replay's lock, and what waits keeps what was noted then, so the next run takes them
    again. An event that a capture has noted belongs to its graph: no other run gets it.
    """

    def __init__(
        self, recording: Recording, functions: Sequence[Function], driver: Cuda | None = None
    ) -> None:
        self._aims: dict[int, _Aimed] = {}
        self._captured: list[int] = []
        self._process = None if driver else os.getpid()
        self._work = [w for w in recording.work if not isinstance(w, Step)]
        launches = [w for w in self._work if isinstance(w, Launch)]
        self._driver = driver or cuda()
        self._device = recording.device.index or 0
        grids = [w.grid for w in launches]
        self._block = Block(functions, grids, recording.registers, self._device, self._driver)
        self._lanes = lanes_of(recording)
        self._numbers: dict[int, list[tuple[int, int]]] = {}
        for i, launch in enumerate(launches):
            for parameter, value in enumerate(launch.values):
                if isinstance(value, Place):
                    self._block.refer(i, parameter, value.register, value.offset)
                elif isinstance(value, Number):
                    self._numbers.setdefault(value.index, []).append((i, parameter))
                else:
                    self._block.write(i, parameter, value)
        self.scratch = self._block.scratch()
        self.bind, self.put = self._block.bind, self._block.put
        self._aimed = _Aimed([0], [], [])
        self._calls: list[Call] = []

    def __del__(self) -> None:
        """Other engines get its events; nothing is asked of the driver, whatever is under way."""
        self._spare()

    def _spare(self) -> None:
        if self._process == os.getpid():
            for aimed in self._aims.values():
                spare_events(self._device).extend(aimed.events)
        self._aims = {}

    def number(self, index: int, value: float) -> None:
        """See :class:`Engine`."""
        for launch, parameter in self._numbers.get(index, ()):
            self._block.write(launch, parameter, value)

    def aim(self, stream: int, *, captured: bool) -> None:
        """See :class:`Engine`."""
        for event in self._captured:
            self._driver.drop(event)
        self._captured = []
        aimed = None if captured else self._aims.get(stream)
        if aimed is None:
            if len(self._aims) >= STREAMS:
                self._spare()
            usual = self._process is not None and not captured
            spare = spare_events(self._device) if usual else []
            aimed = self._aim(stream, spare, captured=captured)
            if captured:
                self._captured = aimed.events
            else:
                self._aims[stream] = aimed
        self._aimed, self._calls = aimed, [call for _, calls in aimed.commands for call in calls]

    def _aim(self, stream: int, spare: list[int], *, captured: bool) -> _Aimed:
        """Everything in order as the driver takes it, with events of the spare ones or new."""
        beyond = (beside(self._device, stream, lane) for lane in range(1, self._lanes))
        streams = [stream, *(s.cuda_stream for s in beyond)]
        if captured and len(streams) > TOGETHER:
            streams[TOGETHER] = stream  # a graph may run beside others: kernels follow each other
        own = [streams[w.lane] for w in self._work if isinstance(w, Launch)]
        launches = enumerate(self._block.calls(stream, own))
        made = _Aimed(streams, [], [])
        for work in self._work:
            if isinstance(work, Launch):
                index, call = next(launches)
                made.commands.append((index, (call,)))
                continue
            made.events.append(self._event(spare))
            waiting = made.events[-1], streams[work.lane], streams[work.on]
            made.commands.append((None, self._driver.waiting(*waiting)))
        return made

    def _event(self, spare: list[int]) -> int:
        with suppress(IndexError):
            return spare.pop()
        self._driver.use_context(self._device)  # a thread that has not used CUDA yet
        return self._driver.event()

    def launch_all(self) -> None:
        """See :class:`Engine`."""
        for launch, arguments in self._calls:
            error = launch(*arguments)
            if error:
                self._failed(error, arguments)

    def launch(self, index: int, frame: Frame) -> None:
        """See :class:`Engine`."""
        for launch, arguments in self._aimed.commands[index][1]:
            error = launch(*arguments)
            if error:
                self._failed(error, arguments)

    def _failed(self, error: int, arguments: tuple[Any, ...]) -> None:
        each = ((i, call) for i, calls in self._aimed.commands for call in calls)
        index, call = next((i, call) for i, call in each if call[1] is arguments)
        self._block.failed(error, index, call)

    def join(self) -> None:
        """See :class:`Engine`; an error here says no more than the one that is on its way."""
        own, *others = self._aimed.streams
        for event, stream in zip(self._aimed.events, others, strict=False):
            for call, arguments in self._driver.waiting(event, own, stream):
                call(*arguments)


class InterpretedEngine:
    """Runs the generated functions on the CPU, in Triton's interpreter. See :class:`Engine`."""

    def __init__(self, recording: Recording) -> None:
        self._launches = [w for w in recording.work if not isinstance(w, Step)]
        self._numbers: dict[int, float] = {}
        self.scratch: list[tuple[int, int]] = []

    def bind(self, pointers: list[int]) -> None:
        """See :class:`Engine`."""

    def put(self, register: int, pointer: int) -> None:
        """See :class:`Engine`."""

    def number(self, index: int, value: float) -> None:
        """See :class:`Engine`."""
        self._numbers[index] = value

    def aim(self, stream: int, *, captured: bool) -> None:
        """See :class:`Engine`."""

    def join(self) -> None:
        """See :class:`Engine`."""

    def launch_all(self) -> None:
        """See :class:`Engine`."""
        raise AssertionError("the interpreter needs the tensors themselves")

    def launch(self, index: int, frame: Frame) -> None:
        """See :class:`Engine`."""
        launch = self._launches[index]
        if isinstance(launch, Wait):  # a launch is over when it returns
            return
        numbers = [self._numbers[i] for i in range(len(self._numbers))]
        launch.kernel.function[launch.grid](*flat_values(launch, frame, numbers))


def flat_values(
    launch: Launch, frame: Sequence[torch.Tensor | None], numbers: Sequence[float]
) -> list[torch.Tensor | float]:
    """A launch's values in parameter order, as tensors and numbers."""
    values: list[torch.Tensor | float] = []
    for value in launch.values:
        if isinstance(value, Place):
            values.append(_view(frame[value.register], value))
        else:
            values.append(numbers[value.index] if isinstance(value, Number) else value)
    return values


def _view(base: torch.Tensor | None, place: Place) -> torch.Tensor:
    assert base is not None
    typed = base if base.dtype == place.dtype else base.view(place.dtype)
    assert place.offset % typed.element_size() == 0
    offset = typed.storage_offset() + place.offset // typed.element_size()
    return torch.as_strided(typed, place.shape, place.strides, offset)


def lanes_of(recording: Recording) -> int:
    """How many lanes a recording has; 1 is the caller's stream alone."""
    return 1 + max((w.lane for w in recording.work if not isinstance(w, Step)), default=0)
