"""A process whose kernels are stored already compiles nothing and imports no algebra."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys
import torch
import attncc as ac
from attncc.runtime import compile
from attncc.runtime.bind import bind
from attncc.runtime.loader import TritonLauncher
from attncc.runtime.sources import call_sources

q, k, v = (torch.empty(2, n, 8, 64, dtype=torch.bfloat16) for n in (1, 300, 300))
call, _ = bind(ac.ops.attention.declaration, (q, k, v), {})
source = call_sources(call, "decode", "sm_90")[0]
entry = compile.artifact(source, "sm_90")
TritonLauncher(entry, source)
print(compile.compilations(), "sympy" in sys.modules)
"""


def run(store):
    path = os.pathsep.join([str(ROOT / ".pkg"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "ATTNCC_CACHE_DIR": str(store)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_warm_process_compiles_nothing_and_imports_no_sympy(tmp_path):
    assert run(tmp_path)[0] == "1"
    assert run(tmp_path) == ["0", "False"]
