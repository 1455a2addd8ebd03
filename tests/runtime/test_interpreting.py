"""Triton's interpreter as it is shipped: what ``attncc verify`` runs on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import torch
import attncc as ac

torch.manual_seed(0)
q, k, v = torch.randn(1, 3, 4, 16), *torch.randn(2, 1, 40, 2, 16)
for run in (ac.ops.attention, ac.ops.attention.decode):
    error = run(q, k, v, backend="triton") - ac.ops.attention.reference(q, k, v)
    assert error.abs().max() < 2e-6, error.abs().max()
"""


def test_fp32_attention_runs_there(tmp_path):
    path = os.pathsep.join([str(ROOT / ".pkg"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "ATTNCC_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, **own}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
