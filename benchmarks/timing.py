"""Times on a GPU: events, CUDA-graph replay, and the host's own cost of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from benchmarks.case import Outputs, Work

FLUSH_BYTES = 256 << 20
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Times:
    """Medians in ms of our call and the peer's, measured in turns.

    Attributes:
        ours: our call.
        peer: the peer's.
        timing: how: ``events``, ``graph`` or ``host``.
        events: beside a graph's times, both by events, where a slow host shows.
    """

    ours: float
    peer: float
    timing: str
    events: tuple[float, float] | None = None


class Clock(Protocol):
    """Measures works; tests put another in its place."""

    def one(self, work: Work, kind: str) -> float:
        """Median ms of one work, by events or on the host: enough to choose between backends."""
        ...

    def pair(self, ours: Work, peer: Work, kind: str) -> Times:
        """Both works in turns."""
        ...


class CaptureError(RuntimeError):
    """A call cannot be replayed from a CUDA graph."""


@dataclass(frozen=True, slots=True)
class GpuClock:
    """The clock of a CUDA device. Every event-timed or replayed call finds a flushed L2.

    Attributes:
        rep: ms of repetitions a round.
    """

    rep: int = 40

    def one(self, work: Work, kind: str) -> float:
        """See :class:`Clock`."""
        return host_ms(work) if kind == "host" else events_ms(work, self.rep)

    def pair(self, ours: Work, peer: Work, kind: str) -> Times:
        """See :class:`Clock`; falls back to events for both where one cannot be captured."""
        if kind == "graph":
            try:
                return self._graph(ours, peer)
            except CaptureError:
                kind = "events"
        found = [(self.one(ours, kind), self.one(peer, kind)) for _ in range(ROUNDS)]
        return Times(median(a for a, _ in found), median(b for _, b in found), kind)

    def _graph(self, ours: Work, peer: Work) -> Times:
        events = events_ms(ours, self.rep), events_ms(peer, self.rep)
        n = max(3, min(20, round(2 / max(events))))
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        empty = capture(Work(lambda: {}), n, flush)
        graphs = [capture(ours, n, flush), capture(peer, n, flush)]
        rounds = []
        for _ in range(ROUNDS):
            base = replay_ms(empty)
            rounds.append([max(replay_ms(g) - base, 0.0) / n for g in graphs])
        return Times(median(r[0] for r in rounds), median(r[1] for r in rounds), "graph", events)


def events_ms(work: Work, rep: int) -> float:
    """Median of single calls between events, L2 flushed before each."""
    from triton.testing import do_bench

    work.reset()
    work.fn()
    torch.cuda.synchronize()
    return float(do_bench(work.fn, warmup=10, rep=rep, return_mode="median"))


def host_ms(work: Work, calls: int = 100, series: int = 7) -> float:
    """Host time a call: series of calls without waiting for the device; the median series."""
    found = []
    for _ in range(series):
        work.reset()
        for _ in range(3):
            work.fn()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work.fn()
        found.append((time.perf_counter() - start) / calls * 1e3)
        torch.cuda.synchronize()
    return median(found)


def capture(work: Work, n: int, flush: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of n calls, each after a flush of the L2.

    Raises:
        CaptureError: the call cannot be captured, or its work was not (another stream's).
    """
    work.reset()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work.fn()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        outputs: Outputs = {}
        with torch.cuda.graph(graph):
            for _ in range(n):
                flush.zero_()
                outputs = work.fn()
    except Exception as error:
        torch.cuda.synchronize()
        raise CaptureError(str(error)) from error
    _check_replay(graph, outputs)
    return graph


def _check_replay(graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
    floats = [t for t in outputs.values() if t.is_floating_point()]
    for tensor in floats:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    if any(bool(torch.isnan(t).any()) for t in floats):
        raise CaptureError("the replayed graph does not write the outputs")


def replay_ms(graph: torch.cuda.CUDAGraph, times: int = 7) -> float:
    """Median time of one replay."""
    found = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    return median(found)


def measure_ceilings() -> dict[str, float]:
    """What the device attains now: copy and read GB/s of 2 GiB, bf16 matmul TFLOP/s at 8192."""
    n = 1 << 31
    a = torch.empty(n, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    y = torch.randn_like(x)
    floats = torch.rand(n // 4, device="cuda")

    def timed(fn: Callable[[], torch.Tensor]) -> float:
        return events_ms(Work(lambda: {"x": fn()}), 60)

    return {
        "copy_gbs": round(2 * n / timed(lambda: b.copy_(a)) / 1e6, 1),
        "read_gbs": round(n / timed(lambda: torch.sum(floats)) / 1e6, 1),
        "bf16_tflops": round(2 * 8192**3 / timed(lambda: x @ y) / 1e9, 1),
    }
