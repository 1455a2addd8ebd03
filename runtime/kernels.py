"""Generated kernels in this process: from source to something that can be launched.

The source becomes a real file in the store (Triton needs one, and so do readers). On a GPU the
kernel is compiled from the plan's own signature, so what is compiled depends on the plan and on
nothing that a call happens to pass. Under Triton's interpreter the same file runs on the CPU.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from attncc.codegen.plan import KernelPlan, ScalarArg, TensorArg
from attncc.codegen.render import Source
from attncc.dsl.errors import ToolchainError
from attncc.runtime import knobs
from attncc.runtime.store import put_source


@dataclass(slots=True)
class Kernel:
    """One compiled (or interpreted) kernel of a plan."""

    source: Source
    path: Path
    function: Any
    compiled: Any = None

    @property
    def plan(self) -> KernelPlan:
        """The plan it was generated from."""
        return self.source.plan

    def launch(self, grid: tuple[int, ...], args: Mapping[str, torch.Tensor | float]) -> None:
        """Launch over a grid; an empty grid launches nothing.

        Args:
            grid: program instances per axis, one to three of them.
            args: each of the plan's arguments by name: tensors (strides are read off them) and
                numbers.
        """
        if 0 in grid:
            return
        full = (*grid, 1, 1)[:3]
        flat: list[Any] = []
        for arg in self.plan.args:
            value = args[arg.name]
            flat.append(value)
            if isinstance(arg, TensorArg):
                assert isinstance(value, torch.Tensor)
                if value.dim() != arg.pattern.rank:
                    raise AssertionError(f"{arg.name}: {value.shape} for [{arg.pattern}]")
                flat.extend(value.stride()[:-1])
        if knobs.interpreting():
            self.function[full](*flat)
            return
        if self.compiled is None:
            self.compiled = compile_source(self.source, self.function, _capability())
        self.compiled[full](*flat)


@lru_cache(maxsize=8)
def _capability() -> int:
    if not torch.cuda.is_available():
        raise ToolchainError("no GPU: a Triton kernel runs on one, or in Triton's interpreter")
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def compile_source(source: Source, function: Any, capability: int) -> Any:
    """Compile a kernel for a target (``90`` is sm_90) from the plan's signature; needs no GPU.

    Args:
        source: the generated file.
        function: the jitted function of that file.
        capability: compute capability times ten.

    Returns:
        Triton's compiled kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    plan = source.plan
    signature = {p.name: p.type for p in plan.parameters}
    attrs = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(plan.parameters) if p.divisible}
    ast = ASTSource(fn=function, signature=signature, constexprs={}, attrs=attrs)
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    return triton.compile(ast, target=GPUTarget("cuda", capability, 32), options=options)


def _load(path: Path, entry: str) -> ModuleType:
    name = f"attncc_generated.{entry}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_LOADED: dict[str, Kernel] = {}


def load(source: Source) -> Kernel:
    """The kernel of a generated source, loaded once per process."""
    found = _LOADED.get(source.digest)
    if found is None:
        path = put_source(source)
        function = getattr(_load(path, source.entry), source.entry)
        found = _LOADED[source.digest] = Kernel(source, path, function)
    return found


def scalars_of(plan: KernelPlan) -> tuple[str, ...]:
    """Names of a plan's run-time numbers."""
    return tuple(a.name for a in plan.args if isinstance(a, ScalarArg))
