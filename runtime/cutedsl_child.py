"""Compiles one CuTe-DSL file, as a process of its own: ``order.json`` in, cubin and record out.

Run in a scratch folder by :mod:`attncc.runtime.compile_cutedsl`; imports nothing of the package.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Compile what ``order.json`` in the current folder asks for."""
    import cutlass
    import cutlass.cute as cute

    order = json.loads(Path("order.json").read_text(encoding="utf-8"))
    module = _loaded(Path(order["path"]), order["entry"])
    values = [getattr(cutlass, kind)(0) for kind in order["kinds"]]
    options = f"--gpu-arch {order['arch']} --keep-ptx --keep-cubin"
    compiled = cute.compile(getattr(module, order["entry"]), *values, options=options)
    text = compiled.__ptx__
    ptx = text if isinstance(text, str) else text.decode()
    [entry] = re.findall(r"^\.visible \.entry (\w+)", ptx, re.MULTILINE)
    [family] = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    assembler = re.search(r"^// Cuda compilation tools, .*V(\d+\.\d+\.\d+)", ptx, re.MULTILINE)
    record = {
        "entry": entry, "family": family, "version": cutlass.__version__,
        "assembler": assembler[1] if assembler else "unknown",
        "shared": module.SHARED_BYTES, "scratch": module.SCRATCH_BYTES, "warps": module.WARPS,
    }  # fmt: skip
    Path("kernel.ptx").write_text(ptx, encoding="utf-8")
    Path("kernel.cubin").write_bytes(compiled.__cubin__)
    Path("record.json").write_text(json.dumps(record), encoding="utf-8")


def _loaded(path: Path, entry: str) -> Any:
    """The generated file as a module."""
    name = f"attncc_generated_{entry}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
