"""Streams beside a caller's own: *lanes* of a call whose kernels need not follow each other.

Lane 0 is the caller's stream. Another lane starts after what lane 0 had when it was told to wait,
and lane 0 waits for it before the call is over. So whatever the caller frees or launches later
comes after all lanes, and buffers of the call are freed in the order of the caller's stream.
"""

from __future__ import annotations

import os

import torch

AHEAD = 1
"""The lane whose programs come first."""
TOGETHER = 2
"""The lane of kernels that wait on the device for one on a caller's stream: one for all callers."""

_BESIDE: dict[tuple[int, int, int], torch.cuda.Stream] = {}
"""By device, caller's stream and lane: what one caller captures is no concern of another."""

_EVENTS: dict[int, list[int]] = {}

os.register_at_fork(after_in_child=_BESIDE.clear)
os.register_at_fork(after_in_child=_EVENTS.clear)


def beside(device: int, stream: int, lane: int) -> torch.cuda.Stream:
    """The stream of a lane; its programs start before those that wait elsewhere.

    Args:
        device: index of the CUDA device.
        stream: handle of the caller's stream.
        lane: from 1.
    """
    key = device, 0 if lane == TOGETHER else stream, lane
    found = _BESIDE.get(key)
    if found is None:
        found = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        found = _BESIDE.setdefault(key, found)
    return found


def spare_events(device: int) -> list[int]:
    """Events of a device that nobody uses, to be taken and given back."""
    return _EVENTS.setdefault(device, [])
