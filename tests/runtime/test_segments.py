"""How many segments a sequence is cut into."""

from types import SimpleNamespace

import pytest

from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.runtime.lead import PASSED, SUMMED, ahead_of
from attncc.runtime.segments import segments_of


def plans(solve, blocks=2, tokens=64):
    local = SimpleNamespace(
        solve=solve, tokens=tokens, blocked="V", axis=lambda name: SimpleNamespace(blocks=blocks)
    )
    return SimpleNamespace(split=SimpleNamespace(local=local))


@pytest.mark.parametrize(("solve", "systems", "tokens", "expected"), [
    (True, 16, 32768, 4), (True, 8, 32768, 8), (True, 32, 32768, 1),  # 2 are too few
    (False, 16, 32768, 4), (False, 32, 32768, 2), (False, 48, 32768, 1),  # one wave
    (False, 16, 1024, 2), (True, 16, 1024, 1),  # at least 8 chunks a segment
])  # fmt: skip
def test_segments_fill_the_device_once_where_they_pay(solve, systems, tokens, expected):
    assert segments_of(plans(solve), 1, systems, tokens) == expected
    assert segments_of(plans(solve, blocks=4), 1, systems // 2, tokens) == expected


def carrying(blocks, consumers, solve=True):
    plan = object.__new__(WarpStatePlan)
    for name, value in {
        "column_blocks": blocks, "consumers": consumers, "solve": solve, "tokens": 64, "op": "delta"
    }.items():  # fmt: skip
        object.__setattr__(plan, name, value)
    return plan


@pytest.mark.parametrize(("systems", "segments", "consumers", "tokens", "waves"), [
    (8, 8, 1, 32768, 1), (16, 4, 1, 32768, 1), (8, 16, 2, 32768, 2), (32, 2, 1, 8192, 1),
])  # fmt: skip
def test_what_is_ahead_takes_as_long_as_the_summaries(systems, segments, consumers, tokens, waves):
    split = SimpleNamespace(lead=carrying(2, consumers), summary=carrying(4, 2))
    found = ahead_of(SimpleNamespace(split=split), 1, systems, segments, tokens)
    chunks, ahead = tokens // 64, tokens // 64 * found / 1024
    summing = waves * SUMMED[2] * (chunks - ahead) / segments
    assert found and PASSED[consumers] * ahead == pytest.approx(summing, rel=0.02)


@pytest.mark.parametrize(("systems", "segments", "tokens"), [
    (8, 24, 32768),  # three times what the device has room for
    (8, 8, 8192), (8, 1, 32768),  # too little is ahead
])  # fmt: skip
def test_nothing_is_ahead_where_it_does_not_pay(systems, segments, tokens):
    split = SimpleNamespace(lead=carrying(2, 1), summary=carrying(4, 2))
    assert ahead_of(SimpleNamespace(split=split), 1, systems, segments, tokens) == 0


def test_nothing_is_ahead_where_no_kernel_carries_it_or_nothing_is_solved():
    summary = carrying(4, 2)
    for lead in (None, carrying(2, 1, solve=False)):
        plans = SimpleNamespace(split=SimpleNamespace(lead=lead, summary=summary))
        assert ahead_of(plans, 1, 8, 8, 32768) == 0
