"""What has no chunk form says so: the reason and the line, as ``op.explain()`` prints them."""

from collections.abc import Callable
from typing import Any

import pytest

import attncc as ac
from tests.runtime import state_ops as ops

Body = Callable[..., Any]


def scan(body: Body) -> Any:
    """An op of one state; ``body`` gives the new state and the output."""

    def one_state(
        q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
        g=ac.Activation("B T H"), u=ac.Activation("B T H V"), s=ac.State("B H K V"),
    ):  # fmt: skip
        return body(s, q, k, v, g, u)

    return ac.op(out="B T H V", scan="T")(one_state)


def element_wise_function(s, q, k, v, g, u):
    s = ac.tanh(s) + k * v
    return s, ac.dot(s, q, "K")


def product_of_reads(s, q, k, v, g, u):
    s = s + k * ac.dot(s, k, "K") * ac.dot(s, q, "K")
    return s, ac.dot(s, q, "K")


def function_of_a_read(s, q, k, v, g, u):
    s = s + k * ac.tanh(ac.dot(s, k, "K"))
    return s, ac.dot(s, q, "K")


def division(s, q, k, v, g, u):
    s = s + k * (v / ac.dot(s, k, "K"))
    return s, ac.dot(s, q, "K")


def condition_on_the_state(s, q, k, v, g, u):
    s = ac.where(ac.dot(s, k, "K") > 0.0, s, 0.0) + k * v
    return s, ac.dot(s, q, "K")


def choice(s, q, k, v, g, u):
    s = ac.where(g > 0.0, s + k * (v - ac.dot(s, k, "K")), s)
    return s, ac.dot(s, q, "K")


def branches(s, q, k, v, g, u):
    s = ac.exp(g) * s + k * ac.dot(ac.tanh(g) * s + q * v, k, "K")
    return s, ac.dot(s, q, "K")


def beta_per_column(s, q, k, v, g, u):
    s = s + k * (u * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K")


def decay_per_column_with_corrections(s, q, k, v, g, u):
    s = ac.exp(u) * s + k * (v - ac.dot(s, k, "K"))
    return s, ac.dot(s, q, "K")


def decay_per_element(s, q, k, v, g, u):
    s = ac.exp(q * u) * s + k * v
    return s, ac.dot(s, q, "K")


def two_axes(s, q, k, v, g, u):
    s = s + k * ac.dot(s, k, "K") + ac.dot(s, u, "V") * v
    return s, ac.dot(s, q, "K")


def read_along_the_other_axis(s, q, k, v, g, u):
    s = s + k * (v - ac.dot(s, k, "K"))
    return s, ac.dot(s, v, "V")


LINE_OF_STATE, LINE_OF_OUTPUT = 1, 2
REFUSED = [
    (element_wise_function, "tanh of a value of the state is not affine", LINE_OF_STATE),
    (product_of_reads, "a product of two values of the state is not affine", LINE_OF_STATE),
    (function_of_a_read, "tanh of a value of the state is not affine", LINE_OF_STATE),
    (division, "a division by a value of the state", LINE_OF_STATE),
    (condition_on_the_state, "a choice that depends on the state is not affine", LINE_OF_STATE),
    (choice, "a choice between two values of the state", LINE_OF_STATE),
    (branches, "the state goes two ways within one token", LINE_OF_STATE),
    (beta_per_column, "no matrix products in chunks, sequential scan", LINE_OF_STATE),
    (
        decay_per_column_with_corrections,
        "no matrix products in chunks, sequential scan", LINE_OF_STATE,
    ),
    (decay_per_element, "no matrix products in chunks, element-wise scan", LINE_OF_STATE),
    (two_axes, "a value of the state is summed over V, corrections contract K", LINE_OF_STATE),
    (
        read_along_the_other_axis,
        "a value of the state is summed over V, corrections contract K", LINE_OF_OUTPUT,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "reason", "line"), REFUSED, ids=lambda x: getattr(x, "__name__", "")
)
def test_one_state(body: Body, reason: str, line: int) -> None:
    other = body is read_along_the_other_axis
    op = ac.op(out="B T H K", scan="T")(_keys(body)) if other else scan(body)
    refused = [x for x in op.explain().splitlines() if x.startswith("refused: ")]
    place = f"(test_refusals.py:{body.__code__.co_firstlineno + line})"
    assert len(refused) == 1
    assert reason in refused[0]
    assert refused[0].endswith(place)


def _keys(body: Body) -> Body:
    def one_state(
        q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
        s=ac.State("B H K V"),
    ):  # fmt: skip
        return body(s, q, k, v, None, None)

    return one_state


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (ops.momentum, "m and s take each other: their (A, B) summary is a block of both"),
        (ops.fed_back, "win and s take each other"),
        (ops.hgrn, "the body never contracts its state: element-wise scan"),
        (ops.selective, "no matrix products in chunks, element-wise scan"),
        (ops.two_memories, "carry one affine state, the body carries fast slow: stepped"),
        (ops.convolved_delta, "carry one affine state, the body carries win s: stepped"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_several_or_other_objects(op: Any, reason: str) -> None:
    assert f"{reason}" in op.explain()
    assert "state_ops.py:" in op.explain().split("refused: ")[1]


def test_what_runs_is_told_with_the_forms() -> None:
    text = ops.convolved_delta.explain(sizes={"K": 64, "V": 64, "W": 4})
    assert "fold: window win along W" in text
    assert "fold: affine state s" in text
    assert "convolved_delta__step__" in text
    text = ops.short_convolution.explain(sizes={"D": 64, "W": 4})
    assert "refused" not in text
    assert "short_convolution__window__" in text
    text = ops.hgrn.explain()
    assert "fold: element-wise state s, carry (a, b) with s' = a s + b" in text
    assert "  s = sigmoid(f) * s + ((1 - sigmoid(f)) * x)" in text
