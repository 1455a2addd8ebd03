import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncc.dsl.axes import Pattern, history_dim, parse, union
from attncc.dsl.errors import PatternError
from tests.strategies import AXES, patterns


@given(patterns())
def test_what_is_printed_reads_back(pattern: Pattern) -> None:
    assert parse(str(pattern)) == pattern


@given(patterns(), st.text(" \t\n", max_size=3))
def test_blanks_between_tokens_mean_nothing(pattern: Pattern, blank: str) -> None:
    text = str(pattern)
    spread = blank + text.replace(" ", " " + blank).replace("(", f"({blank}") + blank
    assert parse(spread) == pattern


def test_a_group_of_one_is_a_plain_axis() -> None:
    assert parse("B (H) D") == parse("B H D")
    assert str(parse("B (H) D")) == "B H D"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("B (T", "'(' without ')'"),
        ("B T)", "')' without '('"),
        ("B (T (N))", "a group inside a group"),
        ("B ()", "an empty group"),
        ("B T B", "axis B stands twice"),
        ("B (T B)", "axis B stands twice"),
        ("B 2T", "unexpected '2'"),
        ("B, T", "unexpected ','"),
        ("B _x", "unexpected '_'"),
        ("B: T", "unexpected ':'"),
    ],
)
def test_an_unreadable_pattern_says_why(text: str, why: str) -> None:
    with pytest.raises(PatternError) as caught:
        parse(text)
    assert caught.value.why == why
    assert repr(text) in str(caught.value)


@given(patterns(), st.sampled_from(AXES))
def test_without_takes_out_one_axis_and_keeps_the_order(pattern: Pattern, axis: str) -> None:
    left = pattern.without(axis)
    assert left.axes == tuple(a for a in pattern.axes if a != axis)
    assert all(left.dims)


@given(patterns())
def test_dim_of_finds_the_memory_axis(pattern: Pattern) -> None:
    for axis in pattern.axes:
        assert axis in pattern.dims[pattern.dim_of(axis)]
    with pytest.raises(KeyError):
        pattern.dim_of("Z")


def test_union_keeps_first_appearance() -> None:
    assert union("BTH", "BHS", "D") == ("B", "T", "H", "S", "D")


@pytest.mark.parametrize(
    ("text", "dim"),
    [("B S H D", ("S",)), ("B (Sb C) H", ("Sb", "C")), ("B (P S) D", ("P", "S")), ("B L D", None)],
)
def test_the_growing_axis_of_a_cache(text: str, dim: tuple[str, ...] | None) -> None:
    assert history_dim(parse(text)) == dim
