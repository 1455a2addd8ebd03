import pytest
import torch

from attncc.runtime.tolerance import max_error
from benchmarks.answers import judge, run_and_judge
from benchmarks.case import Part, Work

BF16 = torch.bfloat16
INF, NAN = float("inf"), float("nan")


def part(oracle: torch.Tensor, name: str = "o") -> Part:
    return Part(name, (slice(None),), oracle.double(), oracle.to(BF16), BF16)


def test_the_budget_is_the_contracts() -> None:
    oracle = torch.tensor([1.0, -3.001])
    answer = judge({"o": oracle.to(BF16)}, [part(oracle)])
    eager = float((oracle.to(BF16).double() - oracle.double()).abs().max())
    assert answer.error == eager
    assert answer.budget == 2 * (eager + torch.finfo(BF16).eps * float(oracle.double().abs().max()))
    assert answer.right


def test_a_wrong_answer_is_refused() -> None:
    oracle = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    wrong = oracle.clone()
    wrong[3, 4] += 0.5
    assert judge({"o": oracle}, [part(oracle)]).right
    assert not judge({"o": wrong}, [part(oracle)]).right


def test_the_worst_output_is_reported() -> None:
    x = torch.ones(3)
    answer = judge({"o": x, "s": x + 1}, [part(x, "o"), part(x, "s")])
    assert (answer.output, answer.right) == ("s", False)
    assert judge({"o": x, "s": x + 1}, [part(x, "o"), part(x, "s")], frozenset({"o"})).right


@pytest.mark.parametrize(
    ("x", "oracle", "same"),
    [
        ([NAN, 1.0], [1.0, 1.0], False),
        ([INF, 1.0], [1.0, 1.0], False),
        ([1.0, 1.0], [NAN, 1.0], False),
        ([-INF, 1.0], [INF, 1.0], False),
        ([NAN, INF, -INF], [NAN, INF, -INF], True),
    ],
)
def test_nan_and_inf_must_stand_where_the_oracles_do(
    x: list[float], oracle: list[float], same: bool
) -> None:
    assert max_error(torch.tensor(x), torch.tensor(oracle)) == (0.0 if same else INF)


def test_a_missing_output_and_another_shape_are_wrong() -> None:
    x = torch.zeros(2)
    assert not judge({}, [part(x)]).right
    assert not judge({"o": torch.zeros(1)}, [part(x)]).right


def test_nothing_compared_is_no_answer() -> None:
    with pytest.raises(ValueError, match="no output"):
        judge({"o": torch.zeros(1)}, [])


def test_an_output_that_is_not_written_is_wrong() -> None:
    x = torch.ones(3)
    stale = x.clone()
    assert not run_and_judge(Work(lambda: {"o": stale}, {"o": stale}), [part(x)]).right
