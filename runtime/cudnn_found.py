"""Whether cuDNN can be asked: its frontend, what compiles its kernels, and a GPU that has them."""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

FRONTEND = "nvidia-cudnn-frontend"
FAMILY = {(10, 0): "sm_100", (10, 3): "sm_103", (10, 7): "sm_107"}
"""Compute capabilities that cuDNN has these kernels for."""
NODE, POOLS, DSL = (1, 29), (1, 31), (4, 7)
"""Versions of the frontend with the node and with states in pools, and of CuTe-DSL."""


def version_of(package: str) -> tuple[int, ...] | None:
    """First two numbers of an installed package's version."""
    try:
        parts = version(package).split(".")[:2]
        return tuple(int(part) for part in parts)
    except (PackageNotFoundError, ValueError):
        return None


@cache
def package_problem() -> str | None:
    """Why cuDNN's frontend cannot be asked in this process, or None."""
    found = version_of(FRONTEND)
    if found is None or importlib.util.find_spec("cudnn") is None:
        return f"{FRONTEND} is not installed (pip install 'attncc[cudnn]')"
    if found < NODE:
        return f"{FRONTEND} {dots(found)} has no node for it ({dots(NODE)} has)"
    return None


@cache
def _dsl_problem() -> str | None:
    found = version_of("nvidia-cutlass-dsl")
    if found is None:
        return "nvidia-cutlass-dsl is not installed (pip install 'attncc[cudnn]')"
    return f"nvidia-cutlass-dsl {dots(found)} is older than {dots(DSL)}" if found < DSL else None


def dots(numbers: tuple[int, ...]) -> str:
    """A version as text."""
    return ".".join(map(str, numbers))


def target_problem(target: str) -> str | None:
    """Why cuDNN has no kernels for a target (``sm_90``, or what stands for no GPU), or None."""
    if target in FAMILY.values():
        return None
    return f"cuDNN's kernels need SM100, SM103 or SM107, not {target}"


@cache
def target_of(device: torch.device) -> str:
    """``sm_90`` and the like, or the kind of a device that has no such name."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def problem(device: torch.device) -> str | None:
    """Why cuDNN cannot run anything of this kind on a device, or None; looked up once."""
    return target_problem(target_of(device)) or package_problem() or _dsl_problem()
