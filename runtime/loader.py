"""Loads a store's artifacts onto a device: by the driver alone, or by Triton's own loader.

The driver's way needs neither Triton nor a generated module: a cubin, its manifest and the driver's
library. Triton's way is for what wants its launch hooks (profilers). Both launch on torch's current
stream.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

from attncc.codegen.plan import Dialect
from attncc.codegen.render import Source
from attncc.dsl.errors import ToolchainError
from attncc.runtime.compile import TRITON_RECORD, ast_source, load_function
from attncc.runtime.driver import INVALID_CONTEXT, Function, cuda, raw_stream
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


USUAL = Route.DRIVER
"""The driver is there where a GPU is, starts nothing and needs no compiler."""


class Launcher(Protocol):
    """Something loaded on one device, ready to be launched."""

    def __call__(self, grid: Grid, values: Values) -> None:
        """Launch on the device's current stream; values are in the parameters' order."""

    def function(self) -> Function:
        """The loaded kernel, for prepared launches; it lives as long as the launcher."""


def load_entry(entry: Entry, source: Source, device: int, route: Route | None = None) -> Launcher:
    """Load an artifact on a device.

    Args:
        entry: the store's entry.
        source: what it was compiled from.
        device: index of the CUDA device.
        route: who loads it; :data:`USUAL` when None.

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
    with torch.cuda.device(device):
        if (route or USUAL) is Route.DRIVER:
            return DriverLauncher(entry, device)
        if source.plan.dialect is Dialect.CUTEDSL:
            raise ToolchainError(f"{source.entry}: Triton's loader takes what Triton compiled")
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
                f"{source.entry}: Triton loads what the same version built",
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
        chained=manifest.chained,
    )


class DriverLauncher:
    """A cubin loaded by the CUDA driver into torch's primary context, with its own launch."""

    def __init__(self, entry: Entry, device: int) -> None:
        manifest = entry.manifest
        self._driver = cuda()
        self._device = device
        self._manifest = manifest
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._driver.use_context(device)
        self._module = self._driver.load(entry.files[manifest.artifact])
        handle = self._driver.function(self._module, manifest.entry)
        if manifest.shared_bytes > _LARGE_SHARED:
            self._driver.allow_shared(handle, manifest.shared_bytes)
        self._made = function_of(manifest, handle)
        self._pack = struct.Struct(self._made.format)
        self._buffer = ctypes.create_string_buffer(self._pack.size)
        base, offsets = ctypes.addressof(self._buffer), self._made.offsets
        self._pointers = (ctypes.c_void_p * len(offsets))(*(base + o for o in offsets))
        self._lock = threading.Lock()  # one buffer: the driver copies it during the launch

    def __call__(self, grid: Grid, values: Values) -> None:
        """Launch on the current stream."""
        manifest = self._manifest
        flat = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
        scratch = None
        if manifest.scratch_bytes:
            size = manifest.scratch_bytes * grid[0] * grid[1] * grid[2]
            scratch = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._device}")
        flat += [0 if scratch is None else scratch.data_ptr(), 0]
        launch, arguments = self._driver.call(
            self._made, grid, self._pointers, raw_stream(self._device)
        )
        with self._lock:
            self._fill(flat)
            error = launch(*arguments)
            if error == INVALID_CONTEXT:  # a thread that has not used CUDA yet
                self._driver.use_context(self._device)
                error = launch(*arguments)
        if error:
            raise ToolchainError(
                f"{manifest.entry}: the launch failed: {self._driver.error(error)}"
            )

    def _fill(self, flat: Values) -> None:
        try:
            self._pack.pack_into(self._buffer, 0, *flat)
        except (struct.error, OverflowError) as error:
            named = ", ".join(f"{n}: {k}" for n, k in self._manifest.parameters)
            raise ToolchainError(
                f"{self._manifest.entry}: a value does not fit its parameter ({named}): {error}"
            ) from error

    def function(self) -> Function:
        """See :class:`Launcher`."""
        return self._made
