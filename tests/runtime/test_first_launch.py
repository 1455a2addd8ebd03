"""Nothing of a call is launched, and so nothing written, before all of its kernels are there."""

from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl.errors import ToolchainError
from attncc.runtime import affine, backends, kernels, selected, softmax, stages
from attncc.runtime.backends import run_kernels, spec_of
from attncc.runtime.bind import bind
from attncc.runtime.kernels import Kernel
from tests.mla_ops import MLA, REAL, forced, tensors
from tests.selected_ops import SCALE, sparse

BF16 = torch.bfloat16
GPU = torch.device("cuda", 0)


def zeros(*shape):
    return torch.zeros(shape, dtype=BF16)


def in_ranges():
    """A decode step over a history that is cut into ranges: one kernel, which appends too."""
    return attention(8192)


def attention(capacity=64):
    """A decode step that appends first, over a history that is not cut."""
    cache = ac.DenseCache.allocate(
        ac.ops.attention, sizes={"B": 1, "Hkv": 2, "D": 64, "E": 64}, capacity=capacity
    )
    q, k = zeros(1, 1, 4, 64), zeros(1, 1, 2, 64)
    return ac.ops.attention, {"q": q, "k": k, "v": k, "cache": cache}, "decode"


def recurrence():
    """A prefill of several chunks into a pool."""
    q, state = zeros(1, 256, 2, 64), torch.zeros(3, 2, 64, 64)
    pool = ac.StatePool(state, torch.tensor([1], dtype=torch.int32))
    g = torch.zeros(1, 256, 2)
    named = {"q": q, "k": q, "v": q, "g": g, "beta": g, "s": pool}
    return ac.ops.gated_delta_rule, named, "prefill"


def selection():
    """A decode step that appends to three histories, then picks and folds."""
    sizes = {"B": 1, "Di": 16, "R": 32, "P": 16}
    cache = ac.DenseCache.allocate(sparse, sizes=sizes, capacity=4096)
    named = {
        "qi": zeros(1, 1, 3, 16), "w": zeros(1, 1, 3), "ki": zeros(1, 1, 16),
        "qc": zeros(1, 1, 5, 32), "qr": zeros(1, 1, 5, 16), "c": zeros(1, 1, 32),
        "r": zeros(1, 1, 16), "scale": SCALE, "cache": cache,
    }  # fmt: skip
    return sparse, named, "decode"


@pytest.fixture
def gpu(monkeypatch):
    """A device that compiles what it is asked to; returns what was compiled and launched."""
    compiled, launched = [], []

    def launcher(kernel, device, route=None):
        compiled.append(kernel.plan.phase)
        if kernel.plan.phase == compiled_last[0]:
            raise ToolchainError("the compiler fell over")
        return lambda *args: None

    def launch(kernel, grid, args, route=None):
        launched.append(kernel.plan.phase)

    compiled_last = [""]
    monkeypatch.setattr(Kernel, "launcher", launcher)
    monkeypatch.setattr(Kernel, "launch", launch)
    for module in (softmax, selected):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(module, "workspace", on_the_host)
    monkeypatch.setattr(affine, "workspace", on_the_host)
    monkeypatch.setattr(softmax, "arrivals", lambda n, device: torch.zeros(n, dtype=torch.int32))
    return compiled, launched, compiled_last


def on_the_host(size, dtype, device):
    return torch.zeros(size, dtype=dtype)


@pytest.mark.parametrize("made", [attention, in_ranges, recurrence, selection])
def test_a_compiler_that_fails_leaves_everything_as_it_was(gpu, made):
    compiled, launched, fails = gpu
    op, named, phase = made()
    call, _ = bind(op.declaration, (), named)
    spec, call = replace(spec_of(call), target="sm_90"), replace(call, device=GPU)
    run_kernels(call, analyse(call.program), spec, phase)
    assert set(launched) == set(compiled)
    assert compiled == ["decode_split"] if made is in_ranges else len(compiled) > 1
    needed = list(compiled)
    for last in needed:
        compiled.clear()
        launched.clear()
        fails[0] = last
        with pytest.raises(ToolchainError, match="fell over"):
            run_kernels(call, analyse(call.program), spec, phase)
        assert compiled[-1] == last and not launched


def test_products_of_rows_that_are_appended_first_wait_for_the_fold_too(gpu, monkeypatch):
    compiled, launched, fails = gpu
    sizes = {"B": 1, "R": REAL["R"], "P": REAL["P"]}
    cache = ac.DenseCache.allocate(MLA, sizes=sizes, capacity=64)
    named = tensors(3, 1, 2, 2, REAL, BF16)
    call, _ = bind(MLA.declaration, (), {**named, "scale": 1.0, "cache": cache})
    monkeypatch.setattr(backends, "target_for", lambda device: "sm_90")
    monkeypatch.setattr(backends, "has_triton", lambda call: True)
    monkeypatch.setattr(stages, "_append", lambda call, phase: launched.append("append"))
    fails[0] = "decode"
    with forced("expanded"), pytest.raises(ToolchainError, match="fell over"):
        stages.run(replace(call, device=GPU), "decode", "auto")
    assert compiled == ["decode"] and not launched


def test_the_interpreter_and_calls_on_the_host_compile_nothing(gpu):
    compiled, _, _ = gpu
    op, named, phase = attention()
    call, _ = bind(op.declaration, (), named)
    found = backends.sources(op.declaration, sizes={"D": 64, "E": 64, "G": 2}, phase=phase)
    kernels.make_ready([kernels.load(s) for s in found], call.device, "sm_90")
    assert not compiled
