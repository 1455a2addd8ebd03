"""How many segments a sequence is cut into."""

from types import SimpleNamespace

import pytest

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
