"""What a mask shows of a block: proved against every element of it."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from attncc.codegen.intervals import Interval, Shows, classify
from attncc.dsl.interp import Named, evaluate
from attncc.dsl.ir import Fn, Index, Input, Kind, Lifetime, Lit, Map
from tests.codegen.test_masks import KEYS, S, T, affine, env

ROW = Input("row", ("T",), Lifetime.ACTIVATION)
KEY = Input("key", ("S",), Lifetime.CACHE)
NUMBERS = st.sampled_from([-1.0, 0.0, 1.0, 2.0, math.inf, -math.inf, math.nan])


@st.composite
def predicates(draw, depth=3):
    """Comparisons of positions, of values a row or a key has, and logic over them."""
    if depth == 0 or draw(st.booleans()):
        fn = draw(st.sampled_from([Fn.LT, Fn.LE, Fn.GT, Fn.GE, Fn.EQ, Fn.NE]))
        if draw(st.booleans()):
            number = Lit(draw(st.sampled_from([-1.0, 1.0])))
            args = (
                draw(st.sampled_from([KEY, Map(Fn.NEG, (KEY,))])),
                draw(st.sampled_from([ROW, number])),
            )
            return Map(fn, args if draw(st.booleans()) else args[::-1])
        left = draw(affine())
        if draw(st.integers(0, 3)) == 0:
            left = Map(Fn.MOD, (left, Lit(draw(st.integers(1, 4)))))
        if draw(st.integers(0, 3)) == 0:
            left = Map(draw(st.sampled_from([Fn.MIN, Fn.MAX, Fn.MUL])), (left, draw(affine())))
        return Map(fn, (left, draw(affine())))
    fn = draw(st.sampled_from([Fn.AND, Fn.OR, Fn.NOT]))
    args = tuple(draw(predicates(depth=depth - 1)) for _ in range(1 if fn is Fn.NOT else 2))
    return Map(fn, args)


def bounds_of(values):
    """The least and largest of a block, unbounded where one is NaN."""
    if bool(values.isnan().any()):
        return Interval(-math.inf, math.inf)
    return Interval(float(values.min()), float(values.max()))


@given(predicates(), st.data())
def test_none_and_all_are_certain(mask, data):
    tokens = data.draw(st.integers(1, KEYS))
    where = env(tokens)
    for name, axis, count in (("row", "T", tokens), ("key", "S", KEYS)):
        values = data.draw(st.lists(NUMBERS, min_size=count, max_size=count))
        where.inputs[name] = Named(torch.tensor(values, dtype=torch.float64), (axis,))
    shown = evaluate(mask, where).aligned(("T", "S")).expand(tokens, KEYS)
    first = data.draw(st.integers(0, tokens - 1))
    last = data.draw(st.integers(first, tokens - 1))
    start = data.draw(st.integers(0, KEYS - 1))
    end = data.draw(st.integers(start, KEYS - 1))

    def leaf(node):
        match node:
            case Index(axis="T"):
                return Interval(first + KEYS - tokens, last + KEYS - tokens)
            case Index(axis="S"):
                return Interval(start, end)
            case Input(name="row"):
                return bounds_of(where.inputs["row"].data[first : last + 1])
            case Input(name="key"):
                return bounds_of(where.inputs["key"].data[start : end + 1])
            case Input(name="width", kind=Kind.INT):
                width = int(where.inputs["width"].data)
                return Interval(width, width)
        return None

    block = shown[first : last + 1, start : end + 1]
    found = classify(mask, leaf)
    assert found is not Shows.NONE or not block.any()
    assert found is not Shows.ALL or block.all()


def test_documents_are_told_apart():
    same = Map(Fn.AND, (Map(Fn.LE, (S, T)), Map(Fn.EQ, (ROW, KEY))))

    def seen(keys, row, key):
        spans = {"T": Interval(64, 95), "S": Interval(*keys)}
        ids = {"row": Interval(*row), "key": Interval(*key)}
        return classify(
            same, lambda n: spans.get(getattr(n, "axis", "")) or ids.get(getattr(n, "name", ""))
        )

    assert seen((0, 31), (3, 3), (3, 3)) is Shows.ALL
    assert seen((0, 31), (3, 3), (2, 3)) is Shows.SOME
    assert seen((0, 31), (3, 4), (0, 2)) is Shows.NONE
    assert seen((64, 95), (3, 3), (3, 3)) is Shows.SOME
    assert seen((96, 127), (3, 3), (3, 3)) is Shows.NONE
