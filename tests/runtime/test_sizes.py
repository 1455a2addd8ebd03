"""Axis sizes from the extents of arguments, in whatever order they come."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncc.dsl.axes import Pattern, parse
from attncc.dsl.errors import SizeError, UnknownSizeError
from attncc.runtime.checks import Sizes
from tests.strategies import patterns


def solved(extents: list[tuple[str, int]], **known: int) -> dict[str, int]:
    """Sizes from one memory axis an argument."""
    sizes = Sizes("op", known)
    for i, (pattern, extent) in enumerate(extents):
        sizes.add(f"x{i}", (extent,), parse(pattern))
    sizes.settle()
    return sizes.found


@given(patterns(), st.data())
def test_sizes_come_back_if_each_group_has_one_unknown(
    pattern: Pattern, data: st.DataObject
) -> None:
    want = {a: data.draw(st.integers(1, 5)) for a in pattern.axes}
    known = {a: want[a] for dim in pattern.dims for a in dim[1:]}
    extents = [(dim, math.prod(want[a] for a in dim)) for dim in pattern.dims]
    sizes = Sizes("op", known)
    for i, (dim, extent) in enumerate(data.draw(st.permutations(extents))):
        sizes.add(f"x{i}", (extent,), Pattern((dim,)))
    sizes.settle()
    assert sizes.found == want


def test_a_group_is_solved_by_another_argument_in_any_order() -> None:
    for extents in ([("(H G)", 12), ("H", 3)], [("H", 3), ("(H G)", 12)]):
        assert solved(extents) == {"H": 3, "G": 4}


def test_two_unknowns_of_one_group_stay_open() -> None:
    sizes = Sizes("op", {})
    sizes.add("x", (12,), parse("(H G)"))
    sizes.settle()
    with pytest.raises(UnknownSizeError):
        sizes.need(("H",))


def test_an_axis_beside_an_empty_one_is_not_invented() -> None:
    assert solved([("(T N)", 0)], T=0) == {"T": 0}
    assert solved([("(T N)", 0), ("N", 3)], T=0) == {"T": 0, "N": 3}


def test_a_group_that_is_not_divisible_is_an_error() -> None:
    with pytest.raises(SizeError, match="a multiple of 5"):
        solved([("(H G)", 12)], H=5)


def test_groups_over_one_axis_are_solved_from_their_product_or_their_ratio() -> None:
    either = [("(H P)", 6), ("(H R)", 2)]
    assert solved(either) == {"H": 2, "P": 3, "R": 1}
    assert solved(either[::-1]) == {"H": 2, "P": 3, "R": 1}
    assert solved([("(H P)", 4), ("(H R)", 4)]) == {"H": 4, "P": 1, "R": 1}
    assert solved([*either, ("(H P R)", 6)]) == {"H": 2, "P": 3, "R": 1}
    assert solved([("(H P R)", 12), ("(H P)", 6), ("(H R)", 4)]) == {"H": 2, "P": 3, "R": 2}
    assert solved(either, H=1) == {"H": 1, "P": 6, "R": 2}
    assert solved([("(H P)", 6)]) == {}  # one group alone says nothing


def test_groups_that_do_not_divide_each_other_are_refused() -> None:
    with pytest.raises(SizeError) as caught:
        solved([("(H P)", 6), ("(H R)", 4)])
    error = caught.value
    assert (error.argument, error.axis, error.expected) == ("x0", "H", "a multiple of 4 as in x1")
    assert solved([("(H P)", 6), ("(H R)", 4)], H=2) == {"H": 2, "P": 3, "R": 2}
