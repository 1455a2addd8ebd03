"""Generated kernels in this process: from source to something that can be launched.

On a GPU a kernel's artifact comes from the store, which compiles what it lacks. Under Triton's
interpreter the generated file itself runs on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attncc.codegen.plan import KernelPlan, ScalarArg, TensorArg
from attncc.codegen.render import Source
from attncc.dsl.errors import MiscompiledError, MissingArtifactError, ToolchainError
from attncc.runtime import knobs, recorder, selfcheck
from attncc.runtime.compile import artifact, compilations, compile_source, load_function
from attncc.runtime.key import key_of
from attncc.runtime.loader import Launcher, Route, load_entry
from attncc.runtime.recording import KEPT
from attncc.runtime.store import current, put_source

__all__ = ["Kernel", "compilations", "compile_source", "load", "make_ready", "scalars_of"]


@dataclass(slots=True)
class Kernel:
    """One kernel of a plan; compiled (or found compiled) when it is first launched."""

    source: Source
    launchers: dict[tuple[int, Route | None], Launcher] = field(default_factory=dict)
    _unchecked: dict[tuple[int, Route | None], Launcher] = field(default_factory=dict)
    _function: Any = None
    _sure: bool = False

    @property
    def plan(self) -> KernelPlan:
        """The plan it was generated from."""
        return self.source.plan

    @property
    def path(self) -> Path:
        """The generated file in the store."""
        return put_source(self.source)

    @property
    def function(self) -> Any:
        """The jitted function of the generated file."""
        if self._function is None:
            self._function = load_function(self.path, self.source.entry)
        return self._function

    def ensure(self, target: str) -> Kernel:
        """This kernel, once it is sure that it has a text; what the store holds is not printed.

        Raises:
            RefusedError: an expression has no text in the plan's dialect.
            MissingArtifactError: only ahead-of-time kernels may be used, and the store lacks it.
        """
        if self._sure:
            return self
        if knobs.expect_hit() and not knobs.interpreting():
            try:
                artifact(self.source, target)
            except MissingArtifactError:
                _ = self.source.text  # what has no text could not have been built
                raise
        elif knobs.interpreting() or not current().named(key_of(self.source, target)):
            _ = self.source.text  # printing is what refuses
        self._sure = True
        return self

    def launch(
        self,
        grid: tuple[int, ...],
        args: Mapping[str, torch.Tensor | float],
        route: Route | None = None,
    ) -> None:
        """Launch over a grid; an empty grid launches nothing.

        Args:
            grid: program instances per axis, one to three of them.
            args: each of the plan's arguments by name: tensors (strides are read off them) and
                numbers.
            route: who loads and launches the artifact; the usual one when None.
        """
        if 0 in grid:
            return
        x, y, z = (*grid, 1, 1)[:3]
        flat: list[torch.Tensor | float] = []
        device = None
        for arg in self.plan.args:
            value = args[arg.name]
            flat.append(value)
            if isinstance(arg, TensorArg):
                assert isinstance(value, torch.Tensor)
                if value.dim() != arg.pattern.rank:
                    raise AssertionError(f"{arg.name}: {value.shape} for [{arg.pattern}]")
                flat.extend(value.stride()[:-1])
                device = value.device.index if device is None else device
        recording = recorder.current()
        if recording is not None:
            flat = recording.launch(self, (x, y, z), flat)
        if knobs.interpreting():
            _name_precisions()
            self.function[(x, y, z)](*flat)
            return
        launcher = self.launcher(device or 0, route)
        if device == torch.cuda.current_device():
            launcher((x, y, z), flat)
        else:
            with torch.cuda.device(device):
                launcher((x, y, z), flat)

    def launcher(self, device: int, route: Route | None = None) -> Launcher:
        """What launches it on a device, loaded when it is first asked for."""
        return self.launchers.get((device, route)) or self._prepare(device, route)

    def _prepare(self, device: int, route: Route | None) -> Launcher:
        key = device, route
        if key in self._unchecked and selfcheck.under_way():
            return self._unchecked[key]
        entry = artifact(self.source, _target(device))
        made = load_entry(entry, self.source, device, route)
        self._unchecked[key] = made  # a check of it launches it; other threads have to wait
        try:
            selfcheck.check_first(entry, self.plan, device)
        except MiscompiledError:
            self.launchers.pop(key, None)  # another thread's check may have loaded it
            raise
        finally:
            self._unchecked.pop(key, None)
        self.launchers[key] = made
        return made

    def forget(self) -> None:
        """Drop what belongs to another process' context, prepared launches too."""
        self.launchers.clear()
        self._unchecked.clear()
        KEPT.forget()


@cache
def _name_precisions() -> None:
    """Triton's interpreter multiplies fp32 in full, but refuses the names of some precisions."""
    from triton.runtime.interpreter import interpreter_builder as builder

    known = builder.options.allowed_dot_input_precisions
    if "bf16x6" not in known:
        names = (*known, "bf16x3", "bf16x6")
        builder.options = replace(builder.options, allowed_dot_input_precisions=names)


def has_gpu() -> bool:
    """Whether a kernel can run here."""
    return torch.cuda.is_available()


@cache
def _target(device: int) -> str:
    if not has_gpu():
        raise ToolchainError("no GPU: a Triton kernel runs on one, or in Triton's interpreter")
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


_LOADED: dict[str, Kernel] = {}


def load(source: Source) -> Kernel:
    """The kernel of a generated source, one per process."""
    found = _LOADED.get(source.digest)
    if found is None:
        found = _LOADED[source.digest] = Kernel(source)
    return found


def make_ready(kernels: Iterable[Kernel], device: torch.device, target: str) -> None:
    """Kernels that can all be launched, before the first of them is: it may write to a cache.

    Texts come first, since a kernel without one sends the call elsewhere; then artifacts, which a
    compiler or a self-check may refuse.

    Args:
        kernels: every kernel that a call launches.
        device: where.
        target: ``sm_90`` and the like.

    Raises:
        RefusedError: an expression has no text in its plan's dialect.
        MissingArtifactError, MiscompiledError, ToolchainError: one cannot be compiled, loaded or
            trusted.
    """
    held = tuple(kernels)
    for kernel in held:
        kernel.ensure(target)
    if device.type == "cuda" and not knobs.interpreting():
        for kernel in held:
            kernel.launcher(device.index or 0)


def _after_fork() -> None:
    # Every prepared call holds kernels of this table: they load anew in the child.
    for kernel in _LOADED.values():
        kernel.forget()


os.register_at_fork(after_in_child=_after_fork)


def scalars_of(plan: KernelPlan) -> tuple[str, ...]:
    """Names of a plan's run-time numbers."""
    return tuple(a.name for a in plan.args if isinstance(a, ScalarArg))
