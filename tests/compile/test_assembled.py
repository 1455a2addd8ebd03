"""What was kept of Triton's own run of the assembler is what another run says."""

from pathlib import Path

import pytest
import triton.knobs

from attncc.codegen.emit.scan_sources import sources_of
from attncc.codegen.plan_scan import StepPlan, plan_step
from attncc.runtime import inspect
from attncc.runtime.kernels import compile_source, load
from tests.compile import assembled
from tests.compile.test_affine import PROGRAM, spec


@pytest.mark.parametrize("capability", [90, 100])
def test_triton_assembles_and_nobody_does_again(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_step(PROGRAM, spec("fp16", 64, capability))
    assert isinstance(plan, StepPlan)
    (source,) = sources_of(plan)
    target, folder = f"sm_{capability}", tmp_path / "said"
    folder.mkdir()
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        assembled.install(monkeypatch, folder)
        kernel = compile_source(source, load(source).function, capability)
    (kept,) = folder.iterdir()
    assert f"Compiling entry function '{kernel.metadata.name}'" in kept.read_text()
    found = inspect.resources(kernel, target)
    assert [*folder.iterdir()] == [kept]  # as Triton called it, so would we
    monkeypatch.setattr(inspect, "_run", assembled._RUN_TOOL)
    assert found == inspect.resources(kernel, target) and found.registers > 0
    kept.write_text(
        "ptxas info    : 8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads"
    )
    assembled.install(monkeypatch, folder)
    again = inspect.resources(kernel, target)
    assert (again.spill_store_bytes, again.spill_load_bytes) == (8, 12)
