"""The latent group measures what it says: our calls and SDPA's give its oracle's answer."""

import pytest
import torch

from benchmarks.answers import run_and_judge
from benchmarks.groups import mla_decode
from benchmarks.peers import latent

CPU = torch.device("cpu")


@pytest.mark.parametrize("projected", [False, True])
def test_our_call_gives_the_oracles_answer(projected: bool) -> None:
    make = mla_decode.case_projected if projected else mla_decode.case
    case = make(2, 40, H=20, R=16, P=8)
    x = case.build(CPU)
    work = case.ours(x, "torch")
    pieces = list(case.parts(x))
    assert sum(p.oracle.numel() for p in pieces) == work.buffers["o"].numel()
    assert run_and_judge(work, pieces).right
    q = "q_nope" if projected else "q"
    assert not run_and_judge(case.ours({**x, q: -x[q]}, "torch"), pieces).right


def test_the_concatenated_form_of_sdpa_is_the_same() -> None:
    case = mla_decode.case(2, 40, H=20, R=16, P=8)
    x = case.build(CPU)
    assert run_and_judge(latent.sdpa(x), list(case.parts(x))).right
