"""Prints tensor maps of the state pass in CuTe-DSL, and lays out its shared memory."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from math import prod

from attncc.codegen.emit.cutedsl import Scalars
from attncc.codegen.emit.cutedsl_maps import SWIZZLED
from attncc.codegen.emit.cutedsl_types import Known
from attncc.codegen.emit.gluon import TYPES
from attncc.codegen.emit.gluon_rings import Ring, out_map, rings_of
from attncc.codegen.plan_affine import BLOCK, ROWS
from attncc.codegen.plan_cutedsl_state import MAP_BYTES, CuteStatePlan, beside_bytes, place_bytes
from attncc.codegen.plan_gluon_state import COLUMNS


@dataclass(frozen=True, slots=True)
class StateMap:
    """A tensor map and its copies; axes innermost first.

    Attributes:
        ring: where its copies go; empty for the output.
        pointer: address of the first element.
        sizes: of each axis.
        strides: bytes of each axis but the innermost.
        box: what one copy brings.
        copies: of one chunk: coordinates, and the place among a chunk's in bytes.
        each: warpgroups have places of their own.
        bytes: of all copies of a chunk, of all warpgroups.
    """

    ring: str
    pointer: str
    sizes: str
    strides: str
    box: str
    copies: tuple[tuple[str, int], ...]
    each: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class StateRoom:
    """Shared memory of a program, in bytes.

    Attributes:
        rings: name, start and bytes of a place of each ring.
        names: of the rings, by what they hold.
        outs: where outputs on their way lie, and those of a warp.
        maps: room for tensor maps.
        barriers: ``full``, and then ``free``.
        bytes: of all.
    """

    rings: tuple[tuple[str, int, int], ...]
    names: tuple[tuple[str, str], ...]
    outs: int
    out_bytes: int
    maps: int
    barriers: int
    bytes: int

    def name_of(self, held: str) -> str:
        """The ring that holds something; empty for nothing."""
        return dict(self.names).get(held, "")


def room_of(plan: CuteStatePlan) -> StateRoom:
    """Rings first, whose places start at multiples of 1024 bytes."""
    at, rings, names = 0, [], []
    for held, size in place_bytes(plan).items():
        name = f"{held.replace(' ', '_')}_ring"
        names.append((held, name))
        rings.append((name, at, size))
        at += size * plan.num_stages
    warps = plan.consumers * plan.num_warps
    maps = at + beside_bytes(plan) - MAP_BYTES * (1 + warps)
    barriers = maps + MAP_BYTES * (1 + warps)
    return StateRoom(
        rings=tuple(rings), names=tuple(names), outs=at, out_bytes=(maps - at) // warps, maps=maps,
        barriers=barriers, bytes=barriers + 16 * plan.num_stages,
    )  # fmt: skip


def maps_of(plan: CuteStatePlan, known: dict[str, Known]) -> tuple[StateMap, ...]:
    """Everything of 16 bits that is copied of a chunk."""
    rings = (r for r in rings_of(plan) if r.dtype != TYPES["fp32"])
    return tuple(_map(plan, ring, known) for ring in rings)


def out_of(plan: CuteStatePlan, known: dict[str, Known]) -> StateMap:
    """Where the output of a chunk goes; a copy has the columns of one warp."""
    return _map(plan, out_map(plan), known)


def _map(plan: CuteStatePlan, ring: Ring, known: dict[str, Known]) -> StateMap:
    """A tensor map with its axes innermost first, cut into copies of 128 bytes a row."""
    scalars = Scalars(known | {n: Known("i32") for n in ("step", "column")}, {})

    def turned(text: str, kind: str, times: str = "") -> list[str]:
        node = ast.parse(f"[{text}]", mode="eval").body
        assert isinstance(node, ast.List)
        parts = [scalars.expression(ast.unparse(e))[0] for e in node.elts]
        return [f"{kind}({t}){times}" for t in parts[::-1]]

    width, *counts = (int(t) for t in ring.box.split(", ")[::-1])
    narrow = COLUMNS // plan.num_warps if ring.role == "out" else SWIZZLED
    per_token = len(plan.form.rows)
    pieces = ROWS // BLOCK if ring.role in _ROWS and plan.zeroed else 1
    if pieces > 1:  # a block's rows leave places over
        counts[0] = plan.block_tokens * per_token
    at, copies, held = turned(ring.at, "Int32"), [], ROWS
    if ring.role not in (*_ROWS, "inverse"):
        held = plan.columns_read
    for start in range(0, width if ring.role != "out" else narrow, narrow):
        for piece in range(pieces):
            first = f"{at[0]} + {start}" if start else at[0]
            second = f"{at[1]} + {piece * counts[0]}" if piece else at[1]
            place = 2 * (start * held + piece * BLOCK * narrow)
            copies.append((", ".join([first, second, *at[2:]]) + ",", place))
    return StateMap(
        ring=_ring_of(plan, ring), pointer=scalars.address(ring.base),
        sizes=", ".join(turned(ring.shape, "Int32")) + ",",
        strides=", ".join(turned(ring.strides, "Int64", " * 2")[1:]) + ",",
        box=", ".join(map(str, [min(width, narrow), *counts])) + ",", copies=tuple(copies),
        each=ring.each,
        bytes=2 * width * prod(counts) * pieces * (plan.consumers if ring.each else 1),
    )  # fmt: skip


_ROWS = ("a", "b", "const")
"""Rings whose places hold a chunk's rows."""


def _ring_of(plan: CuteStatePlan, ring: Ring) -> str:
    """The ring that a map's copies go to; empty for the output."""
    held = {"a": plan.a, "b": plan.b, "const": "const", "inverse": "inverse"}
    for read, name in zip(plan.form.reads if plan.vectors else (), plan.vectors, strict=True):
        held |= {f"vector_{read.name}": f"read {name}", f"mix_{read.name}": f"mix {read.name}"}
    return room_of(plan).name_of(held.get(ring.role, ""))
