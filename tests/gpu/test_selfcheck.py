"""``attncc verify``, ``attncc tune`` and the check before a first launch, on the GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import MiscompiledError, ToolchainError
from attncc.runtime import commands, kernels, selfcheck, tuned
from attncc.runtime.kernels import Kernel
from attncc.runtime.store import current
from tests.gpu.checking import DEVICE, unit

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "store"))

    def forget():
        tuned._tables.cache_clear()
        for kernel in kernels._LOADED.values():
            kernel.forget()

    forget()
    yield tmp_path / "store"
    forget()


def records(store):
    return [json.loads(p.read_text()) for p in store.rglob("verified.*.json")]


def test_verify_finds_every_kernel_right_and_keeps_it(own_store, capsys):
    sizes = ["--sizes", "D=64,E=64,K=64,V=64,G=2"]
    code = commands.run(["verify", "attention", "gated_delta_rule", *sizes, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, [v for v in found["verdicts"] if not v["right"]]
    assert {v["op"] for v in found["verdicts"]} == {"attention", "gated_delta_rule"}
    assert found["where"] == torch.cuda.get_device_name()
    held = records(own_store)
    assert held and all(h["right"] and h["gpu"] == found["where"] for h in held)


def delta():
    q, k = (unit(2, 100, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(2, 100, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    g, beta = torch.rand(2, 2, 100, 4, device=DEVICE)
    return q, k, v, -g, beta


@pytest.fixture
def suspect(monkeypatch):
    """Every toolchain is distrusted, whichever is installed."""
    monkeypatch.setattr(selfcheck, "suspicion", lambda entry, plan: "a test says so")


def test_a_first_call_is_checked_once(own_store, suspect, monkeypatch):
    args = delta()
    first = ac.ops.gated_delta_rule.prefill(*args, backend="triton")
    held = records(own_store)
    assert len(held) >= 3 and all(h["right"] for h in held)
    for kernel in kernels._LOADED.values():
        kernel.forget()
    monkeypatch.setattr(selfcheck, "_check", lambda *args: pytest.fail("checked again"))
    second = ac.ops.gated_delta_rule.prefill(*args, backend="triton")
    assert torch.equal(first.o, second.o)


def test_a_kernel_with_wrong_answers_is_set_aside(own_store, suspect, monkeypatch):
    launch = Kernel.launch

    def spoiled(self, grid, args, route=None):
        launch(self, grid, args, route)
        if self.plan.phase == "state":
            args["out_o" if "out_o" in args else "o"].mul_(1.5)

    monkeypatch.setattr(Kernel, "launch", spoiled)
    with pytest.raises(MiscompiledError, match="o errs by") as caught:
        ac.ops.gated_delta_rule.prefill(*delta(), backend="triton")
    assert caught.value.op == "gated_delta_rule" and caught.value.versions["triton"]
    assert list(current().base.glob(".bad-*"))


@pytest.mark.parametrize("page", [None, 16])
def test_a_compiler_error_leaves_caches_as_they_were(own_store, monkeypatch, page):
    usual = kernels.artifact

    def fails(source, target):
        if source.plan.phase != "append":
            raise ToolchainError("the compiler fell over")
        return usual(source, target)

    monkeypatch.setattr(kernels, "artifact", fails)
    sizes = {"B": 2, "Hkv": 2, "D": 64, "E": 64}
    made = ac.ops.attention.caches(sizes=sizes, capacity=4096, page=page, device=DEVICE)
    for tensor in made.cache.tensors.values():
        tensor.fill_(float("nan"))
    q = torch.ones(2, 1, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    k = q[:, :, :2].contiguous()
    with pytest.raises(ToolchainError, match="fell over"):
        ac.ops.attention.decode(q, k, k, made.cache, backend="triton")
    assert all(bool(t.isnan().all()) for t in made.cache.tensors.values())
    assert made.cache.lengths.tolist() == [0, 0]
    monkeypatch.setattr(kernels, "artifact", usual)
    ac.ops.attention.decode(q, k, k, made.cache, backend="triton")
    assert made.cache.lengths.tolist() == [1, 1]


SPARSE = "Hi=8,Di=64,H=16,R=128,P=64"


@pytest.mark.parametrize("form", ["plain", "cache", "paged"])
def test_verify_picks_some_of_a_longer_history(own_store, capsys, form):
    forms = ["--form", form, "--dtype", "bf16", "--sizes", SPARSE, "--jobs", "4"]
    code = commands.run(["verify", "lightning_indexer", "sparse_mla", *forms, "--json"])
    found = json.loads(capsys.readouterr().out)["verdicts"]
    assert code == 0, [v for v in found if not v["right"]]
    assert {v["op"] for v in found} == {"lightning_indexer", "sparse_mla"}
    picks = [v for v in found if v["op"] == "lightning_indexer"]
    assert all(v["results"][0] == {"output": "o", "error": 0.0, "allowed": 0.0} for v in picks)
    stages = {name.split("__")[1] for v in found for name in v["kernels"]}
    assert {"decode_score", "count", "pick", "sort", "decode_picked"} <= stages


def test_a_wrong_pick_is_found_before_anything_is_launched(own_store, suspect, monkeypatch):
    launch, launched = Kernel.launch, []

    def spoiled(self, grid, args, route=None):
        launched.append(selfcheck.under_way())
        launch(self, grid, args, route)
        if self.plan.phase == "sort":
            args["picked"][..., 5] += 1

    monkeypatch.setattr(Kernel, "launch", spoiled)
    qi, ki = unit(1, 1, 4, 64, dtype=torch.bfloat16), unit(1, 4096, 64, dtype=torch.bfloat16)
    w = torch.ones(1, 1, 4, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(MiscompiledError, match="o errs by"):
        ac.ops.lightning_indexer.decode(qi, w, ki, backend="triton")
    assert launched and all(launched)  # trials and nothing else


def test_tune_tries_the_fold_over_picked_rows(own_store):
    path = os.pathsep.join([str(ROOT / ".pkg"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "attncc.runtime.cli", "tune", "sparse_mla", "--phase", "decode",
         "--family", "selected_fold", "--sizes", f"{SPARSE},B=2,S=8192", "--json"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["family"] == "selected_fold"
    assert sum(c["ms"] is not None for c in found["candidates"]) > 5
    assert found["entry"]["choose"] in [c["choices"] for c in found["candidates"]]


def test_tune_measures_right_candidates_and_its_entry_decides(own_store):
    path = os.pathsep.join([str(ROOT / ".pkg"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "attncc.runtime.cli", "tune", "attention", "--phase", "decode",
         "--sizes", "D=64,E=64,G=4,Hkv=2,B=4,S=2048", "--json"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(c["ms"] is not None for c in found["candidates"]) > 5
    clock = "graph_ms" if any(c["graph_ms"] for c in found["candidates"]) else "ms"
    times = [c[clock] for c in found["candidates"] if c[clock] is not None]
    best = next(c for c in found["candidates"] if c["choices"] == found["entry"]["choose"])
    assert best[clock] == min(times) > 0
    q = torch.randn(4, 1, 8, 64, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, 4, 2048, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    before = kernels.compilations()
    out = ac.ops.attention.decode(q, k, v, backend="triton")
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), enable_gqa=True
    )
    assert float((out.transpose(1, 2).double() - want).abs().max()) < 2e-2
    assert kernels.compilations() == before  # compiled while it was tuned
    chosen = {k.plan.chosen for k in kernels._LOADED.values() if k.launchers}
    assert found["entry"]["id"] in chosen
