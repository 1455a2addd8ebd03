"""Numbers of repeated launches, and a replay's state after an error."""

import pytest
import torch

from attncc.dsl.errors import ArgumentError, ToolchainError
from tests.interpreter.test_softmax import windowed
from tests.runtime.driving import on_a_device, prepared


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
        made.call(scale=1e300, width=2)  # the width is written, the scale cannot be
    made.call()
    made.call(scale=0.0)
    made.call(scale=-0.0)
    before, after, zero, negative = launched(made)
    results = len([p for p, q in zip(before, after, strict=True) if p != q])
    assert 4 in after and 2 not in after and results <= 1
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
