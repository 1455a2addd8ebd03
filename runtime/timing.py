"""Times on a GPU: single calls between events, CUDA-graph replay, and the host's cost of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

FLUSH_BYTES = 256 << 20
"""Written between timed calls: more than any L2 holds."""

Call = Callable[[], Mapping[str, torch.Tensor]]
"""Runs the work and returns its outputs by name."""


class CaptureError(RuntimeError):
    """A call cannot be replayed from a CUDA graph."""


def events_ms(fn: Callable[[], object], rep: int) -> float:
    """Median ms of single calls between events, L2 flushed before each.

    Args:
        fn: the call; it has run before.
        rep: ms of repetitions.
    """
    from triton.testing import do_bench

    torch.cuda.synchronize()
    return float(do_bench(fn, warmup=10, rep=rep, return_mode="median"))


def host_ms(fn: Callable[[], object], calls: int = 100) -> float:
    """Host ms a call of one series of calls that does not wait for the device."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    found = (time.perf_counter() - start) / calls * 1e3
    torch.cuda.synchronize()
    return found


def capture(fn: Call, n: int, flush: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of n calls, each after a flush of the L2.

    Raises:
        CaptureError: the call cannot be captured, or its work was not (another stream's).
    """
    try:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        outputs: Mapping[str, torch.Tensor] = {}
        with torch.cuda.graph(graph):
            for _ in range(n):
                flush.zero_()
                outputs = fn()
    except Exception as error:
        torch.cuda.synchronize()
        raise CaptureError(str(error)) from error
    _check_replay(graph, outputs)
    return graph


def _check_replay(graph: torch.cuda.CUDAGraph, outputs: Mapping[str, torch.Tensor]) -> None:
    floats = [t for t in outputs.values() if t.is_floating_point()]
    for tensor in floats:
        tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    if any(bool(torch.isnan(t).any()) for t in floats):
        raise CaptureError("the replayed graph does not write the outputs")


def replay_ms(graph: torch.cuda.CUDAGraph, times: int = 7) -> float:
    """Median ms of one replay."""
    found = []
    for _ in range(times):
        start, stop = _event(), _event()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        found.append(float(start.elapsed_time(stop)))
    return median(found)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graphs_ms(
    fns: Sequence[Call], n: int, rounds: int, resets: Sequence[Callable[[], None]] = ()
) -> list[float]:
    """Median ms a call of several calls, each replayed from a graph of its own, in turns.

    Args:
        fns: the calls.
        n: calls a graph.
        rounds: replays of each graph (each a median of several).
        resets: run before each call's capture, one a call: they put back what the call changes.

    Raises:
        CaptureError: one of them cannot be captured.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    empty = capture(lambda: {}, n, flush)
    graphs = []
    for index, fn in enumerate(fns):
        if resets:
            resets[index]()
        graphs.append(capture(fn, n, flush))
    found = []
    for _ in range(rounds):
        base = replay_ms(empty)
        found.append([max(replay_ms(g) - base, 0.0) / n for g in graphs])
    return [median(column) for column in zip(*found, strict=True)]
