"""Masks: clauses mean what the mask means, and loop bounds lose no visible key."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from attncc.codegen.emit.bounds import bounds
from attncc.codegen.passes.find_masks import find_mask
from attncc.dsl.interp import Env, Named, evaluate
from attncc.dsl.ir import Fn, Index, Input, Kind, Lifetime, Lit, Map

T, S = Index("T"), Index("S")
LABEL = Input("label", ("S",), Lifetime.CACHE)
WIDTH = Input("width", (), Lifetime.PARAMETER, Kind.INT)
KEYS, WIDE = 19, 5


@st.composite
def affine(draw):
    """A whole-number expression in the two positions."""
    value = draw(st.sampled_from([T, S, WIDTH, Lit(draw(st.integers(-9, 9)))]))
    for _ in range(draw(st.integers(0, 3))):
        other = draw(st.sampled_from([T, S, WIDTH, Lit(draw(st.integers(-9, 9)))]))
        step = draw(st.sampled_from(["add", "sub", "neg", "mul"]))
        match step:
            case "add":
                value = Map(Fn.ADD, (value, other))
            case "sub":
                value = Map(Fn.SUB, (other, value))
            case "neg":
                value = Map(Fn.NEG, (value,))
            case _:
                value = Map(Fn.MUL, (Lit(draw(st.integers(-3, 3))), value))
    return value


@st.composite
def masks(draw, depth=3):
    """Any truth value over positions: comparisons, a label per key, logic."""
    if depth == 0 or draw(st.booleans()):
        if draw(st.integers(0, 5)) == 0:
            return Map(Fn.GT, (LABEL, Lit(0.0)))
        fn = draw(st.sampled_from([Fn.LT, Fn.LE, Fn.GT, Fn.GE, Fn.EQ, Fn.NE]))
        return Map(fn, (draw(affine()), draw(affine())))
    fn = draw(st.sampled_from([Fn.AND, Fn.OR, Fn.NOT]))
    args = tuple(draw(masks(depth=depth - 1)) for _ in range(1 if fn is Fn.NOT else 2))
    return Map(fn, args)


def env(tokens: int) -> Env:
    """Positions of the last ``tokens`` of a history of ``KEYS``, and the inputs of the masks."""
    label = torch.sin(torch.arange(KEYS, dtype=torch.float64) * 7)
    inputs = {"label": Named(label, ("S",)), "width": Named(torch.tensor(WIDE), ())}
    return Env({"T": tokens, "S": KEYS}, inputs, torch.float64, torch.device("cpu"), KEYS - tokens)


def grid(node, tokens):
    """A truth value as a table [T, S]."""
    value = evaluate(node, env(tokens)).aligned(("T", "S"))
    return value.expand(tokens, KEYS)


def clause_grid(clause, tokens):
    """Where every band and every predicate of a clause holds."""
    found = torch.ones(tokens, KEYS, dtype=torch.bool)
    for band in clause.bands:
        t = torch.arange(KEYS - tokens, KEYS)[:, None]
        s = torch.arange(KEYS)[None, :]
        found &= band.t * t + band.s * s + grid(band.offset, tokens) >= 0
    for node in clause.residual:
        found &= grid(node, tokens)
    return found


@given(masks(), st.integers(1, KEYS + 4))
def test_clauses_equal_the_mask_everywhere(mask, tokens):
    form = find_mask(mask)
    found = torch.zeros(tokens, KEYS, dtype=torch.bool)
    for clause in form.clauses:
        found |= clause_grid(clause, tokens)
    assert torch.equal(found, grid(mask, tokens))


def _offset(band):
    value = evaluate(band.offset, env(1))
    return None if value.axes else str(int(value.data))


def _number(text, first, last):
    """A printed bound as a number; Python divides downwards, a GPU towards zero."""
    names = {"tl": SimpleNamespace(minimum=min, maximum=max), "t_first": first, "t_last": last}
    return eval(text, names | {"S": KEYS})


class Truncating(int):
    """A whole number that divides as a GPU does."""

    def __floordiv__(self, other):
        return Truncating(abs(int(self)) // int(other) * (1 if self >= 0 else -1))

    def __mod__(self, other):
        return Truncating(int(self) - int(self // other) * int(other))

    def __add__(self, other):
        return Truncating(int(self) + int(other))

    def __sub__(self, other):
        return Truncating(int(self) - int(other))

    def __mul__(self, other):
        return Truncating(int(self) * int(other))

    def __neg__(self):
        return Truncating(-int(self))

    __radd__, __rmul__ = __add__, __mul__


@given(masks(), st.data())
def test_bounds_hold_every_visible_key_and_the_inside_is_all_visible(mask, data):
    tokens = data.draw(st.integers(1, KEYS + 4))
    first = data.draw(st.integers(0, tokens - 1))
    last = data.draw(st.integers(first, tokens - 1))
    found = bounds(find_mask(mask), _offset)
    rows = grid(mask, tokens)[first : last + 1]
    keys = torch.arange(KEYS)
    for kind in (int, Truncating):
        ends = kind(first + KEYS - tokens), kind(last + KEYS - tokens)
        lo, hi = (int(_number(text, *ends)) for text in (found.lo, found.hi))
        assert not rows[:, (keys < lo) | (keys >= hi)].any()
        if found.inner_lo:
            lo, hi = (int(_number(text, *ends)) for text in (found.inner_lo, found.inner_hi))
            assert rows[:, (keys >= lo) & (keys < hi)].all()


def test_causal_and_window_bound_the_loop_from_both_sides():
    causal = Map(Fn.LE, (S, T))
    window = Map(Fn.LT, (Map(Fn.SUB, (T, S)), WIDTH))
    found = bounds(find_mask(Map(Fn.AND, (causal, window))), _offset)
    assert [_number(t, 10, 12) for t in (found.lo, found.hi)] == [10 - WIDE + 1, 13]
    assert [_number(t, 10, 12) for t in (found.inner_lo, found.inner_hi)] == [12 - WIDE + 1, 11]
