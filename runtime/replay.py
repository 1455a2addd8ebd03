"""Does a recorded call again: on the device through patched parameter buffers, or interpreted.

A *frame* holds the tensors of one run by register: those of the call, then what is allocated and
what steps make. Kernels see a frame through an *engine* (:mod:`attncc.runtime.engines`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from attncc.runtime.arrivals import zeroed
from attncc.runtime.driver import raw_stream
from attncc.runtime.engines import (
    STREAMS,
    DeviceEngine,
    Frame,
    InterpretedEngine,
    flat_values,
    lanes_of,
)
from attncc.runtime.recording import Buffer, Launch, Recording, Register, Step

__all__ = ["DeviceEngine", "Frame", "InterpretedEngine", "Replay", "flat_values", "replay_of"]

SMALL = 1 << 20
"""Workspaces up to these bytes are kept for each stream; larger ones are allocated at each run."""
PLACED = 512
"""Workspaces of one run lie in one allocation, at multiples of so many bytes as torch's own do."""


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
        self._lanes = lanes_of(recording) > 1
        self._steps = any(isinstance(w, Step) for w in recording.work)
        shown = {register for _, register in recording.results}
        alone = shown.isdisjoint(b.register for b in rooms)
        self._private = self._on_device and not self._steps and alone
        self._placed, self._arena = self._places() if self._on_device else ({}, 0)
        self._apart = [b for b in rooms if b.register not in self._placed]
        last = max((register for register, _ in engine.scratch), default=-1)
        self._registers = max(recording.registers, 1 + last)
        self._pointers: list[int] | None = None
        self._roomed: list[torch.Tensor] | None = None
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
            self._pointers = self._roomed = None  # should it fail, nothing is known
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
        stream = self._aim() if self._on_device else 0
        if not self.static:
            self._fill(stream, frame)
        try:
            if self._steps or not self._on_device:
                self._work(frame)
            else:
                self._engine.launch_all()
        except BaseException:
            self._engine.join()  # what was launched still uses what the frame holds
            raise

    def _aim(self) -> int:
        """Torch's current stream, which the engine launches on from now on."""
        stream = raw_stream(self._device)
        captured = self._lanes and torch._C._cuda_isCurrentStreamCapturing()
        if captured or stream != self._stream:
            self._stream = None  # should it fail, there is nothing to launch on
            self._engine.aim(stream, captured=captured)
            self._stream = None if captured else stream
        return stream

    def _places(self) -> tuple[dict[int, int], int]:
        """Where workspaces of one run lie in their one allocation, by register, and its bytes.

        Steps take whole tensors, and counters are zero: those are allocated by themselves.
        """
        steps = [w for w in self.recording.work if isinstance(w, Step)]
        taken = {r for w in steps for r in w.outputs}
        taken |= {a.index for w in steps for a in w.arguments if isinstance(a, Register)}
        taken |= {a.index for w in steps for _, a in w.keywords if isinstance(a, Register)}
        taken |= {register for _, register in self.recording.results}
        found, end = {}, 0
        for room in self._rooms:
            if not room.zeroed and room.register not in taken:
                found[room.register] = end
                end += -(-room.bytes // PLACED) * PLACED
        return found, end

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
        if not keep and self._arena:
            self._roomed = None
            self._spread(frame)
            return
        if rooms is None:
            rooms = [self._room(b, keep=keep) for b in self._rooms]
            if keep:
                if len(self._kept) >= STREAMS:
                    self._kept.clear()  # freed in stream order
                self._kept[stream] = rooms
        if rooms is self._roomed:  # kernels have these addresses, and nobody else asks for them
            return
        for buffer, tensor in zip(self._rooms, rooms, strict=True):
            self._put(buffer.register, tensor, frame)
        self._roomed = rooms if keep and self._private else None

    def _spread(self, frame: Frame) -> None:
        """Workspaces of this run, those that only kernels see in one allocation."""
        arena = self._allocate(Buffer(-1, (self._arena,), torch.uint8))
        frame.append(arena)
        base, put = arena.data_ptr(), self._engine.put
        for register, place in self._placed.items():
            put(register, base + place)
        for buffer in self._apart:
            self._put(buffer.register, self._room(buffer, keep=False), frame)

    def _room(self, buffer: Buffer, *, keep: bool) -> torch.Tensor:
        if buffer.zeroed and not keep:  # zeroed long ago: no launch more, and right in a graph
            return zeroed(buffer.shape[0], self.recording.device)
        return self._allocate(buffer)

    def _work(self, frame: Frame) -> None:
        launches = 0
        for work in self.recording.work:
            if not isinstance(work, Step):
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
