import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from benchmarks import cli, runner, timing
from benchmarks.case import Case, Inputs, Part, Work
from benchmarks.groups import decode, gdn_decode, gdn_prefill, pages, prefill, prefill_mods
from benchmarks.results import Results
from benchmarks.runner import Bench, DeviceLostError, bound, run_case
from benchmarks.timing import Times

CEILINGS = {"copy_gbs": 4000.0, "read_gbs": 5000.0, "bf16_tflops": 800.0}
TIMES = ["ours_ms", "backend", "peer", "peer_ms", "ratio"]
LIMITS = ["error", "budget", "bound", "share_of_ceiling"]
SCHEMA = ["work", *TIMES, *LIMITS, "versions", "commit"]


@dataclass
class FakeClock:
    calls: list[str] = field(default_factory=list)

    def one(self, work: Work, kind: str) -> float:
        self.calls.append("one")
        return 2.0

    def pair(self, ours: Work, peer: Work, kind: str) -> Times:
        self.calls.append("pair")
        return Times(2.0, 3.0, kind, (4.0, 5.0))


def build(device: torch.device) -> Inputs:
    return {"x": torch.arange(1.0, 5.0, device=device)}


def parts(inputs: Inputs) -> Iterator[Part]:
    x = inputs["x"]
    yield Part("o", (slice(None),), 2 * x.double(), 2 * x, x.dtype)


def twice(inputs: Inputs, backend: str = "") -> Work:
    out = torch.empty_like(inputs["x"])
    factor = 3 if backend == "wrong" else 2

    def fn() -> dict[str, torch.Tensor]:
        if backend == "broken":
            raise NotImplementedError("first line\nno kernel for this")
        return {"o": torch.mul(inputs["x"], factor, out=out)}

    return Work(fn, {"o": out})


def absent(inputs: Inputs) -> Work:
    raise ModuleNotFoundError("No module named 'peer'")


CASE = Case("toy", "double", build, twice, {"fla": twice}, parts, bytes=4_000_000, flops=8e6)


def bench(clock: FakeClock, *backends: str) -> Bench:
    return Bench(
        torch.device("cpu"), clock, CEILINGS, "abc", "r1", backends=backends or ("triton",)
    )


def test_a_row_has_the_schema_and_the_ratio() -> None:
    (row,) = run_case(CASE, bench(FakeClock()))
    assert list(row)[: len(SCHEMA) - 2] == SCHEMA[:-2] and set(SCHEMA) <= set(row)
    assert (row["work"], row["peer"], row["backend"]) == ("toy/double", "fla", "triton")
    assert (row["ours_ms"], row["peer_ms"], row["ratio"]) == (2.0, 3.0, 1.5)
    assert (row["ours_events_ms"], row["peer_events_ms"]) == (4.0, 5.0)
    assert (row["bound"], row["share_of_ceiling"]) == ("bytes", 0.0005)
    assert row["error"] <= row["budget"] and "reason" not in row


def test_a_wrong_answer_carries_no_time_and_nothing_is_measured() -> None:
    clock = FakeClock()
    (row,) = run_case(CASE, bench(clock, "wrong"))
    assert clock.calls == []
    assert (row["ours_ms"], row["peer_ms"], row["ratio"]) == (None, None, None)
    assert row["share_of_ceiling"] is None
    assert row["error"] > row["budget"] > 0
    assert "wrong answer" in row["reason"] and row["wrong"]


def test_a_call_that_fails_leaves_the_peer_and_the_reason() -> None:
    (row,) = run_case(CASE, bench(FakeClock(), "broken"))
    assert (row["ours_ms"], row["peer_ms"], row["ratio"]) == (None, 2.0, None)
    assert row["reason"] == "ours: NotImplementedError: no kernel for this"


def test_a_right_backend_is_taken_before_a_wrong_one() -> None:
    (row,) = run_case(CASE, bench(FakeClock(), "wrong", "broken", "triton"))
    assert (row["backend"], row["ratio"]) == ("triton", 1.5)


def test_a_peer_that_cannot_run_gets_a_row_with_its_reason() -> None:
    (row,) = run_case(replace(CASE, peers={"fla": absent}), bench(FakeClock()))
    assert (row["ours_ms"], row["peer_ms"], row["ratio"]) == (2.0, None, None)
    assert row["reason"] == "peer: ModuleNotFoundError: No module named 'peer'"


def test_a_peer_whose_first_call_takes_too_long_leaves_our_time() -> None:
    def endless(inputs: Inputs) -> Work:
        with suppress(Exception):  # as one that tries configurations does
            time.sleep(60)
        return twice(inputs)

    before = signal.getsignal(signal.SIGALRM)
    case = replace(CASE, peers={"fla": endless, "flex": twice})
    slow, right = run_case(case, replace(bench(FakeClock()), peer_limit=0.2))
    assert (slow["ours_ms"], slow["peer_ms"], slow["ratio"]) == (2.0, None, None)
    assert slow["reason"] == "peer: PeerLimitError: its first call took more than 0.2 s"
    assert right["ratio"] == 1.5 and "reason" not in right
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_peer_that_does_other_work_is_not_timed() -> None:
    other = replace(CASE, peers={"fla": lambda x: twice(x, "wrong")})
    (row,) = run_case(other, bench(FakeClock()))
    assert row["peer_ms"] is None and "ArithmeticError" in row["reason"]


def test_done_and_unwanted_peers_are_left_out() -> None:
    both = replace(CASE, peers={"fla": twice, "flex": twice})
    some = replace(bench(FakeClock()), done=frozenset({("toy/double", "fla")}))
    assert [r["peer"] for r in run_case(both, some)] == ["flex"]
    some = replace(bench(FakeClock()), peers=frozenset({"fla"}))
    assert [r["peer"] for r in run_case(both, some)] == ["fla"]


def test_after_the_deadline_rows_say_so() -> None:
    (row,) = run_case(CASE, replace(bench(FakeClock()), deadline=0.0))
    assert row["ours_ms"] is None and "time was up" in row["reason"]


def faulted() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ..")


def test_a_fault_of_a_kernel_is_said_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", faulted)
    with pytest.raises(DeviceLostError, match=r"^a kernel has faulted, .*: CUDA error: [^\n]*$"):
        runner.release(torch.device("cuda"))


def test_a_group_stops_at_a_fault_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = []

    def broken(device: torch.device) -> Inputs:
        lost.append(True)  # as a kernel that faults: what comes after fails, not what launched it
        return build(torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: faulted() if lost else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(timing, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setattr(timing, "GpuClock", lambda rep: FakeClock())
    cases = [
        replace(CASE, name="good", build=lambda _: build(torch.device("cpu"))),
        replace(CASE, name="faulty", build=broken), replace(CASE, name="later"),
    ]  # fmt: skip
    monkeypatch.setattr(cli, "_cases", lambda group, options: cases)
    path = tmp_path / "rows.json"
    assert cli.main(["--group", "decode", "--out", str(path), "--commit", "abc"]) == 1
    rows = Results.load(path).rows
    assert [row["work"] for row in rows] == ["toy/good", "toy/faulty"]
    assert rows[0]["peer_ms"] and "illegal memory access" in rows[1]["reason"]
    [said] = [x for x in capsys.readouterr().out.splitlines() if "stopped" in x]
    assert said.startswith("decode: stopped after ") and "illegal memory access" in said


@pytest.mark.parametrize(
    "case",
    [
        decode.case(2, 64, 4, 2, 16),
        decode.case_e4m3(2, 64, 4, 2, 32),
        pages.case(decode.case(2, 64, 4, 2, 16), 16),
        prefill.case(1, 33, 4, 2, 16),
        prefill_mods.case("window8", prefill_mods.mods(32, 8)["window8"], 1, 32, 4, 2, 16),
        gdn_prefill.case(48, 2, 4, 1, 16, 16),
        gdn_prefill.case(48, 2, 4, 3, 16, 16),
        gdn_decode.case(2, 2, 4, 16, 16),
    ],
    ids=lambda case: case.work,
)
def test_our_calls_answer_right_on_the_cpu(case: Case) -> None:
    alone = replace(case, peers={"fla": absent})
    (row,) = run_case(alone, bench(FakeClock(), "reference"))
    assert row["ours_ms"] == 2.0, row
    assert row["error"] <= row["budget"]


def test_sdpa_answers_our_decode_case() -> None:
    case = decode.case(2, 64, 4, 2, 16)
    inputs = case.build(torch.device("cpu"))
    from benchmarks.answers import judge
    from benchmarks.peers.pytorch import sdpa

    assert judge(sdpa("MATH", causal=False)(inputs).fn(), case.parts(inputs)).right


def test_bytes_and_flops_are_counted_as_for_the_peers() -> None:
    by_hand = {c.name: (c.bytes, c.flops) for c in decode.cases()}
    assert by_hand["B1 T32768 Hq32 Hk8 D128"] == (134_217_728, 4 * 32 * 32768 * 128)
    assert by_hand["B8 T8192 Hq32 Hk8 D128 e4m3"][0] == 2 * 8 * 8192 * 8 * (128 + 4)
    assert prefill.cases()[0].flops == 2 * 4 * 32 * 4096 * 4096 * 128
    flops = {c.name: c.flops for c in prefill_mods.cases()}
    full = 2 * 2 * 32 * 8192 * 8192 * 128
    assert flops["B2 S8192 softcap"] == flops["B2 S8192 alibi"] == full
    assert flops["B2 S8192 document1024"] == full / 8
    assert flops["B2 S8192 window1024"] == full * 15 / 64
    assert gdn_decode.cases()[3].bytes == 2 * 512 * 32 * 128 * 128 * 4
    assert gdn_prefill.cases()[0].bytes == 8192 * (2 * 16 + 2 * 32) * 128 * 2
    token = 4 * 128 * 64 * 2 + 2 * 64 * 64 / 3 + 6 * 128 * 128
    assert gdn_prefill.cases()[0].flops == pytest.approx(8192 * 32 * token)


def test_the_window_counts_its_pairs() -> None:
    i, j = torch.arange(64)[:, None], torch.arange(64)
    seen = int(((j <= i) & (i - j < 16)).sum())
    assert prefill_mods.mods(64, 16)["window16"].share == pytest.approx(seen / (64 * 64 / 2), 0.02)


@pytest.mark.parametrize(
    ("case", "want"),
    [
        (decode.cases()[0], "bytes"),
        (prefill.cases()[0], "flops"),
        (gdn_decode.cases()[0], "bytes"),
        (replace(CASE, timing="host"), None),
    ],
    ids=lambda x: getattr(x, "work", x),
)
def test_the_bound_is_the_longer_of_bytes_and_flops(case: Case, want: str | None) -> None:
    assert bound(case, CEILINGS) == want


def test_a_row_names_the_dialect_that_ran() -> None:
    assert runner.named("auto", ["triton", "gluon"]) == "gluon"
    assert runner.named("auto", ["triton", "triton"]) == "triton"
    assert runner.named("auto", []) == "auto" and runner.named("torch", ["triton"]) == "torch"
