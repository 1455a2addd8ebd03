"""A bundle that was built elsewhere: nothing is compiled, and every answer is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attncc.runtime.store import Store

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
BUNDLE = os.environ.get("ATTNCC_TEST_BUNDLE")
"""Made by ``make bundle``, on a machine without a GPU."""


@pytest.mark.skipif(not BUNDLE, reason="ATTNCC_TEST_BUNDLE names no bundle (make bundle)")
def test_a_bundle_from_a_machine_without_a_gpu_runs_with_nothing_compiled(tmp_path):
    bundle = Path(BUNDLE).resolve()
    held = list(Store(tmp_path, (bundle,)).folders())
    assert held, f"{bundle} holds no kernels of this version's store"
    own = tmp_path / "own"
    path = [str(ROOT / ".pkg"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.carried"], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=500,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "ATTNCC_EXPECT_HIT": "1",
            "ATTNCC_CACHE_DIR": os.pathsep.join([str(own), str(bundle)]),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines[-1]["compilations"] == 0
    assert len([x for x in lines if "used" in x]) >= 16 and all(
        x["used"] <= 1 for x in lines if "used" in x
    )
    print(*lines, sep="\n")
    # What the checks of the kernels found lies in the folder that is written; no kernel does.
    assert [f for f, bundled in Store(own).folders() if not bundled] == []
