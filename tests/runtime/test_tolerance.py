"""The tolerance itself: what it accepts and what it does not."""

import pytest
import torch

from tests.tolerance import assert_close, max_error

INF = torch.inf


def test_the_bound_is_twice_the_eager_error_and_the_rounding() -> None:
    oracle = torch.tensor([1.0, -4.0]).double()
    eager = oracle + torch.tensor([0.0, 0.25])
    eps = torch.finfo(torch.bfloat16).eps
    bound = 2 * (0.25 + 4 * eps)
    assert_close(oracle + bound, oracle, eager, torch.bfloat16)
    with pytest.raises(AssertionError, match="error"):
        assert_close(oracle - 1.01 * bound, oracle, eager, torch.bfloat16)


@pytest.mark.parametrize("bad", [INF, -INF, torch.nan, 0.0])
@pytest.mark.parametrize("want", [INF, -INF, torch.nan, 0.0])
def test_infinite_and_nan_places_must_match(bad: float, want: float) -> None:
    got, oracle = torch.tensor([bad, 1.0]), torch.tensor([want, 1.0]).double()
    if bad == want or (bad != bad and want != want):
        assert max_error(got, oracle) == 0
    else:
        with pytest.raises(AssertionError, match="NaN or inf"):
            max_error(got, oracle)


def test_a_bad_eager_reference_widens_nothing() -> None:
    oracle = torch.zeros(2).double()
    with pytest.raises(AssertionError, match="eager"):
        assert_close(oracle, oracle, torch.tensor([INF, 0]), torch.float32)


def test_shapes_must_match_and_may_be_empty() -> None:
    assert_close(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3), torch.float16)
    with pytest.raises(AssertionError, match="shape"):
        max_error(torch.zeros(1), torch.zeros(2).double())
