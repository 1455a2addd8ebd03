"""When a state pass runs beside the kernel that it waits for, and on which stream."""

from types import SimpleNamespace

import pytest
import torch

import attncc as ac
from attncc.codegen.affine_plans import Part
from attncc.codegen.plan import Dialect
from attncc.dsl.errors import ToolchainError
from attncc.runtime import lanes, selfcheck, together, verify
from attncc.runtime.samples import Sample, sample_call
from attncc.runtime.sources import call_sources

PLANS = SimpleNamespace(together=object())


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """A device of 100 multiprocessors that no process shares."""
    size = SimpleNamespace(multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: size)
    monkeypatch.setattr(together, "cuda", lambda: SimpleNamespace(attribute=lambda *_: 0))
    together._room.cache_clear()
    together._shared.cache_clear()
    yield
    together._room.cache_clear()
    together._shared.cache_clear()


def call(tokens=together.LEAST_TOKENS, device="cuda:0"):
    return SimpleNamespace(device=torch.device(device), sizes={"T": tokens})


def test_programs_that_wait_leave_a_part_of_the_device():
    assert together.fits(call(), PLANS, 60)
    assert not together.fits(call(), PLANS, 61)


def test_short_calls_and_kernels_that_only_follow_each_other_stay_on_one_stream():
    assert not together.fits(call(together.LEAST_TOKENS - 1), PLANS, 1)
    assert not together.fits(call(), SimpleNamespace(together=None), 1)
    assert not together.fits(call(device="cpu"), PLANS, 1)


def test_kernels_that_small_calls_do_not_take_have_a_trial_of_their_own():
    sizes = {"B": 1, "T": 80, "Hk": 16, "G": 2, "K": 128, "V": 128}
    sample = Sample(sizes, "prefill", "bf16", {}, frozenset())
    made = sample_call(ac.ops.gated_delta_rule.declaration, sample)
    sources = call_sources(made, "prefill", "sm_90", dialect=Dialect.GLUON)
    trials = list(verify._trials(sources, torch.device("cuda")))
    whole, (waiting, _), (lead, _) = trials
    assert whole == (None, None) and waiting.awaited and lead.part is Part.LEAD
    assert [parts for _, parts in trials] == [None, None, selfcheck.CUT]
    assert not together.fits(call(80), PLANS, 1)
    with selfcheck.trying(waiting):
        assert together.fits(call(80), PLANS, 1)
    assert list(verify._trials(sources, torch.device("cpu"))) == [(None, None)]


def test_what_was_not_loaded_is_not_recorded_as_right(monkeypatch):
    sizes = {"B": 8, "T": 1, "Hk": 2, "G": 2, "K": 128, "V": 128}
    made = sample_call(ac.ops.gated_delta_rule.declaration, Sample(sizes, "decode"))
    one, several = call_sources(made, "decode", "sm_90")
    held = {one: {(1, None): object()}, several: {(0, None): object()}}
    recorded = []
    monkeypatch.setattr(verify, "load", lambda s: SimpleNamespace(launchers=held[s]))
    monkeypatch.setattr(verify, "artifact", lambda s, target: s)
    monkeypatch.setattr(verify, "target_for", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(selfcheck, "settle", lambda entries, gpu, why: recorded.extend(entries))
    verify._record([one, several], torch.device("cuda:1"), [])
    assert recorded == [(one, one.plan)]


def test_a_device_that_processes_share_at_once_is_left_alone(monkeypatch):
    monkeypatch.setattr(together, "cuda", lambda: SimpleNamespace(attribute=lambda *_: 1))
    assert not together.fits(call(), PLANS, 1)


def test_what_a_driver_does_not_know_counts_as_shared(monkeypatch):
    def unknown(*_):
        raise ToolchainError("cuDeviceGetAttribute: invalid value")

    monkeypatch.setattr(together, "cuda", lambda: SimpleNamespace(attribute=unknown))
    assert not together.fits(call(), PLANS, 1)


def test_all_callers_wait_on_one_stream(monkeypatch):
    monkeypatch.setattr(lanes, "_BESIDE", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: object())
    assert lanes.beside(0, 8, lanes.TOGETHER) is lanes.beside(0, 16, lanes.TOGETHER)
    assert lanes.beside(0, 8, lanes.TOGETHER) is not lanes.beside(1, 8, lanes.TOGETHER)
    assert lanes.beside(0, 8, lanes.AHEAD) is not lanes.beside(0, 16, lanes.AHEAD)
