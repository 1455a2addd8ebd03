"""Times on a GPU: events, CUDA-graph replay, and the host's own cost of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from attncc.runtime.timing import CaptureError, events_ms, graphs_ms, host_ms
from benchmarks.case import Work

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Times:
    """Medians in ms of our call and the peer's, measured in turns.

    Attributes:
        ours: our call.
        peer: the peer's.
        timing: how: ``events``, ``graph``, ``host`` or ``process``.
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


@dataclass(frozen=True, slots=True)
class GpuClock:
    """The clock of a CUDA device. Every event-timed or replayed call finds a flushed L2.

    Attributes:
        rep: ms of repetitions a round.
    """

    rep: int = 40

    def one(self, work: Work, kind: str) -> float:
        """See :class:`Clock`."""
        if work.measure is not None:
            return work.measure()
        return _host(work) if kind == "host" else _events(work, self.rep)

    def pair(self, ours: Work, peer: Work, kind: str) -> Times:
        """See :class:`Clock`; falls back to events for both where one cannot be captured."""
        if kind == "graph":
            try:
                return self._graph(ours, peer)
            except CaptureError:
                kind = "events"
        if kind == "process":  # seconds each: a work keeps the times that it has taken
            return Times(self.one(ours, kind), self.one(peer, kind), kind)
        found = [(self.one(ours, kind), self.one(peer, kind)) for _ in range(ROUNDS)]
        return Times(median(a for a, _ in found), median(b for _, b in found), kind)

    def _graph(self, ours: Work, peer: Work) -> Times:
        events = _events(ours, self.rep), _events(peer, self.rep)
        n = max(3, min(20, round(2 / max(events))))
        found = graphs_ms([ours.fn, peer.fn], n, ROUNDS, [ours.reset, peer.reset])
        return Times(found[0], found[1], "graph", events)


def _events(work: Work, rep: int) -> float:
    work.reset()
    work.fn()
    return events_ms(work.fn, rep)


def _host(work: Work, series: int = 7) -> float:
    """The median of several series, each from the same start."""
    found = []
    for _ in range(series):
        work.reset()
        found.append(host_ms(work.fn))
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
        fn()
        return events_ms(fn, 60)

    return {
        "copy_gbs": round(2 * n / timed(lambda: b.copy_(a)) / 1e6, 1),
        "read_gbs": round(n / timed(lambda: torch.sum(floats)) / 1e6, 1),
        "bf16_tflops": round(2 * 8192**3 / timed(lambda: x @ y) / 1e9, 1),
    }
