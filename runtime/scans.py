"""Scans whose layout Triton lowers wrongly, from a kernel's TTGIR.

Where lanes hold copies of the same elements along a dimension that varies faster than the scanned
one, and a lane's own elements along the scanned one lie in several blocks, one warp carries the
wrong lane's sum from block to block (seen on a GPU with Triton 3.6: ``sizePerThread`` [1, 8] and
``threadsPerWarp`` [4, 8] of 16 x 16). The compiler picks layouts, and may compute one scan in two
of them, so only the compiled kernel shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attncc.dsl.errors import ToolchainError

_BLOCKED = re.compile(
    r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\], threadsPerWarp = \[([\d, ]+)\], "
    r"warpsPerCTA = \[([\d, ]+)\], order = \[([\d, ]+)\]",
    re.MULTILINE,
)
_AXIS = re.compile(r'"tt\.scan"\(.*<\{axis = (\d+) : i32')
_RESULT = re.compile(r"^\s*\}\) : \(tensor<([\dx]+)x\w+, (#\w+|#ttg\..*?)>(?:, .*)?\) -> ")


@dataclass(frozen=True, slots=True)
class Blocked:
    """A blocked layout, by dimension."""

    each: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    order: tuple[int, ...]


def layouts(ttgir: str) -> dict[str, Blocked]:
    """The blocked layouts of a module by name."""
    found = {}
    for name, *parts in _BLOCKED.findall(ttgir):
        found[name] = Blocked(*(tuple(map(int, p.split(","))) for p in parts))
    return found


def scans(ttgir: str) -> list[tuple[tuple[int, ...], str, int]]:
    """Shape, layout and axis of every scan.

    Raises:
        ToolchainError: Triton prints scans in another way, so nothing can be said of them.
    """
    found, axis = [], None
    for line in ttgir.splitlines():
        start = _AXIS.search(line)
        axis = int(start[1]) if start else axis
        end = _RESULT.search(line)
        if end and axis is not None:
            found.append((tuple(map(int, end[1].split("x"))), end[2], axis))
            axis = None
    if axis is not None or len(found) != ttgir.count('"tt.scan"('):
        raise ToolchainError("scans of this Triton cannot be read", help="use one of 3.6 to 3.9")
    return found


def wrong(shape: tuple[int, ...], layout: Blocked, axis: int) -> bool:
    """Whether a scan of that layout is in the class that is lowered wrongly."""
    faster = layout.order[: layout.order.index(axis)]
    copied = any(layout.each[d] * layout.lanes[d] > shape[d] for d in faster)
    here = layout.each[axis] * layout.lanes[axis]
    return copied and layout.warps[axis] == 1 and layout.lanes[axis] > 1 and shape[axis] > here


def faults(ttgir: str) -> list[str]:
    """The scans of that class, in words; those of a layout that is not blocked as well."""
    known, found = layouts(ttgir), []
    for shape, name, axis in scans(ttgir):
        layout = known.get(name)
        if layout is None and len(shape) == 1:
            continue  # a slice of one dimension has none that is faster
        if layout is None or wrong(shape, layout, axis):
            found.append(f"scan of {shape} along {axis} in {name} = {layout}")
    return found
