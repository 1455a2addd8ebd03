"""From a CuTe-DSL file to a cubin, in a process of its own; needs no GPU.

What is stored is a plain cubin with the store's own manifest, not CuTe-DSL's object for its own
runtime: the kernel's parameters are the plan's, it writes its tensor maps itself into the scratch
that every launcher here gives, and so the driver launches, prepares and captures it like any other
kernel, on a machine that has neither CuTe-DSL nor anything of it.

The compiler's state (its target, its caches, what it prints) is a process' own: a child compiles
one file for one target.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from attncc.codegen.render import Source
from attncc.codegen.target import shared_limit
from attncc.dsl.errors import ToolchainError
from attncc.runtime.inspect import usage
from attncc.runtime.key import CUTEDSL_WHEEL
from attncc.runtime.manifest import Manifest
from attncc.runtime.store import Built

_CHILD = Path(__file__).resolve().parent / "cutedsl_child.py"
_SECONDS = 600
_KINDS = {"i32": "Int32", "i64": "Int64", "fp32": "Float32"}


def cutedsl_problem() -> str | None:
    """Why no CuTe-DSL kernel can be compiled here, or None."""
    if importlib.util.find_spec("cutlass") is None:
        return f"{CUTEDSL_WHEEL} is not installed"
    return None


def built_cutedsl(source: Source, path: Path, target: str) -> Built:
    """Compile a generated file.

    Args:
        source: what the file was generated from.
        path: the file.
        target: ``sm_90`` and the like.

    Raises:
        ToolchainError: CuTe-DSL is not installed, or the kernel cannot be compiled.
    """
    problem = cutedsl_problem()
    if problem is not None:
        raise ToolchainError(
            f"the kernel {source.entry} is not in the store, and {problem}", op=source.plan.op,
            help=f"pip install '{CUTEDSL_WHEEL}', or build it elsewhere with `attncc build ... "
            "--dialect cutedsl` and carry the bundle",
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="attncc-") as folder:
        record, cubin = _compile(source, path, target, Path(folder))
    limit = shared_limit(target)
    if record["shared"] > limit:
        raise ToolchainError(
            f"the kernel {source.entry} takes more shared memory than a program on {target} has",
            op=source.plan.op, expected=f"at most {limit} bytes",
            found=f"{record['shared']} bytes",
        )  # fmt: skip
    registers, _ = usage(cubin, record["entry"])
    manifest = Manifest(
        entry=record["entry"],
        target=target,
        family=record["family"],
        parameters=tuple((p.name, p.type) for p in source.plan.parameters),
        num_warps=record["warps"],
        shared_bytes=record["shared"],
        scratch_bytes=record["scratch"],
        tensor_maps="device",
        registers=registers,
        versions={
            "cutedsl": record["version"],
            "ptxas": record["assembler"],
            "python": platform.python_version(),
        },
    )
    return Built(manifest, {manifest.artifact: cubin})


def _compile(source: Source, path: Path, target: str, folder: Path) -> tuple[dict[str, Any], bytes]:
    """Run the child; what it says of the kernel, and the cubin."""
    kinds = [_KINDS.get(p.type, "Int64") for p in source.plan.parameters]
    order = {
        "path": str(path.resolve()), "entry": source.entry, "arch": f"{target}a",
        "kinds": [*kinds, "Int64", "Int64"],
    }  # fmt: skip
    (folder / "order.json").write_text(json.dumps(order), encoding="utf-8")
    own = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    own |= {"CUTE_DSL_ARCH": f"{target}a", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        # Not the folder of the child first on the path: modules here are called like others.
        done = subprocess.run(
            [sys.executable, "-P", str(_CHILD)], cwd=folder, env=own, timeout=_SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{source.entry}: {error}", op=source.plan.op) from error
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-25:])
        raise ToolchainError(
            f"CuTe-DSL does not compile {source.entry}:\n{said}", op=source.plan.op
        )
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    return record, (folder / "kernel.cubin").read_bytes()
