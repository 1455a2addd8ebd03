"""What an offline compiled kernel costs: registers, stack, spills, shared memory, tensor cores.

Everything here works without a GPU: Triton's wheel carries `ptxas` and `cuobjdump`. Registers and
stack are read from the cubin that will be loaded; spills, which a cubin does not record, from
assembling the same PTX again.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from attncc.dsl.errors import ToolchainError

TensorCore = Literal["wgmma", "tcgen05", "mma"]
_Content = TypeVar("_Content", str, bytes)

# The strongest first: a kernel may contain more than one kind.
_TENSOR_CORES: tuple[tuple[TensorCore, str], ...] = (
    ("tcgen05", "tcgen05.mma"),
    ("wgmma", "wgmma.mma_async"),
    ("mma", "mma.sync"),
)
_TARGET_LINE = re.compile(r"^\s*\.target\s+(sm_(\d+)[af]?)", re.MULTILINE)
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)")
# Triton 3.7 assembles with this option (a work-around of its own); earlier versions do not.
_REGISTER_ALLOCATION = "--regAllocOptLevel=2"
_REGISTER_ALLOCATION_SINCE = (3, 7)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel needs.

    Attributes:
        target: the name the caller gave the target, such as `sm_90`.
        registers: 32-bit registers a thread.
        stack_bytes: stack frame a thread, in bytes; local arrays and spills live there.
        spill_store_bytes: bytes of spill stores in the code, over all its functions.
        spill_load_bytes: bytes of spill loads in the code, over all its functions.
        shared_bytes: shared memory a program, in bytes, as the launch must request it.
        num_warps: warps a program that the launch starts.
        tensor_core: the strongest tensor-core instruction in the PTX, or None.
    """

    target: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    num_warps: int
    tensor_core: TensorCore | None


def resources(compiled: Any, target: str) -> Resources:
    """Reads what a Triton `CompiledKernel` needs; no GPU is touched.

    Args:
        compiled: result of `triton.compile` for a CUDA target; its PTX and cubin are read.
        target: the name to put into the result, such as `sm_90`.

    Returns:
        The figures of the kernel's entry function.

    Raises:
        ToolchainError: Triton or one of its tools is missing, a tool failed, or the kernel has no
            PTX or cubin.
    """
    ptx, cubin = _stage(compiled, "ptx", str), _stage(compiled, "cubin", bytes)
    name = str(compiled.metadata.name)
    registers, stack = usage(cubin, name)
    stores, loads = _spills(ptx, _options(compiled.metadata))
    return Resources(
        target=target,
        registers=registers,
        stack_bytes=stack,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        shared_bytes=int(compiled.metadata.shared),
        num_warps=int(compiled.metadata.num_warps),
        tensor_core=tensor_core(ptx),
    )


def tensor_core(ptx: str) -> TensorCore | None:
    """Names the strongest tensor-core instruction in a PTX text, or None."""
    # `wgmma` and `tcgen05` also end in `mma`; only `mma.sync` is the plain one.
    return next((kind for kind, text in _TENSOR_CORES if text in ptx), None)


def tool(name: str) -> Path:
    """Finds a CUDA tool inside the installed Triton package.

    Args:
        name: `ptxas`, `ptxas-blackwell` or `cuobjdump`.

    Returns:
        The path of the program.

    Raises:
        ToolchainError: Triton is not installed, or does not carry the tool.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise ToolchainError(f"{name} is part of triton, which is not installed")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise ToolchainError(f"this triton does not carry {name}: looked at {path}")
    return path


@lru_cache(maxsize=2)
def _assembler_version(name: str) -> str:
    found = re.search(r"V(\d+\.\d+\.\d+)", _run(tool(name), "--version"))
    return found[1] if found else "unknown"


def assembler_version(capability: int) -> str:
    """Version of the assembler that the installed Triton uses for a target.

    Raises:
        ToolchainError: Triton is not installed, or does not carry it.
    """
    return _assembler_version("ptxas-blackwell" if capability >= 100 else "ptxas")


def _stage(compiled: Any, stage: str, kind: type[_Content]) -> _Content:
    content = compiled.asm.get(stage)
    if not isinstance(content, kind):
        raise ToolchainError(f"the kernel carries no {stage}: was it compiled for a CUDA target?")
    return content


def _options(metadata: Any) -> list[str]:
    """The options that Triton gave to ptxas and that change the figures."""
    options = [] if metadata.enable_fp_fusion else ["--fmad=false"]
    version = tuple(int(part) for part in re.findall(r"\d+", str(metadata.triton_version))[:2])
    if version >= _REGISTER_ALLOCATION_SINCE:
        options.append(_REGISTER_ALLOCATION)
    return options + (getattr(metadata, "ptx_options", None) or "").split()


def _spills(ptx: str, options: list[str]) -> tuple[int, int]:
    """Assembles a PTX text; returns bytes of spill stores and of spill loads."""
    found = _TARGET_LINE.search(ptx)
    if found is None:
        raise ToolchainError("the PTX has no .target line")
    assembler = tool("ptxas-blackwell" if int(found[2]) >= 100 else "ptxas")
    with tempfile.TemporaryDirectory(prefix="attncc-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        output = str(source.with_suffix(".cubin"))
        log = _run(
            assembler,
            "-v",
            "-lineinfo",
            *options,
            f"--gpu-name={found[1]}",
            str(source),
            "-o",
            output,
        )
    pairs = [(int(stores), int(loads)) for stores, loads in _SPILLS.findall(log)]
    if not pairs:
        raise ToolchainError(f"{assembler.name} -v reported no function:\n{log}")
    return sum(stores for stores, _ in pairs), sum(loads for _, loads in pairs)


def usage(cubin: bytes, name: str) -> tuple[int, int]:
    """Returns registers and stack bytes of one function of a cubin.

    Raises:
        ToolchainError: Triton's `cuobjdump` is missing, or knows nothing of the function.
    """
    with tempfile.TemporaryDirectory(prefix="attncc-") as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(cubin)
        dump = _run(tool("cuobjdump"), "--dump-resource-usage", str(binary))
    usage = {function: (int(reg), int(stack)) for function, reg, stack in _USAGE.findall(dump)}
    if name not in usage:
        raise ToolchainError(f"cuobjdump reported nothing about {name}:\n{dump}")
    return usage[name]


def _run(program: Path, *arguments: str) -> str:
    """Runs a tool; returns its standard output and error together."""
    try:
        done = subprocess.run(
            [str(program), *arguments],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError as error:
        raise ToolchainError(f"{program.name} did not start: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ToolchainError(f"{program.name} failed:\n{error.stdout}") from error
    return done.stdout
