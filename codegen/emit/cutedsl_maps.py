"""Prints tensor maps of CuTe-DSL prefill, and lays out its shared memory."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from attncc.codegen.emit.cutedsl import Scalars
from attncc.codegen.emit.cutedsl_types import Known
from attncc.codegen.emit.gluon_maps import MapCode
from attncc.codegen.plan_cutedsl import CutePlan

SWIZZLED = 64
"""16-bit columns of a row of 128 bytes, the widest that a swizzled copy brings."""
MAP_BYTES = 128
"""A tensor map."""


@dataclass(frozen=True, slots=True)
class CuteMap:
    """A tensor map and its copies; axes innermost first.

    Attributes:
        name: ``query``, ``key`` or ``value``.
        pointer: the tensor.
        sizes: of each axis.
        strides: bytes of each axis but the innermost.
        box: what one copy brings.
        at: coordinates of a copy but the innermost.
        tail: the sizes that end with the sequence.
        starts: innermost coordinate of each copy, and its place among those of a block in bytes.
        bytes: of all copies of a block.
        width: columns of a block.
    """

    name: str
    pointer: str
    sizes: str
    strides: str
    box: str
    at: str
    tail: str
    starts: tuple[tuple[int, int], ...]
    bytes: int
    width: int


def cute_map(plan: CutePlan, code: MapCode, known: dict[str, Known]) -> CuteMap:
    """A tensor map with its axes innermost first, cut into copies of 128 bytes a row."""
    numbers = {"n0": Known("i32"), "part": Known("i32")}
    scalars = Scalars(known | numbers, {})

    def turned(text: str, last: Sequence[str], kind: str, times: str = "") -> str:
        parts = [scalars.expression(t)[0] for t in _parts(text)[:-1]]
        return "".join(f"{t}, " for t in (*last, *(f"{kind}({t}){times}" for t in parts[::-1])))

    box = [int(t) for t in code.box.split(", ")]
    rows = prod(box[:-1])
    halves = range(code.width // SWIZZLED)
    return CuteMap(
        name=code.name,
        pointer=code.pointer,
        sizes=turned(code.shape, (f"Int32({code.width})",), "Int32"),
        strides=turned(code.strides, (), "Int64", " * 2"),
        box="".join(f"{n}, " for n in (SWIZZLED, *box[-2::-1])),
        at=turned(code.at, (), "Int32"),
        tail=turned(code.tail if plan.packed else "0", (f"Int32({code.width})",), "Int32"),
        starts=tuple((SWIZZLED * i, SWIZZLED * i * rows * 2) for i in halves),
        bytes=rows * code.width * 2,
        width=code.width,
    )


def _parts(text: str) -> list[str]:
    """The entries of a list in text."""
    node = ast.parse(f"[{text}]", mode="eval").body
    assert isinstance(node, ast.List)
    return [ast.unparse(e) for e in node.elts]


def room_of(plan: CutePlan, told: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shared memory: rings first, whose places start at multiples of 1024 bytes."""
    query = plan.consumers * plan.part * plan.widths_k[0] * 2
    key = plan.block_n * plan.widths_k[0] * 2
    value = plan.block_n * plan.width_e * 2
    map_at = query + plan.num_stages * (key + value)
    work_at = map_at + MAP_BYTES
    at = work_at + -(-4 * told // 8) * 8
    warps = plan.num_warps * plan.consumers
    counts = (
        ("work_full", 1, 1), ("query_full", 1, 1), ("query_free", 1, warps),
        ("key_full", plan.num_stages, 1), ("key_free", plan.num_stages, warps),
        ("value_full", plan.num_stages, 1), ("value_free", plan.num_stages, warps),
    )  # fmt: skip
    barriers = []
    for name, number, arrivals in counts:
        barriers.append((name, at, number, arrivals))
        at += 8 * number
    sizes = {
        "query_bytes": query, "key_bytes": key, "value_bytes": value, "key_at": query,
        "value_at": query + plan.num_stages * key, "map_at": map_at, "work_at": work_at,
        "shared_bytes": at,
    }  # fmt: skip
    return sizes, {"barriers": tuple(barriers)}
