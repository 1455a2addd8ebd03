"""Does a recorded call again: on the device through patched parameter buffers, or interpreted.

A *frame* holds the tensors of one run by register: those of the call, then what is allocated and
what steps make. Kernels see a frame through an *engine*.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from attncc.runtime.arrivals import zeroed
from attncc.runtime.driver import Block, Call, Cuda, Function, cuda, raw_stream
from attncc.runtime.recording import Buffer, Launch, Number, Place, Recording, Register, Step

SMALL = 1 << 20
"""Workspaces up to these bytes are kept for each stream; larger ones are allocated at each run."""
STREAMS = 16
"""Streams that workspaces are kept for."""

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

    def aim(self, stream: int) -> None:
        """Launch on this stream from now on."""

    def launch_all(self) -> None:
        """Every launch in order, where only addresses have to be known."""

    def launch(self, index: int, frame: Frame) -> None:
        """One launch."""


class DeviceEngine:
    """Launches by the driver. See :class:`Engine`."""

    def __init__(
        self, recording: Recording, functions: Sequence[Function], driver: Cuda | None = None
    ) -> None:
        launches = [w for w in recording.work if isinstance(w, Launch)]
        self._driver = driver or cuda()
        device = recording.device.index or 0
        grids = [w.grid for w in launches]
        self._block = Block(functions, grids, recording.registers, device, self._driver)
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
        self._calls: list[Call] = []

    def number(self, index: int, value: float) -> None:
        """See :class:`Engine`."""
        for launch, parameter in self._numbers.get(index, ()):
            self._block.write(launch, parameter, value)

    def aim(self, stream: int) -> None:
        """See :class:`Engine`."""
        self._calls = self._block.calls(stream)

    def launch_all(self) -> None:
        """See :class:`Engine`."""
        for launch, arguments in self._calls:
            error = launch(*arguments)
            if error:
                self._failed(error, arguments)

    def launch(self, index: int, frame: Frame) -> None:
        """See :class:`Engine`."""
        launch, arguments = self._calls[index]
        error = launch(*arguments)
        if error:
            self._failed(error, arguments)

    def _failed(self, error: int, arguments: tuple[Any, ...]) -> None:
        index = next(i for i, (_, a) in enumerate(self._calls) if a is arguments)
        self._block.failed(error, index, self._calls[index])


class InterpretedEngine:
    """Runs the generated functions on the CPU, in Triton's interpreter. See :class:`Engine`."""

    def __init__(self, recording: Recording) -> None:
        self._launches = [w for w in recording.work if isinstance(w, Launch)]
        self._numbers: dict[int, float] = {}
        self.scratch: list[tuple[int, int]] = []

    def bind(self, pointers: list[int]) -> None:
        """See :class:`Engine`."""

    def put(self, register: int, pointer: int) -> None:
        """See :class:`Engine`."""

    def number(self, index: int, value: float) -> None:
        """See :class:`Engine`."""
        self._numbers[index] = value

    def aim(self, stream: int) -> None:
        """See :class:`Engine`."""

    def launch_all(self) -> None:
        """See :class:`Engine`."""
        raise AssertionError("the interpreter needs the tensors themselves")

    def launch(self, index: int, frame: Frame) -> None:
        """See :class:`Engine`."""
        launch = self._launches[index]
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


class Replay:
    """A recording with what launches it. Not safe for two threads at once: hold ``lock``.

    Args:
        recording: what to do.
        engine: who launches.
        scratch: bytes of global scratch of launches that need it, behind the recording's registers.
    """

    def __init__(self, recording: Recording, engine: DeviceEngine | InterpretedEngine) -> None:
        self.lock = threading.Lock()
        self.recording = recording
        self._engine = engine
        self._device = recording.device.index or 0
        self._on_device = recording.device.type == "cuda"
        self._stream: int | None = None
        self._several = self._on_device and torch.cuda.device_count() > 1
        self._fresh = recording.fresh
        rooms = list(recording.workspaces)
        rooms += [Buffer(register, (size,), torch.uint8) for register, size in engine.scratch]
        self._rooms = tuple(rooms)
        self._small = sum(b.bytes for b in rooms) <= SMALL
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._steps = any(isinstance(w, Step) for w in recording.work)
        last = max((register for register, _ in engine.scratch), default=-1)
        self._registers = max(recording.registers, 1 + last)
        self._pointers: list[int] | None = None
        self._numbers: list[float] | None = []
        self.static = not (self._steps or rooms or self._fresh) and self._on_device

    def frame(self, tensors: Iterable[torch.Tensor]) -> Frame:
        """A frame that holds the call's tensors and nothing yet in the other registers."""
        found: Frame = list(tensors)
        return found + [None] * (self._registers - len(found))

    def bind(self, pointers: list[int], numbers: list[float]) -> None:
        """Give the kernels the call's tensors and numbers; what is there already is not written.

        Args:
            pointers: addresses by register, not to be changed later; 0 for what the run allocates.
            numbers: the call's host numbers, likewise.
        """
        if pointers is not self._pointers:
            self._engine.bind(pointers)
            self._pointers = pointers
        # 0.0 equals -0.0, which is another number.
        if numbers is not self._numbers and (numbers != self._numbers or 0 in numbers):
            self._numbers = None  # one that does not fit leaves the others written
            for index, value in enumerate(numbers):
                self._engine.number(index, value)
            self._numbers = numbers

    def run(self, frame: Frame) -> None:
        """Do the work on torch's current stream; the call's tensors are bound already.

        Args:
            frame: its results and whatever steps make are put into it.
        """
        if self._several and torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.run(frame)
            return
        engine = self._engine
        if not self._on_device:
            stream = 0
        elif (stream := raw_stream(self._device)) != self._stream:
            engine.aim(stream)
            self._stream = stream
        if not self.static:
            self._fill(stream, frame)
            if self._steps or not self._on_device:
                self._work(frame)
                return
        engine.launch_all()

    def _fill(self, stream: int, frame: Frame) -> None:
        """Allocate what the work needs, and the results that nobody gave."""
        if self._rooms:
            self._make_room(stream, frame)
        for buffer in self._fresh:
            if frame[buffer.register] is None:
                self._put(buffer.register, self._allocate(buffer), frame)

    def _put(self, register: int, tensor: torch.Tensor, frame: Frame) -> None:
        frame[register] = tensor
        self._engine.put(register, tensor.data_ptr())

    def _allocate(self, buffer: Buffer) -> torch.Tensor:
        make = torch.zeros if buffer.zeroed else torch.empty
        return make(buffer.shape, dtype=buffer.dtype, device=self.recording.device)

    def _make_room(self, stream: int, frame: Frame) -> None:
        """Workspaces: the stream's own, or for one run; a captured graph has what is its own."""
        keep = self._small and not (self._on_device and torch._C._cuda_isCurrentStreamCapturing())
        rooms = self._kept.get(stream) if keep else None
        if rooms is None:
            rooms = [self._room(b, keep=keep) for b in self._rooms]
            if keep:
                if len(self._kept) >= STREAMS:
                    self._kept.clear()  # freed in stream order
                self._kept[stream] = rooms
        for buffer, tensor in zip(self._rooms, rooms, strict=True):
            self._put(buffer.register, tensor, frame)

    def _room(self, buffer: Buffer, *, keep: bool) -> torch.Tensor:
        if buffer.zeroed and not keep:  # zeroed long ago: no launch more, and right in a graph
            return zeroed(buffer.shape[0], self.recording.device)
        return self._allocate(buffer)

    def _work(self, frame: Frame) -> None:
        launches = 0
        for work in self.recording.work:
            if isinstance(work, Launch):
                self._engine.launch(launches, frame)
                launches += 1
                continue
            made = work.function(
                *(_value(a, frame) for a in work.arguments),
                **{n: _value(a, frame) for n, a in work.keywords},
            )
            made = made if isinstance(made, tuple) else (made,)
            for register, tensor in zip(work.outputs, made, strict=False):
                self._put(register, tensor, frame)


def _value(argument: Any, frame: Frame) -> Any:
    return frame[argument.index] if isinstance(argument, Register) else argument


def replay_of(recording: Recording) -> Replay:
    """A recording ready to be done again.

    Raises:
        ToolchainError: a kernel that cannot be launched this way, or no driver.
    """
    if recording.device.type != "cuda":
        return Replay(recording, InterpretedEngine(recording))
    device = recording.device.index or 0
    with torch.cuda.device(device):
        functions = [
            w.kernel.launcher(device).function() for w in recording.work if isinstance(w, Launch)
        ]
    return Replay(recording, DeviceEngine(recording, functions))
