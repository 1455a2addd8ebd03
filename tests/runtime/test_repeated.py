"""Repeated launches after an error, and before a kernel is trusted."""

from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import ArgumentError, MiscompiledError, ToolchainError
from attncc.runtime import dispatch, kernels, replay, selfcheck
from attncc.runtime.dispatch import _Known
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


def appending(monkeypatch, capacity=4096):
    """A decode step with a cache, as it is known after a while; its arguments, and the driver."""
    q, k, v = torch.randn(2, 1, 8, 64), *torch.randn(2, 2, 1, 2, 64)
    sizes = {"B": 2, "Hkv": 2, "D": 64, "E": 64}
    cache = ac.DenseCache.allocate(ac.ops.attention, sizes=sizes, capacity=capacity, dtype=q.dtype)
    kwargs = {"out": torch.empty_like(q), "backend": "triton", "cache": cache}
    made = prepared(monkeypatch, ac.ops.attention, "decode", q, k, v, **kwargs)
    found = dispatch.record(ac.ops.attention, "decode", (q, k, v), kwargs, strict=True)
    known = _Known(found, made.call._replay)
    for _ in range(dispatch.OFTEN):
        known.again((q, k, v), kwargs)
    return known, [q, k, v], kwargs, made


def run(known, args, kwargs):
    fitting = known.fits(args, kwargs)
    assert fitting is not None
    return known.run(ac.ops.attention, *fitting)


def test_a_step_that_appends_is_one_launch_which_adds_to_the_lengths(monkeypatch):
    known, args, kwargs, made = appending(monkeypatch)
    [plan] = [w.kernel.plan for w in made.call._replay.recording.work]
    assert plan.grows and known._replay is made.call._replay
    assert run(known, args, kwargs) is kwargs["out"]
    names = [p.name for p in plan.parameters]
    seen = dict(zip(names, made.library.asked[-1].values, strict=False))
    assert seen["growth"] == 1 and seen["lengths_ptr"] == kwargs["cache"].lengths.data_ptr()


def test_what_did_not_change_is_not_written_again_and_what_did_is_seen(monkeypatch):
    known, args, kwargs, made = appending(monkeypatch)
    bound = []
    engine = known._replay._engine
    monkeypatch.setattr(engine, "bind", lambda p, own=engine.bind: (bound.append(p), own(p)))
    asked = made.library.asked
    run(known, args, kwargs)
    run(known, args, kwargs)
    view = replace(kwargs["cache"])  # another view of the same tensors
    run(known, args, {**kwargs, "cache": view})
    assert len(bound) == 1 and asked[-1] == asked[-2] == asked[-3]
    other = replace(view, lengths=view.lengths.clone())
    run(known, args, {**kwargs, "cache": other})
    assert other.lengths.data_ptr() in asked[-1].values and len(bound) == 2
    run(known, args, kwargs)
    assert asked[-1] == asked[-3]
    view.tensors["k"].resize_(2, 2048, 2, 64)
    assert known.fits(args, {**kwargs, "cache": view}) is None
    view.tensors["k"].resize_(2, 4096, 2, 64)
    args[0] = kwargs["out"]  # a result over an argument: the ordinary path says so
    assert known.fits(args, kwargs) is None and known.fits(args, kwargs) is None


def test_workspaces_are_a_streams_own_again_after_other_streams_and_captures(monkeypatch):
    known, args, kwargs, made = appending(monkeypatch)
    asked, capturing = made.library.asked, [False]
    monkeypatch.setattr(
        torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing[0], raising=False
    )
    found = {}
    for stream, captured in ((1, False), (1, False), (2, False), (1, True), (1, False), (2, False)):
        monkeypatch.setattr(replay, "raw_stream", lambda device, s=stream: s)
        capturing[0] = captured
        run(known, args, kwargs)
        found.setdefault((stream, captured), []).append(asked[-1])
    first, again, later = found[1, False]
    assert first == again == later and found[2, False][0] == found[2, False][1]
    places = [{*e[0].values} for e in found.values()]
    assert all(a - b for a in places for b in places if a is not b)
