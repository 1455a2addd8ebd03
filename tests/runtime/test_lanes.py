"""Recorded calls with kernels on a stream beside the caller's, as the driver sees them."""

import ctypes
import gc
import os
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import ToolchainError
from attncc.runtime import engines, replay, slices
from attncc.runtime.driver import INVALID_CONTEXT
from tests.runtime.driving import LAUNCH, STREAM, on_a_device, prepared

GDR = ac.ops.gated_delta_rule
BESIDE = 1 << 50


@pytest.fixture(autouse=True)
def device(monkeypatch):
    on_a_device(monkeypatch)
    monkeypatch.setattr(slices, "LEAST_TOKENS", 64)
    monkeypatch.setattr(
        engines, "beside", lambda device, stream, lane: SimpleNamespace(cuda_stream=stream + BESIDE)
    )


def made(monkeypatch, tokens=260, state=True):
    q, k, v = (torch.randn(1, tokens, 2, 16) for _ in range(3))
    g, beta = torch.randn(2, 1, tokens, 2)
    s = {"s": torch.randn(1, 2, 16, 16)} if state else {}
    return prepared(monkeypatch, GDR, "prefill", q=q, k=k, v=v, g=g, beta=beta, **s)


def on(stream, monkeypatch, *, capturing=False):
    monkeypatch.setattr(replay, "raw_stream", lambda device: stream)
    monkeypatch.setattr(
        torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing, raising=False
    )


def order(library, each, run, stream):
    """Checks one run: who waits for whom, and that the caller's stream waits for all."""
    first = run * each
    for i in range(each):
        asked, ahead = library.asked[first + i], library.ahead[first + i]
        mine = {n - first for n in ahead if n >= first}
        if i % 3 == 2:  # a state pass: after its systems, and after the one before
            assert asked.stream == stream + BESIDE
            assert {i - 2, i - 1} <= mine and set(range(2, i, 3)) <= mine
        else:  # systems: after no state pass
            assert asked.stream == stream
            assert not mine & set(range(2, each, 3))
    assert set(range(first, first + each)) <= library.passed[stream]


@pytest.mark.parametrize("state", [True, False])
def test_state_passes_run_beside_the_systems_of_later_slices(monkeypatch, state):
    call = made(monkeypatch, state=state)
    each = len(call.functions)
    assert each == 3 * 3  # prepare, mix and state of three slices
    for run, stream in enumerate((STREAM, STREAM, STREAM + 8, STREAM)):
        on(stream, monkeypatch)
        call.call()
        order(call.library, each, run, stream)
    assert len(call.library.events) == 2 * (3 + 1)  # the same for every run on a stream
    assert not call.library.dropped


def test_what_the_kernels_are_given_is_what_the_ordinary_call_gave_them(monkeypatch):
    call = made(monkeypatch)
    call.call(out={"s": call.result.s, "o": call.result.o})
    tensors = {t.data_ptr(): t for t in call.call._leaves.tensors.values()}
    ends = {p + t.numel() * t.element_size(): p for p, t in tensors.items()}
    for (grid, values), asked in zip(call.given, call.library.asked, strict=True):
        assert asked.grid == grid
        for given, seen in zip(values, asked.values, strict=False):
            inside = any(start <= given < end for end, start in ends.items())
            if inside:  # an argument, or a slice of one
                assert seen == given
    # Slices of one argument start at different places.
    q = call.call._leaves.tensors["q"]
    size = q.numel() * q.element_size()
    firsts = {a.values[0] - q.data_ptr() for a in call.library.asked}
    assert len([f for f in firsts if 0 <= f < size]) == 3


def test_a_captured_run_has_events_of_its_own(monkeypatch):
    call = made(monkeypatch)
    on(STREAM, monkeypatch)
    call.call()
    usual = set(call.library.events)
    on(STREAM, monkeypatch, capturing=True)
    call.call()
    captured = set(call.library.events) - usual
    assert len(captured) == len(usual) == 4
    noted = {e: call.library.events[e] for e in captured}
    on(STREAM, monkeypatch)
    call.call()
    assert {e: call.library.events[e] for e in captured} == noted  # nobody notes in them again
    assert set(call.library.dropped) == captured
    for run in range(3):
        order(call.library, len(call.functions), run, STREAM)


def test_workspaces_of_a_run_lie_apart(monkeypatch):
    monkeypatch.setattr(replay, "SMALL", 16)
    call = made(monkeypatch)
    call.call()
    rooms = {b.register: b.bytes for b in call.call._replay.recording.workspaces}
    placed = call.call._replay._placed
    assert len(rooms) > 3 and rooms.keys() == placed.keys()
    ends = sorted((at, at + rooms[register]) for register, at in placed.items())
    assert all(a[1] <= b[0] for a, b in pairwise(ends))
    assert ends[-1][1] <= call.call._replay._arena
    assert all(at % 512 == 0 for at, _ in ends)


def test_after_a_failure_the_caller_waits_for_what_was_launched(monkeypatch):
    call = made(monkeypatch)
    on(STREAM, monkeypatch)
    launched = call.library._launched

    def failing(function, *rest):
        return 1 if len(call.library.asked) == 4 else launched(function, *rest)

    call.library._callback = LAUNCH(failing)
    address = ctypes.cast(call.library._callback, ctypes.c_void_p).value
    call.library.cuLaunchKernel = ctypes.CFUNCTYPE(ctypes.c_int)(address)
    driver = call.call._replay._engine._driver
    monkeypatch.setattr(driver, "_plain", call.library.cuLaunchKernel)
    with pytest.raises(ToolchainError, match="the launch failed"):
        call.call()
    assert call.library.passed[STREAM] == {0, 1, 2, 3}


def test_a_thread_without_a_context_gets_torchs(monkeypatch):
    call = made(monkeypatch)
    on(STREAM, monkeypatch)
    call.library.errors = [INVALID_CONTEXT]
    call.call()
    order(call.library, len(call.functions), 0, STREAM)


def test_threads_on_streams_of_their_own(monkeypatch):
    call = made(monkeypatch)
    stream = threading.local()
    monkeypatch.setattr(replay, "raw_stream", lambda device: stream.number)

    def work(number):
        stream.number = number
        for _ in range(20):
            call.call()

    threads = [threading.Thread(target=work, args=(STREAM + 8 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    each = len(call.functions)
    assert len(call.library.asked) == 60 * each
    for run in range(60):
        order(call.library, each, run, call.library.asked[run * each].stream)


def test_events_of_what_is_forgotten_are_taken_again(monkeypatch):
    spare = []
    monkeypatch.setattr(engines, "spare_events", lambda device: spare)
    first = made(monkeypatch)
    engine = first.call._replay._engine
    engine._process = os.getpid()  # as if the driver were the process' own
    for i in range(engines.STREAMS + 1):
        on(STREAM + 8 * i, monkeypatch)
        first.call()
        order(first.library, len(first.functions), i, STREAM + 8 * i)
    assert len(first.library.events) == 4 * engines.STREAMS  # the last stream has others' events
    assert len(spare) == 4 * (engines.STREAMS - 1)
    del first.call, engine
    gc.collect()
    assert len(spare) == len(set(spare)) == len(first.library.events)


def test_after_a_stream_that_could_not_be_had_no_event_is_shared(monkeypatch):
    spare = []
    monkeypatch.setattr(engines, "spare_events", lambda device: spare)
    call = made(monkeypatch)
    engine = call.call._replay._engine
    engine._process = os.getpid()
    for i in range(engines.STREAMS):
        on(STREAM + 8 * i, monkeypatch)
        call.call()

    def none_left(device, stream, lane):
        raise RuntimeError("no stream")

    with monkeypatch.context() as failing:
        failing.setattr(engines, "beside", none_left)
        on(STREAM + 8 * 99, monkeypatch)
        with pytest.raises(RuntimeError, match="no stream"):
            call.call()
    on(STREAM + 8 * (engines.STREAMS - 1), monkeypatch)  # the one that was used last
    call.call()
    assert engine._aimed.events and not set(engine._aimed.events) & set(spare)
