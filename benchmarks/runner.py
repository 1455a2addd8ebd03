"""Runs a case: the answer first, then our time and each peer's in turns, one row a peer."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from benchmarks.answers import Answer, judge, run_and_judge
from benchmarks.case import Case, Inputs, Part, Work
from benchmarks.identity import versions
from benchmarks.results import Row
from benchmarks.timing import Clock

NO_BOUND = ("host", "process")
"""Times of the host: the device's ceilings say nothing about them."""
PEER_LENIENCE = 16
"""A peer further than this many budgets from the oracle does other work; its time says nothing."""


class DeviceLostError(RuntimeError):
    """A kernel has faulted: whatever this process asks of the device from now on fails."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rows of a run share.

    Attributes:
        device: where the inputs are made.
        clock: measures.
        ceilings: ``copy_gbs``, ``read_gbs``, ``bf16_tflops`` of this run.
        commit: identity of the sources.
        run: the run's id.
        backends: our backends to try; the fastest right one is reported.
        peers: names to measure; every peer of a case when None.
        done: keys that are there already.
        deadline: monotonic time after which nothing more is started.
        peer_limit: seconds that a peer's first call may take; any number of them when None.
    """

    device: torch.device
    clock: Clock
    ceilings: dict[str, float]
    commit: str
    run: str
    backends: tuple[str, ...] = ("triton",)
    peers: frozenset[str] | None = None
    done: frozenset[tuple[str, str]] = frozenset()
    deadline: float = float("inf")
    peer_limit: float | None = None


class PeerLimitError(BaseException):
    """A peer's first call, which compiles and tries configurations, took too long.

    No ``Exception``: a peer that takes any for one more configuration that fails goes on else.
    """


@dataclass(slots=True)
class Ours:
    """Our side of a case: a checked call, or the reason why there is none."""

    work: Work | None = None
    backend: str | None = None
    answer: Answer | None = None
    reason: str | None = None
    facts: Row = field(default_factory=dict)


def why(error: BaseException) -> str:
    """An exception on one line: its last, or the one that CUDA begins with."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    said = next((x for x in lines if x.startswith("CUDA error")), lines[-1])
    return f"{type(error).__name__}: {said[:200]}"


def wanted(case: Case, bench: Bench) -> list[str]:
    """The peers of a case that are asked for and not there yet."""
    return [
        p
        for p in case.peers
        if (bench.peers is None or p in bench.peers) and (case.work, p) not in bench.done
    ]


def run_case(case: Case, bench: Bench) -> Iterator[Row]:
    """Rows of one case, one a peer, as each is ready."""
    peers = wanted(case, bench)
    if not peers:
        return
    if time.monotonic() > bench.deadline:
        for peer in peers:
            yield row(case, bench, peer, Ours(reason="the group's time was up"))
        return
    try:
        inputs = case.build(bench.device)
        parts = list(case.parts(inputs))
    except Exception as error:
        reason = f"inputs or oracle: {why(error)}"
        for peer in peers:
            yield row(case, bench, peer, Ours(reason=reason))
        return
    ours = best(case, bench, inputs, parts)
    for peer in peers:
        yield beside(case, bench, peer, ours, inputs, parts)
        release(bench.device)


def best(case: Case, bench: Bench, inputs: Inputs, parts: list[Part]) -> Ours:
    """The fastest of our backends whose answer is right; else the first one's failure."""
    names = (case.backend,) if case.backend else bench.backends
    found = [attempt(case, bench, name, inputs, parts) for name in names]
    right = [o for o in found if o.work is not None]
    if not right:
        wrong = [o for o in found if o.answer is not None]
        return (wrong or found)[0]
    if len(right) == 1:
        return right[0]
    times = [bench.clock.one(o.work, case.timing) for o in right if o.work is not None]
    return right[times.index(min(times))]


@contextmanager
def launched() -> Iterator[list[str]]:
    """The dialects of the kernels that are launched inside, in order."""
    from attncc.runtime.kernels import Kernel

    found: list[str] = []
    launch = Kernel.launch

    def noting(self: Kernel, *args: Any, **kwargs: Any) -> None:
        found.append(self.plan.dialect.value)
        launch(self, *args, **kwargs)

    with mock.patch.object(Kernel, "launch", noting):
        yield found


def named(backend: str, dialects: list[str]) -> str:
    """What a row calls our side: for ``auto`` the dialect that ran, the special one of several."""
    special = [d for d in dialects if d != "triton"]
    return (special or dialects or [backend])[0] if backend == "auto" else backend


def attempt(case: Case, bench: Bench, backend: str, inputs: Inputs, parts: list[Part]) -> Ours:
    """Make our call for one backend and check its answer, on buffers full of NaN."""
    cuda = bench.device.type == "cuda"
    facts: Row = {}
    try:
        start = time.monotonic()
        work = case.ours(inputs, backend)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        work.reset()
        with launched() as dialects:
            work.fn()
        backend = named(backend, dialects)
        if cuda:
            torch.cuda.synchronize()
            facts["ours_extra_bytes"] = torch.cuda.max_memory_allocated() - held
        facts["ours_setup_s"] = round(time.monotonic() - start, 2)
        answer = run_and_judge(work, parts)
    except Exception as error:
        return Ours(backend=backend, reason=f"ours: {why(error)}", facts=facts)
    if not answer.right:
        reason = f"wrong answer: {answer.output}"
        return Ours(backend=backend, answer=answer, reason=reason, facts=facts)
    return Ours(work, backend, answer, facts=facts)


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Stop what runs inside after so many seconds; in the main thread.

    Raises:
        PeerLimitError: it was stopped, as soon as Python code ran again.
    """
    if seconds is None:
        yield
        return

    def stop(*_: object) -> None:
        raise PeerLimitError(f"its first call took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def beside(
    case: Case, bench: Bench, peer: str, ours: Ours, inputs: Inputs, parts: list[Part]
) -> Row:
    """The row of one peer. With a wrong answer of ours nothing is timed at all."""
    new = row(case, bench, peer, ours)
    if ours.answer is not None and not ours.answer.right:
        return new
    if time.monotonic() > bench.deadline:
        return {**new, "reason": ours.reason or "the group's time was up"}
    try:
        start = time.monotonic()
        with limited(bench.peer_limit):
            work = case.peers[peer](inputs)
            work.reset()
            outputs = work.fn()
        answer = judge(outputs, parts, frozenset({"o"}))
        new["peer_setup_s"] = round(time.monotonic() - start, 2)
        new["peer_error"] = answer.error
        if not answer.error <= PEER_LENIENCE * answer.budget:
            raise ArithmeticError(f"error {answer.error:.3g}, budget {answer.budget:.3g}")
    except (Exception, PeerLimitError) as error:
        new["reason"] = "; ".join(filter(None, (ours.reason, f"peer: {why(error)}")))
        work = None
    return _timed(case, bench, new, ours, work)


def _timed(case: Case, bench: Bench, new: Row, ours: Ours, peer: Work | None) -> Row:
    """Fill in the times of what there is: both in turns, or one side alone."""
    try:
        if ours.work is not None and peer is not None:
            times = bench.clock.pair(ours.work, peer, case.timing)
            new |= {"ours_ms": times.ours, "peer_ms": times.peer, "timing": times.timing}
            new["ratio"] = times.peer / times.ours if times.ours > 0 else None
            if times.events is not None:
                new["ours_events_ms"], new["peer_events_ms"] = times.events
        elif ours.work is not None or peer is not None:
            alone = ours.work or peer
            assert alone is not None
            kind = case.timing if case.timing in NO_BOUND else "events"
            side = "ours_ms" if ours.work is not None else "peer_ms"
            new |= {side: bench.clock.one(alone, kind), "timing": kind}
    except Exception as error:
        new["reason"] = f"timing: {why(error)}"
    share = share_of_ceiling(case, bench.ceilings, new["ours_ms"])
    new["share_of_ceiling"] = share
    return {k: round(v, 5) if k in ROUNDED and v is not None else v for k, v in new.items()}


ROUNDED = frozenset(
    {"ours_ms", "peer_ms", "ours_events_ms", "peer_events_ms", "ratio", "share_of_ceiling"}
)


def least_ms(case: Case, ceilings: dict[str, float]) -> dict[str, float]:
    """The time that bytes and that flops alone would take at this run's ceilings."""
    rate = ceilings["read_gbs" if case.reads else "copy_gbs"]
    return {
        "bytes": case.bytes / rate / 1e6,
        "flops": case.flops / ceilings["bf16_tflops"] / 1e9,
    }


def bound(case: Case, ceilings: dict[str, float]) -> str | None:
    """``bytes`` or ``flops``, whichever takes longer; None for host time."""
    if case.timing in NO_BOUND:
        return None
    least = least_ms(case, ceilings)
    return max(least, key=lambda name: least[name])


def share_of_ceiling(case: Case, ceilings: dict[str, float], ms: float | None) -> float | None:
    """Least time over measured time."""
    if not ms or case.timing in NO_BOUND:
        return None
    return max(least_ms(case, ceilings).values()) / ms


def row(case: Case, bench: Bench, peer: str, ours: Ours) -> Row:
    """A row without times."""
    answer = ours.answer
    return {
        "work": case.work,
        "ours_ms": None,
        "backend": ours.backend,
        "peer": peer,
        "peer_ms": None,
        "ratio": None,
        "error": answer and answer.error,
        "budget": answer and answer.budget,
        "bound": bound(case, bench.ceilings),
        "share_of_ceiling": None,
        "timing": None,
        "versions": versions(peer),
        "commit": bench.commit,
        "run": bench.run,
        "bytes": case.bytes,
        "flops": case.flops,
        "checked": answer and answer.output,
        "wrong": answer is not None and not answer.right,
        **ours.facts,
        **({"reason": ours.reason} if ours.reason else {}),
    }


def release(device: torch.device) -> None:
    """Give cached memory back, so that a peer's workspace does not crowd the next.

    Raises:
        DeviceLostError: a kernel has faulted, now or before.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLostError(
            f"a kernel has faulted, and this process can launch no other: {why(error)}"
        ) from error
