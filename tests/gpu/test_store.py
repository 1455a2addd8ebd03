"""Artifacts loaded on the GPU: by Triton's loader, by the driver alone, and out of a bundle."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import attncc as ac
from attncc.runtime import kernels, loader
from attncc.runtime.loader import Route
from tests.gpu.checking import DEVICE, check, unit

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16
ROUTES = [Route.TRITON, Route.DRIVER]


def forget():
    for kernel in kernels._LOADED.values():
        kernel.forget()


@pytest.fixture
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "store"))
    forget()
    yield tmp_path / "store"
    forget()


@pytest.fixture
def route(request, own_store, monkeypatch):
    monkeypatch.setattr(loader, "USUAL", request.param)
    return request.param


def qkv(tokens, held=None, batch=2, dim=128):
    held = held or tokens
    q = torch.randn(batch, tokens, 8, dim, device=DEVICE, dtype=BF16)
    k, v = torch.randn(2, batch, held, 2, dim, device=DEVICE, dtype=BF16)
    return q, k, v


def delta(tokens, batch=2):
    q, k = unit(batch, tokens, 2, 128, dtype=BF16), unit(batch, tokens, 2, 128, dtype=BF16)
    v = torch.randn(batch, tokens, 4, 128, device=DEVICE, dtype=BF16)
    g = -torch.rand(batch, tokens, 4, device=DEVICE)
    beta = torch.rand(batch, tokens, 4, device=DEVICE, dtype=BF16)
    return q, k, v, g, beta


@pytest.mark.parametrize("route", ROUTES, indirect=True)
def test_every_route_gives_the_right_answer(route):
    check(ac.ops.attention, *qkv(300))  # more shared memory than a launch gets unasked
    check(ac.ops.attention, *qkv(1, 999), phase="decode")
    check(ac.ops.gated_delta_rule, *delta(200))
    check(ac.ops.gated_delta_rule, *delta(1), phase="decode")
    made = {type(x) for k in kernels._LOADED.values() for x in k.launchers.values()}
    wanted = {Route.TRITON: loader.TritonLauncher, Route.DRIVER: loader.DriverLauncher}
    assert made == {wanted[route]}


@pytest.mark.parametrize("route", ROUTES, indirect=True)
def test_what_the_store_has_is_not_compiled_again(route):
    args = qkv(64)
    first = ac.ops.attention(*args, backend="triton")
    before = kernels.compilations()
    forget()
    second = ac.ops.attention(*args, backend="triton")
    assert kernels.compilations() == before and torch.equal(first, second)


@pytest.mark.parametrize("route", ROUTES, indirect=True)
def test_a_graph_captures_and_replays_the_launch(route):
    q, k, v = qkv(64)
    want = ac.ops.attention(q, k, v, backend="triton")
    out = torch.full_like(want, torch.nan)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ac.ops.attention(q, k, v, out=out, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ac.ops.attention(q, k, v, out=out, backend="triton")
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("route", [Route.DRIVER], indirect=True)
def test_a_thread_without_a_context_can_launch(route):
    q, k, v = qkv(64)
    want = ac.ops.attention(q, k, v, backend="triton")
    out, failures = torch.full_like(want, torch.nan), []

    def work():
        try:
            ac.ops.attention(q, k, v, out=out, backend="triton")
        except Exception as error:
            failures.append(error)

    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert failures == [] and torch.equal(out, want)


CARRIED = """
import torch, attncc as ac
from attncc.runtime import kernels, loader
torch.manual_seed(0)
q = torch.randn(2, 300, 32, 128, device="cuda", dtype=torch.bfloat16)
k, v = torch.randn(2, 2, 300, 8, 128, device="cuda", dtype=torch.bfloat16)
o = ac.ops.attention(q, k, v, backend="triton")
want = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)
assert (o - want).abs().max() < 2e-2, (o - want).abs().max()
assert kernels.compilations() == 0
assert all(isinstance(x, loader.DriverLauncher)
           for kernel in kernels._LOADED.values() for x in kernel.launchers.values())
print("carried")
"""


BUILD = """
import sys, pathlib, attncc as ac
from attncc.runtime.bundle import Request, build_bundle, plan_bundle
request = Request([{"D": 128, "E": 128, "G": 4}], targets=[sys.argv[1]], phases=["prefill"])
made = build_bundle(plan_bundle([ac.ops.attention.declaration], request), pathlib.Path(sys.argv[2]))
assert made and all(o.error is None for o in made), [o.error for o in made]
"""


def python(code, *arguments, **env):
    path = os.pathsep.join([str(ROOT / ".pkg"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, **env},
    )  # fmt: skip


def test_a_bundle_runs_with_nothing_compiled(tmp_path):
    own, bundle = tmp_path / "own", tmp_path / "bundle"
    major, minor = torch.cuda.get_device_capability()
    done = python(BUILD, f"sm_{major}{minor}", str(bundle), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    roots = os.pathsep.join([str(own), str(bundle)])
    done = python(CARRIED, ATTNCC_CACHE_DIR=roots, ATTNCC_EXPECT_HIT="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["carried"]
    assert not [*own.rglob("*.cubin")]  # what was checked may be noted there, nothing is compiled
