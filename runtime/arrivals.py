"""Counters of the programs that have finished their share of a tile; zero between launches.

The last program of a tile to come merges what all have left, and sets the tile's counter back to
zero. A counter is right as long as no two launches that use it run at once:

* Launches on one stream follow each other, so each (device, stream) has a buffer of its own.
* A graph runs on streams that its capture knows nothing of, beside other graphs and eager calls. A
  captured call therefore gets counters that no other call ever gets. They come from a reserve that
  was zeroed before any capture (memory that is allocated while capturing may belong to an earlier
  node of the same graph, which writes to it at every replay). Where the reserve is used up, or no
  call came before the capture, the counters are zeroed by a node of the graph.

A graph whose replay is started while it still runs waits for itself, so its counters are its own.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import torch

from attncc.runtime.recorder import current

FEWEST = 1 << 12
"""Counters of a stream's first buffer."""

RESERVE = 1 << 18
"""Counters kept for captured calls, on each device."""

ALIGNED = 4
"""Counters are handed out in multiples of 16 bytes."""


@dataclass(slots=True)
class Reserve:
    """Counters that are zero and that nobody has; the first ``used`` are given away."""

    counters: torch.Tensor
    used: int = 0

    @property
    def left(self) -> int:
        """How many nobody has."""
        return self.counters.numel() - self.used

    def take(self, size: int) -> torch.Tensor | None:
        """Counters for one captured launch, never given again; None if too few are left."""
        if self.left < size:
            return None
        self.used += size
        return self.counters[self.used - size : self.used]


_STREAMS: dict[tuple[int, int], torch.Tensor] = {}
_RESERVES: dict[int, Reserve] = {}
_GIVEN: list[torch.Tensor] = []  # graphs hold addresses of these, and nothing that keeps them
_LOCK = threading.Lock()


def forget() -> None:
    """Start again from new counters: after a fork, or after a launch that may not have ended."""
    global _LOCK
    _LOCK = threading.Lock()
    _STREAMS.clear()
    _RESERVES.clear()


os.register_at_fork(after_in_child=forget)


def arrivals(count: int, device: torch.device) -> torch.Tensor:
    """Counters for one launch on the current stream.

    Args:
        count: tiles of the launch.
        device: where it runs.

    Returns:
        int32 ``[at least count]``, zero when the launch starts; it leaves zeros.
    """
    made = zeroed(count, device)
    recorder = current()
    if recorder is not None:
        made = made[:count]  # what a replay asks for
        recorder.workspace(made, zeroed=True)
    return made


def zeroed(count: int, device: torch.device) -> torch.Tensor:
    """The same, without a word to whoever records the call."""
    size = max(-(-count // ALIGNED) * ALIGNED, ALIGNED)
    if device.type != "cuda":  # the interpreter: a launch is over when it returns
        return _of_stream((-1, threading.get_ident()), size, device)
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            return _captured(index, size, device)
        _refill(index, device)
        stream = torch.cuda.current_stream().cuda_stream
        return _of_stream((index, stream), size, device)


def _of_stream(key: tuple[int, int], size: int, device: torch.device) -> torch.Tensor:
    found = _STREAMS.get(key)
    if found is None or found.numel() < size:
        # What is replaced is freed in stream order: launches that still use it come first.
        room = max(FEWEST, 1 << (size - 1).bit_length())
        found = _STREAMS[key] = torch.zeros(room, dtype=torch.int32, device=device)
    return found


def _refill(index: int, device: torch.device) -> None:
    found = _RESERVES.get(index)
    if found is not None and found.left >= RESERVE // 2:
        return
    made = torch.zeros(RESERVE, dtype=torch.int32, device=device)
    torch.cuda.current_stream().synchronize()  # zero for every stream; once in a long while
    with _LOCK:
        _GIVEN.append(made)
        _RESERVES[index] = Reserve(made)


def _captured(index: int, size: int, device: torch.device) -> torch.Tensor:
    with _LOCK:
        reserve = _RESERVES.get(index)
        found = None if reserve is None else reserve.take(size)
    return torch.zeros(size, dtype=torch.int32, device=device) if found is None else found
