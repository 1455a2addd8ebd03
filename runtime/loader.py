"""Loads a store's artifacts onto a device: by Triton's own loader, or by the driver alone.

The driver's way needs neither Triton nor a generated module: a cubin, its manifest and
``cuda.bindings``. Both launch on torch's current stream.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import threading
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch

from attncc.codegen.render import Source
from attncc.dsl.errors import ToolchainError
from attncc.runtime import knobs
from attncc.runtime.compile import TRITON_RECORD, ast_source, load_function
from attncc.runtime.driver import Function
from attncc.runtime.entry import Entry
from attncc.runtime.key import triton_version
from attncc.runtime.manifest import Manifest, serves

Grid = tuple[int, int, int]
Values = Sequence[torch.Tensor | float]

_LARGE_SHARED = 48 * 1024
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}


class Route(Enum):
    """Who loads and launches an artifact."""

    TRITON = "triton"
    DRIVER = "driver"


class Launcher(Protocol):
    """Something loaded on one device, ready to be launched."""

    def __call__(self, grid: Grid, values: Values) -> None:
        """Launch on the device's current stream; values are in the parameters' order."""

    def function(self) -> Function:
        """The loaded kernel, for prepared launches; it lives as long as the launcher."""


def has_driver_bindings() -> bool:
    """Whether ``cuda.bindings`` is installed."""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def choose_route(entry: Entry) -> Route:
    """Triton's way by default; the driver's for what was built ahead of time."""
    ahead = knobs.expect_hit() or entry.bundled or triton_version() == "none"
    return Route.DRIVER if ahead and has_driver_bindings() else Route.TRITON


def load_entry(entry: Entry, source: Source, device: int, route: Route | None = None) -> Launcher:
    """Load an artifact on a device.

    Args:
        entry: the store's entry.
        source: what it was compiled from.
        device: index of the CUDA device.
        route: who loads it; chosen when None.

    Raises:
        ToolchainError: the artifact is for another device, or what loads it is not installed.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if not serves(entry.manifest.family, major * 10 + minor):
        raise ToolchainError(
            f"{entry.manifest.entry} does not run on this GPU",
            expected=f"sm_{major}{minor}",
            found=entry.manifest.family,
        )
    chosen = route or choose_route(entry)
    with torch.cuda.device(device):
        if chosen is Route.DRIVER:
            return DriverLauncher(entry, device)
        return TritonLauncher(entry, source)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Global scratch of one launch; torch's blocks start at multiples of 512 bytes."""
    assert alignment <= 512
    return torch.empty(size, dtype=torch.uint8, device="cuda")


class TritonLauncher:
    """Triton's loader and launcher on the store's cubin."""

    def __init__(self, entry: Entry, source: Source) -> None:
        built = entry.key["triton"]
        if built != triton_version():
            raise ToolchainError(
                f"{source.entry}: Triton loads what the same version built; install cuda-python "
                "to load it without Triton",
                expected=f"triton {built}",
                found=triton_version(),
            )
        from triton.compiler import CompiledKernel

        function = load_function(entry.kernel, source.entry)
        record = entry.folder / TRITON_RECORD
        cubin = entry.folder / entry.manifest.artifact
        group = {"kernel.json": str(record), "kernel.cubin": str(cubin)}
        self._kernel = CompiledKernel(ast_source(source, function), group, entry.key.digest)
        self._manifest = entry.manifest

    def __call__(self, grid: Grid, values: Values) -> None:
        """Launch on the current stream."""
        if not self._manifest.scratch_bytes:
            self._kernel[grid](*values)
            return
        from triton.runtime._allocation import _allocator

        token = _allocator.set(_scratch)  # the caller's own allocator is another library's
        try:
            self._kernel[grid](*values)
        finally:
            _allocator.reset(token)

    def function(self) -> Function:
        """See :class:`Launcher`.

        Raises:
            ToolchainError: the kernel wants to be launched in a way that only Triton knows.
        """
        self._kernel._init_handles()  # on the current device; sets what its shared memory needs
        metadata = self._kernel.metadata
        wanted = ("launch_cooperative_grid", "launch_pdl")
        if special := [name for name in wanted if getattr(metadata, name, False)]:
            raise ToolchainError(f"{self._manifest.entry}: a launch with {', '.join(special)}")
        return function_of(self._manifest, int(self._kernel.function))


def parameter_format(manifest: Manifest) -> tuple[str, list[int]]:
    """Layout of the parameter buffer: a ``struct`` format and each parameter's offset.

    Two scratch pointers follow the manifest's parameters.

    Raises:
        ToolchainError: a parameter's type is not one that is known here.
    """
    codes: list[str] = []
    for name, kind in manifest.parameters:
        code = "Q" if kind.startswith("*") else _FORMATS.get(kind)
        if code is None:
            raise ToolchainError(f"{manifest.entry}: parameter {name} has unknown type {kind}")
        codes.append(code)
    codes += ["Q", "Q"]
    text = "@"
    offsets = []
    for code in codes:
        text += code  # native alignment is each type's own size, as the device wants it
        offsets.append(struct.calcsize(text) - struct.calcsize(code))
    return text, offsets


def function_of(manifest: Manifest, handle: int) -> Function:
    """A loaded kernel as prepared launches take it."""
    text, offsets = parameter_format(manifest)
    return Function(
        name=manifest.entry,
        handle=handle,
        threads=32 * manifest.num_warps,
        shared=manifest.shared_bytes,
        scratch=manifest.scratch_bytes,
        format=text,
        offsets=tuple(offsets),
    )


class DriverLauncher:
    """A cubin loaded by the CUDA driver into torch's primary context, with its own launch."""

    def __init__(self, entry: Entry, device: int) -> None:
        from cuda.bindings import driver

        manifest = entry.manifest
        self._driver = driver
        self._device = device
        self._manifest = manifest
        self._entry = manifest.entry
        self._block = 32 * manifest.num_warps
        self._shared = manifest.shared_bytes
        self._scratch = manifest.scratch_bytes
        self._use_context()
        self._module = self._call(driver.cuModuleLoadData, entry.files[manifest.artifact])
        self._function = self._call(
            driver.cuModuleGetFunction, self._module, manifest.entry.encode()
        )
        if self._shared > _LARGE_SHARED:
            name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call(driver.cuFuncSetAttribute, self._function, name, self._shared)
        text, offsets = parameter_format(manifest)
        self._pack = struct.Struct(text)
        self._buffer = ctypes.create_string_buffer(self._pack.size)
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + o for o in offsets))
        self._lock = threading.Lock()  # one buffer: the driver copies it during the launch

    def _call(self, function: Any, *args: Any) -> Any:
        error, *results = function(*args)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise ToolchainError(f"{self._entry}: {function.__name__} failed: {error.name}")
        return results[0] if results else None

    def _use_context(self) -> None:
        """Make torch's context current in this thread, where none is yet."""
        driver = self._driver
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._call(driver.cuInit, 0)
        if int(self._call(driver.cuCtxGetCurrent)) == 0:
            device = self._call(driver.cuDeviceGet, self._device)
            context = self._call(driver.cuDevicePrimaryCtxRetain, device)
            self._call(driver.cuCtxSetCurrent, context)

    def __call__(self, grid: Grid, values: Values) -> None:
        """Launch on the current stream."""
        flat = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
        scratch = None
        if self._scratch:
            size = self._scratch * grid[0] * grid[1] * grid[2]
            scratch = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._device}")
        flat += [0 if scratch is None else scratch.data_ptr(), 0]
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._lock:
            self._pack.pack_into(self._buffer, 0, *flat)
            if self._launch(grid, stream) == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
                self._use_context()  # a thread that has not used CUDA yet
                self._check(self._launch(grid, stream))

    def function(self) -> Function:
        """See :class:`Launcher`."""
        return function_of(self._manifest, int(self._function))

    def _launch(self, grid: Grid, stream: int) -> Any:
        (error,) = self._driver.cuLaunchKernel(
            self._function, *grid, self._block, 1, 1, self._shared, stream,
            ctypes.addressof(self._pointers), 0,
        )  # fmt: skip
        if error != self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            self._check(error)
        return error

    def _check(self, error: Any) -> None:
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise ToolchainError(f"{self._entry}: the launch failed: {error.name}")
