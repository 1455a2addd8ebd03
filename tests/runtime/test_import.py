"""What ``import attncc`` loads: the declarations, and nothing that only runs or compiles them."""

import subprocess
import sys

import pytest

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


NAMES = """
import importlib, sys
import {first}
import attncc
import attncc.nn as nn, attncc.ops as ops, attncc.gdn as gdn, attncc.gdp as gdp
from attncc import gdn as a, gdp as b, nn as c, ops as d
assert (a, b, c, d) == (gdn, gdp, nn, ops) == (attncc.gdn, attncc.gdp, attncc.nn, attncc.ops)
from attncc.nn import GatedDeltaNet
from attncc.ops import attention
from attncc.gdp import chunk_gated_delta_product
from attncc.gdn import chunk_gated_delta_rule
import attncc.runtime.nn, attncc.runtime.ops
assert GatedDeltaNet is attncc.runtime.nn.GatedDeltaNet is nn.GatedDeltaNet
assert attention is attncc.runtime.ops.attention is ops.attention
assert set(nn.__all__) == set(dir(nn)) and set(ops.__all__) == set(dir(ops))
for module, name in [("nn", "kept"), ("ops", "attention"), ("gdp", "shared")]:
    try:
        importlib.import_module(f"attncc.{{module}}.{{name}}")
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"a second copy of attncc.{{module}}.{{name}}")
try:
    nn.Attention
except AttributeError as error:
    print(error)
"""


@pytest.mark.parametrize("first", ["attncc.nn", "attncc.gdp"])
def test_public_modules_are_imported_like_any_and_are_one_copy(first):
    done = subprocess.run(
        [sys.executable, "-c", NAMES.format(first=first)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "attncc.nn has no 'Attention'; it has GatedDeltaNet" in done.stdout
