"""Launches by the CUDA driver alone, through ctypes: parameters are laid out once, then patched.

A parameter of a kernel is read by the driver during the launch, so one buffer serves all launches
of a call; of it only the places of tensors that are replaced are written again. ctypes takes
arguments that are converted beforehand as they are, which leaves little more than the driver's own
time.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from attncc.dsl.errors import ToolchainError

INVALID_CONTEXT = 201
_NO_TIME = 2  # CU_EVENT_DISABLE_TIMING
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
Arguments = tuple[Any, ...]
Call = tuple[Any, Arguments]


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel on a device.

    Attributes:
        name: of the kernel, for errors.
        handle: its ``CUfunction``.
        threads: of a block.
        shared: dynamic shared memory of a block in bytes; the function may use it already.
        scratch: global scratch of a block in bytes.
        format: ``struct`` codes of the parameters, the two scratch pointers among them.
        offsets: place of each parameter in bytes.
        chained: it may be launched before the kernel ahead of it has ended.
    """

    name: str
    handle: int
    threads: int
    shared: int
    scratch: int
    format: str
    offsets: tuple[int, ...]
    chained: bool = False

    @property
    def size(self) -> int:
        """Bytes of the parameters, filled up to 8."""
        return -(-struct.calcsize(self.format) // 8) * 8


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: a number of 4 bytes, and 64 bytes of value at a multiple of 8."""

    _fields_ = (
        ("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )  # fmt: skip


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


_EARLY = _Attribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed


class Cuda:
    """The driver's library."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._plain = library.cuLaunchKernel
        # Before CUDA 11.8 there is no such call: a chained kernel then waits for nothing.
        self._with_config = getattr(library, "cuLaunchKernelEx", None)

    def call(
        self, function: Function, grid: tuple[int, int, int], pointers: Any, stream: int
    ) -> Call:
        """What launches a kernel, and its arguments; it gives an error's number.

        Args:
            function: the kernel; a chained one is launched while the kernel ahead may still run.
            grid: programs.
            pointers: ctypes array of its parameters' addresses.
            stream: handle.
        """
        number, pointer = ctypes.c_uint.from_param, ctypes.c_void_p.from_param
        handle = pointer(function.handle)
        if function.chained and self._with_config is not None:
            config = _Config(
                grid, (function.threads, 1, 1), function.shared, stream,
                ctypes.addressof(_EARLY), 1,
            )  # fmt: skip
            return self._with_config, (ctypes.byref(config), handle, ctypes.byref(pointers), None)
        return self._plain, (
            handle, *map(number, grid), number(function.threads), number(1), number(1),
            number(function.shared), pointer(stream), ctypes.byref(pointers), None,
        )  # fmt: skip

    def use_context(self, device: int) -> None:
        """Make torch's context of a device the calling thread's."""
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)

    def load(self, image: bytes) -> int:
        """Load a cubin into the current context: its ``CUmodule``."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        return module.value or 0

    def function(self, module: int, name: str) -> int:
        """A kernel of a module: its ``CUfunction``."""
        found = ctypes.c_void_p()
        handle = ctypes.c_void_p(module)
        self._call("cuModuleGetFunction", ctypes.byref(found), handle, name.encode())
        return found.value or 0

    def allow_shared(self, function: int, size: int) -> None:
        """Let a kernel take so many bytes of dynamic shared memory; unasked it gets 48 KB."""
        self._call("cuFuncSetAttribute", ctypes.c_void_p(function), _MOST_SHARED, size)

    def attribute(self, number: int, device: int) -> int:
        """An attribute of a device, by its number in ``CUdevice_attribute``.

        Raises:
            ToolchainError: the driver does not know it.
        """
        found = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(found), number, device)
        return found.value

    def _call(self, name: str, *args: Any) -> None:
        error = getattr(self._library, name)(*args)
        if error:
            raise ToolchainError(f"{name} failed: {self.error(error)}")

    def event(self) -> int:
        """An event without a time, in the current context: its ``CUevent``."""
        made = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(made), _NO_TIME)
        return made.value or 0

    def drop(self, event: int) -> None:
        """Give up an event; what waits for it still does."""
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def waiting(self, event: int, stream: int, on: int) -> tuple[Call, Call]:
        """What makes a stream wait for all that another one has so far, in two calls."""
        pointer, number = ctypes.c_void_p.from_param, ctypes.c_uint.from_param
        held = pointer(event)
        return (
            (self._library.cuEventRecord, (held, pointer(on))),
            (self._library.cuStreamWaitEvent, (pointer(stream), held, number(0))),
        )

    def error(self, number: int) -> str:
        """An error's name."""
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(number, ctypes.byref(text))
        return (text.value or f"error {number}".encode()).decode()


@cache
def cuda() -> Cuda:
    """The driver of this process.

    Raises:
        ToolchainError: it is not installed.
    """
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        return Cuda(ctypes.CDLL(name))
    except OSError as error:
        raise ToolchainError(f"no CUDA driver: {error}") from error


class Block:
    """The parameters of several launches in one buffer.

    The driver takes an address for each parameter, so a tensor's own address stands in one word
    for all launches that take it: the words of all registers come first, side by side. Then come
    words for places inside a tensor, and the numbers of each launch.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        grids: Sequence[tuple[int, int, int]],
        registers: int,
        device: int,
        driver: Cuda | None = None,
    ) -> None:
        """Lay out launches, in order; every parameter is 0 at first.

        Args:
            functions: the kernels.
            grids: of each.
            registers: how many tensors there are; a scratch of each launch comes behind them.
            device: where the kernels were loaded.
            driver: the process' own if None.
        """
        self._driver = driver or cuda()
        self._device = device
        self._functions, self._grids = tuple(functions), tuple(grids)
        self._scratch = registers
        words = registers + len(self._functions)
        self._inside = words
        self._starts = []
        for function in functions:
            words += len(function.offsets)  # at most: every pointer with an offset
        for function in functions:
            self._starts.append(8 * words)
            words += function.size // 8
        self._buffer: Any = (ctypes.c_uint64 * words)()
        self._bytes = memoryview(self._buffer).cast("B")
        self._words = self._bytes.cast("Q")
        self._registers = slice(0, registers)
        self._offsets: dict[int, list[tuple[int, int]]] = {}
        self._pointers = [self._pointers_of(i) for i in range(len(functions))]

    def _pointers_of(self, launch: int) -> Any:
        base = ctypes.addressof(self._buffer) + self._starts[launch]
        offsets = self._functions[launch].offsets
        found = (ctypes.c_void_p * len(offsets))(*(base + o for o in offsets))
        found[len(offsets) - 2] = self._address(self._scratch + launch)
        return found

    def _address(self, word: int) -> int:
        return ctypes.addressof(self._buffer) + 8 * word

    def refer(self, launch: int, parameter: int, register: int, offset: int) -> None:
        """A parameter is the address in a register and so many bytes."""
        word = register
        if offset:
            word, self._inside = self._inside, self._inside + 1
            self._offsets.setdefault(register, []).append((word, offset))
        self._pointers[launch][parameter] = self._address(word)

    def bind(self, pointers: list[int]) -> None:
        """Set the addresses of all registers."""
        self._buffer[self._registers] = pointers
        words = self._words
        for register, inside in self._offsets.items():
            base = pointers[register]
            for word, offset in inside:
                words[word] = base + offset

    def put(self, register: int, pointer: int) -> None:
        """Set one register's address."""
        self._words[register] = pointer
        for word, offset in self._offsets.get(register, ()):
            self._words[word] = pointer + offset

    def scratch(self) -> list[tuple[int, int]]:
        """The registers of launches with global scratch, and its bytes."""
        found = []
        for i, (function, (x, y, z)) in enumerate(zip(self._functions, self._grids, strict=True)):
            if function.scratch:
                found.append((self._scratch + i, function.scratch * x * y * z))
        return found

    def write(self, launch: int, parameter: int, value: float) -> None:
        """Set a number.

        Raises:
            ToolchainError: it does not fit the parameter's type.
        """
        function = self._functions[launch]
        place = self._starts[launch] + function.offsets[parameter]
        try:
            struct.pack_into("@" + function.format[1 + parameter], self._bytes, place, value)
        except (struct.error, OverflowError) as error:
            raise ToolchainError(
                f"{function.name}: parameter {parameter} cannot hold {value}: {error}"
            ) from error

    def calls(self, stream: int, streams: Sequence[int] = ()) -> list[Call]:
        """What launches each kernel on a stream (or on one of its own), with its arguments."""
        each = zip(
            self._functions, self._grids, self._pointers,
            streams or [stream] * len(self._functions), strict=True,
        )  # fmt: skip
        return [self._driver.call(f, grid, pointers, on) for f, grid, pointers, on in each]

    def failed(self, error: int, launch: int | None, call: Call) -> None:
        """Do a call again after making torch's context current, where the thread had none.

        Args:
            error: what it gave.
            launch: which one it is; None for a wait.
            call: itself.

        Raises:
            ToolchainError: something else is wrong.
        """
        if error == INVALID_CONTEXT:
            self._driver.use_context(self._device)
            error = call[0](*call[1])
        if error:
            text = self._driver.error(error)
            if launch is None:
                raise ToolchainError(f"a stream cannot wait for another one: {text}")
            raise ToolchainError(f"{self._functions[launch].name}: the launch failed: {text}")


def _no_stream(device: int) -> int:
    raise ToolchainError("this torch has no CUDA")


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)
"""The handle of torch's current stream of a device."""
