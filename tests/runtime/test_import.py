"""What ``import attncc`` loads: the declarations, and nothing that only runs or compiles them."""

import subprocess
import sys

LATE = (
    "attncc.codegen.pipeline", "attncc.codegen.emit", "attncc.runtime.backends",
    "attncc.runtime.torch_ops", "attncc.runtime.torch_trace", "attncc.runtime.tune",
    "attncc.runtime.cli", "triton", "torch._dynamo", "jinja2", "typer", "rich", "cuda",
)  # fmt: skip
"""Modules that are imported by what needs them first."""

CODE = """
import sys
import torch
before = set(sys.modules)
import attncc
print(*sorted(set(sys.modules) - before))
x = torch.ones(1, 2, 1, 8)
print(attncc.ops.attention(x, x, x, return_lse=True).lse.shape)
"""


def test_the_generator_is_not_needed_to_import_the_package():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    loaded = done[0].split()
    assert "attncc.runtime.api" in loaded
    assert not [m for m in loaded for late in LATE if m == late or m.startswith(f"{late}.")]
    assert done[1] == "torch.Size([1, 2, 1])"
