"""A process whose kernels are stored already compiles nothing and prints nothing."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys
import torch
import attncc as ac
from attncc.runtime import backends, compile, softmax
from attncc.runtime.bind import bind

q, k, v = (torch.empty(2, n, 8, 64, dtype=torch.bfloat16) for n in (1, 300, 300))
call, _ = bind(ac.ops.attention.declaration, (q, k, v), {})
form = backends.analyse(call.program).softmax
kernel = softmax.prepare(call.program, form, backends.spec_of(call), "decode").whole
entry = compile.artifact(kernel.ensure("sm_90").source, "sm_90")
assert entry.files[entry.manifest.artifact]
print(compile.compilations(), *(m for m in ("sympy", "jinja2", "triton") if m in sys.modules))
"""


def run(store):
    path = os.pathsep.join([str(ROOT / ".pkg"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "ATTNCC_CACHE_DIR": str(store)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_warm_process_compiles_and_prints_nothing(tmp_path):
    assert run(tmp_path) == ["1", "jinja2", "triton"]
    assert run(tmp_path) == ["0"]
