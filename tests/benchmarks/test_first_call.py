"""Times of new processes, and the rows about what calls cost the host."""

from dataclasses import replace

import pytest
import torch

from benchmarks import first_call
from benchmarks.case import Inputs, Work
from benchmarks.groups import decode, overhead
from benchmarks.runner import run_case
from benchmarks.timing import GpuClock
from tests.benchmarks.test_runner import FakeClock, bench

INPUTS = decode.case(1, 64, 4, 2, 16).build(torch.device("cpu"))


@pytest.fixture(autouse=True)
def little_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes import is compiled as they need it, not all of torch beforehand."""
    monkeypatch.setattr(first_call, "INSTALLED", ())


@pytest.mark.parametrize(("who", "field"), [("attncc", "import_ms"), ("torch", "first_ms")])
def test_a_new_process_gives_a_time_and_the_right_answer(who: str, field: str) -> None:
    made = first_call.work(INPUTS, who, field, "reference", warm=False)
    case = replace(decode.case(1, 64, 4, 2, 16), ours=lambda i, b: made, peers={"flex": flex})
    (row,) = run_case(case, bench(FakeClock()))
    assert row["error"] <= row["budget"] and row["backend"] == "triton", row
    assert 0 < GpuClock().one(made, "process") < 1e5


def flex(inputs: Inputs) -> Work:
    raise ModuleNotFoundError("not here")


@pytest.mark.parametrize(("warm", "took"), [(False, [5.0, 1.0, 3.0]), (True, [9.0, 2.0, 7.0, 4.0])])
def test_times_of_answers_count_and_the_one_that_fills_the_store_does_not(
    monkeypatch: pytest.MonkeyPatch, warm: bool, took: list[float]
) -> None:
    left = iter(took)
    monkeypatch.setattr(
        first_call, "_process", lambda *args: {"first_ms": next(left), "o": INPUTS["q"]}
    )
    made = first_call.work(INPUTS, "attncc", "first_ms", warm=warm, times=3)
    assert torch.equal(made.fn()["o"], INPUTS["q"])
    assert GpuClock().pair(made, made, "process").ours == (4.0 if warm else 3.0)
    assert next(left, None) is None


def test_a_process_that_fails_or_hangs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = first_call.work(INPUTS, "attncc", "first_ms", "nonsense", warm=True)
    with pytest.raises(first_call.ProcessError, match=r"exit 1: .*no such backend"):
        made.fn()
    monkeypatch.setattr(first_call, "LIMIT_S", 0.1)
    with pytest.raises(first_call.ProcessError, match=r"more than 0\.1 s"):
        made.fn()


def test_the_rows_of_the_overhead_group() -> None:
    cases = {c.name: c for c in overhead.cases()}
    prepared = {"decode_prepared", "gdn_step_prepared"}
    processes = {"cold_first_call", "warm_first_call", "import"}
    assert prepared | processes <= cases.keys()
    assert {cases[n].timing for n in prepared} == {"host"}
    assert {cases[n].timing for n in processes} == {"process"}
    assert [*cases["cold_first_call"].peers] == ["torch", "flex"]
    assert all([*cases[n].peers] == ["kernel[grid]"] for n in prepared)
