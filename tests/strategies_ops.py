"""Strategies of hypothesis over declarations; ``tests.drawn`` makes the choices."""

from random import Random

from hypothesis import strategies as st

from tests.drawn.affine import draw_affine
from tests.drawn.calls import Drawing, draw_call
from tests.drawn.score import draw_score
from tests.drawn.source import Drawn


def randoms() -> st.SearchStrategy[Random]:
    """A source of choices that hypothesis can shrink."""
    return st.randoms(use_true_random=False)


@st.composite
def scans(draw: st.DrawFn) -> Drawn:
    """A declaration with a state; most of them are affine."""
    return draw_affine(draw(randoms()))


@st.composite
def folds(draw: st.DrawFn, *, causal: bool = False) -> Drawn:
    """A declaration of softmax folds."""
    return draw_score(draw(randoms()), causal=causal)


def declarations() -> st.SearchStrategy[Drawn]:
    """A declaration of either form."""
    return st.one_of(scans(), folds())


@st.composite
def calls(draw: st.DrawFn, of: st.SearchStrategy[Drawn]) -> Drawing:
    """A declaration with one call's arguments."""
    drawn = draw(of)
    return draw_call(draw(randoms()), drawn)
