"""Repeated launches after an error, and before a kernel is trusted."""

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import ArgumentError, MiscompiledError, ToolchainError
from attncc.runtime import kernels, selfcheck
from tests.interpreter.test_softmax import windowed
from tests.runtime.driving import on_a_device, prepared
from tests.runtime.test_selfcheck import SOURCE


@pytest.fixture(autouse=True)
def device(monkeypatch):
    on_a_device(monkeypatch)


def launched(made):
    return [a.values for a in made.library.asked]


def test_a_number_that_does_not_fit_leaves_nothing_behind(monkeypatch):
    q, k, v = (torch.randn(2, 9, h, 16) for h in (4, 2, 2))
    made = prepared(monkeypatch, windowed, "prefill", q, k, v, 4, 0.5)
    made.call()
    with pytest.raises(ToolchainError, match="cannot hold"):
        made.call(scale=0.25, width=1 << 70)
    made.call()
    made.call(scale=0.0)
    made.call(scale=-0.0)
    before, after, zero, negative = launched(made)
    results = len([p for p, q in zip(before, after, strict=True) if p != q])
    assert 4 in after and 0.25 not in after and results <= 1
    assert "-0.0" in map(str, negative) and "-0.0" not in map(str, zero)


def test_no_tensor_in_place_of_one_is_named(monkeypatch):
    q, k, v = (torch.randn(2, 9, h, 16) for h in (4, 2, 2))
    made = prepared(monkeypatch, windowed, "prefill", q, k, v, 4, 0.5)
    with torch.no_grad():
        for _ in range(2):
            made.call(q=q.clone())
        for value in (None, 3, "q"):
            with pytest.raises(ArgumentError, match="another kind") as caught:
                made.call(q=value)
            assert caught.value.argument == "q"


@ac.op(scan="T", out="B T H D")
def leaky(x=ac.Activation("B T H D"), f=ac.Activation("B T H D"), outer=ac.State("B H D")):
    f = ac.sigmoid(f)
    outer = f * outer + (1 - f) * x
    return outer, outer


def test_a_state_may_be_called_like_an_output(monkeypatch):
    x, f = torch.randn(2, 2, 5, 2, 16)
    pool, slots = torch.randn(4, 2, 16), torch.tensor([0, 1], dtype=torch.int32)
    state = ac.StatePool(pool, slots, torch.tensor([2, 3], dtype=torch.int32))
    made = prepared(monkeypatch, leaky, "prefill", x, f, state)
    made.call(outer=ac.StatePool(pool, slots, slots))
    with pytest.raises(ArgumentError, match="another kind") as caught:
        made.call(outer=ac.StatePool(pool, slots))  # else written where nobody said
    assert caught.value.argument == "outer"


def test_nobody_else_launches_a_kernel_before_its_check_has_passed(monkeypatch):
    kernel = kernels.Kernel(SOURCE)
    seen = []

    def load_entry(entry, source, device, route):
        seen.append(object())
        return seen[-1]

    def check(entry, plan, device):
        if selfcheck.under_way():
            return
        assert (0, None) not in kernel.launchers  # other threads must wait, or check themselves
        token = selfcheck._RUNNING.set(selfcheck._Running())
        assert kernel.launcher(0) is seen[0]  # the trial's own launches
        selfcheck._RUNNING.reset(token)
        if wrong:
            raise MiscompiledError((), plans=(), versions={}, why="errs", op="leaky")

    monkeypatch.setattr(kernels, "artifact", lambda source, target: None)
    monkeypatch.setattr(kernels, "load_entry", load_entry)
    monkeypatch.setattr(selfcheck, "check_first", check)
    wrong = True
    with pytest.raises(MiscompiledError):
        kernel.launcher(0)
    assert not kernel.launchers
    wrong = False
    seen.clear()
    assert kernel.launcher(0) is kernel.launcher(0) is seen[0] and len(seen) == 1
