"""The short convolution's group: our answer and torch's are the oracle's."""

import pytest
import torch

from benchmarks.answers import run_and_judge
from benchmarks.case import Case
from benchmarks.groups import short_conv
from benchmarks.peers import convolution

CPU = torch.device("cpu")
CASES = {"prefill": short_conv.case(2, 9, 24, 4), "decode": short_conv.step(3, 24, 3)}


@pytest.mark.parametrize("name", CASES)
def test_our_call_gives_the_oracles_answer(name: str) -> None:
    case: Case = CASES[name]
    x = case.build(CPU)
    assert run_and_judge(case.ours(x, "torch"), list(case.parts(x))).right
    wrong = {**x, "w": x["w"] * 1.1}
    assert not run_and_judge(case.ours(wrong, "torch"), list(case.parts(x))).right


def test_torchs_convolution_and_shifted_sums_are_the_same() -> None:
    case = CASES["prefill"]
    x = case.build(CPU)
    for o in (convolution.plain(x).fn()["o"], convolution.shifted(x["x"], x["w"])):
        torch.testing.assert_close(
            o.float(), short_conv._values(x, slice(None), torch.float32), atol=0.03, rtol=0.03
        )
