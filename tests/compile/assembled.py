"""Each kernel of this tier is assembled once, not again to hear what the assembler says of it.

Triton runs ``ptxas -v`` and drops what it says; ``resources`` runs it again with the same options.
Here the first run's words are kept, by the PTX and by the options, in a folder that outlives the
process: Triton's cache has kernels whose assembly was heard in an earlier run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attncc.runtime import inspect

_RUN_TOOL = inspect._run


def _kept(folder: Path, command: Sequence[str]) -> Path:
    """Where the words of ``[ptxas, options..., source, "-o", output]`` are."""
    assembler, *options, source, _, _ = command
    state = Path(assembler).stat()
    key = [str((Path(assembler).name, state.st_size, state.st_mtime_ns)), *sorted(options)]
    text = "\n".join(key).encode() + Path(source).read_bytes()
    return folder / hashlib.sha256(text).hexdigest()


def _keep(place: Path, said: str) -> None:
    partial = place.with_suffix(f".{os.getpid()}")
    partial.write_text(said, encoding="utf-8")
    partial.replace(place)


def install(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep what Triton's assembler says, and answer ``resources`` from it."""
    from triton.backends.nvidia import compiler

    def assemble(command: list[str], **options: Any) -> Any:
        done = subprocess.run(command, **options)
        log = getattr(options.get("stderr"), "name", None)
        if "-v" in command and log is not None:
            _keep(_kept(folder, command), Path(log).read_text(encoding="utf-8"))
        return done

    def run_tool(program: Path, *arguments: str) -> str:
        if not (program.name.startswith("ptxas") and "-v" in arguments):
            return _RUN_TOOL(program, *arguments)
        place = _kept(folder, [str(program), *arguments])
        if not place.exists():
            _keep(place, _RUN_TOOL(program, *arguments))
        return place.read_text(encoding="utf-8")

    own = {**vars(subprocess), "run": assemble}
    patch.setattr(compiler, "subprocess", SimpleNamespace(**own))
    patch.setattr(inspect, "_run", run_tool)


def said(compiled: Any, folder: Path) -> str:
    """What ptxas says of a kernel that Triton compiled for sm_90: warnings, registers, spills."""
    source = folder / "kernel.ptx"
    source.write_text(compiled.asm["ptx"], encoding="utf-8")
    options = ["-v", "-lineinfo", *inspect._options(compiled.metadata), "--gpu-name=sm_90a"]
    return inspect._run(inspect.tool("ptxas"), *options, str(source), "-o", f"{source}.cubin")
