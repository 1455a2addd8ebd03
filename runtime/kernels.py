"""Generated kernels in this process: from source to something that can be launched.

On a GPU a kernel's artifact comes from the store, which compiles what it lacks. Under Triton's
interpreter the generated file itself runs on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from attncc.codegen.plan import KernelPlan, ScalarArg, TensorArg
from attncc.codegen.render import Source
from attncc.dsl.errors import ToolchainError
from attncc.runtime import knobs
from attncc.runtime.compile import artifact, compilations, compile_source, load_function
from attncc.runtime.loader import Launcher, Route, load_entry
from attncc.runtime.store import put_source

__all__ = ["Kernel", "compilations", "compile_source", "load", "scalars_of"]


@dataclass(slots=True)
class Kernel:
    """One kernel of a plan; compiled (or found compiled) when it is first launched."""

    source: Source
    launchers: dict[tuple[int, Route | None], Launcher] = field(default_factory=dict)
    _function: Any = None

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
        if knobs.interpreting():
            self.function[(x, y, z)](*flat)
            return
        launcher = self.launchers.get((device or 0, route)) or self._prepare(device or 0, route)
        if device == torch.cuda.current_device():
            launcher((x, y, z), flat)
        else:
            with torch.cuda.device(device):
                launcher((x, y, z), flat)

    def _prepare(self, device: int, route: Route | None) -> Launcher:
        entry = artifact(self.source, _target(device))
        made = load_entry(entry, self.source, device, route)
        self.launchers[device, route] = made
        return made

    def forget(self) -> None:
        """Drop what belongs to another process' context."""
        self.launchers.clear()


@cache
def _target(device: int) -> str:
    if not torch.cuda.is_available():
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


def _after_fork() -> None:
    # Every prepared call holds kernels of this table: they load anew in the child.
    for kernel in _LOADED.values():
        kernel.forget()


os.register_at_fork(after_in_child=_after_fork)


def scalars_of(plan: KernelPlan) -> tuple[str, ...]:
    """Names of a plan's run-time numbers."""
    return tuple(a.name for a in plan.args if isinstance(a, ScalarArg))
