"""Prints the tensor maps of warp-specialised prefill: what a copy brings, and from where."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.softmax_finish import group_of
from attncc.codegen.emit.softmax_rows import Texts, atom, sizes_of
from attncc.codegen.plan_gluon import WarpPlan
from attncc.codegen.softmax_checks import TOKENS


@dataclass(frozen=True, slots=True)
class MapCode:
    """A tensor map and the box of it that one copy brings.

    Attributes:
        name: of what it loads: ``query``, ``key`` or ``value``.
        pointer: the tensor.
        shape: size of each memory axis.
        strides: of each, in elements.
        box: what one copy brings, and the shape of a place in the ring.
        at: coordinates of a copy.
        rows: rows of a box as a matrix.
        width: columns of it.
        tail: the shape that ends with the sequence.
    """

    name: str
    pointer: str
    shape: str
    strides: str
    box: str
    at: str
    rows: int
    width: int
    tail: str

    @property
    def rank(self) -> int:
        """Number of memory axes."""
        return self.box.count(",") + 1


def map_codes(plan: WarpPlan) -> tuple[MapCode, ...]:
    """The maps of query, key and value."""
    sides = (
        ("query", plan.query, plan.widths_k[0], plan.part),
        ("key", plan.key, plan.widths_k[0], plan.block_n),
        ("value", plan.value, plan.width_e, plan.block_n),
    )
    found = []
    for name, tensor, width, rows in sides:
        arg = plan.tensor(tensor)
        dims = arg.pattern.dims[:-1]
        extents = [_extent(plan, dim) for dim in dims]
        found.append(
            MapCode(
                name=name,
                pointer=arg.pointer,
                shape=", ".join([*(size for size, _ in extents), str(width)]),
                strides=", ".join([*arg.strides, "1"]),
                box=", ".join([*(str(_box(plan, dim, name)) for dim in dims), str(width)]),
                at=", ".join([*(_coordinate(plan, dim, name) for dim in dims), "0"]),
                rows=rows,
                width=width,
                tail=", ".join([*(end for _, end in extents), str(width)]),
            )
        )
    return tuple(found)


def _extent(plan: WarpPlan, dim: Texts) -> tuple[str, str]:
    """Size of a memory axis, and of what of it the sequence's end leaves.

    A size of 0 has no tensor map: nothing is loaded then, but the map is made.
    """
    sizes = sizes_of(plan)
    if dim == (TOKENS,):
        size = "n_T" if plan.packed else "T"
    elif dim == (plan.fold.over,):
        size = "n_S" if plan.packed else "S"
    else:
        return (" * ".join(sizes[a] for a in dim),) * 2
    whole = f"gl.maximum({size}, 1)"
    return whole, "(first_key + S).to(gl.int32)" if dim == (plan.fold.over,) else whole


def _box(plan: WarpPlan, dim: Texts, name: str) -> int:
    """What a copy brings of a memory axis."""
    static = dict(plan.static)
    if plan.fold.over in dim and name != "query":
        return plan.block_n
    if TOKENS in dim:
        group = 1
        for axis in plan.tile_axes[1:]:
            group *= static[axis]
        return plan.part // group
    count = 1
    for axis in dim:
        count *= static[axis] if axis in plan.tile_axes else 1
    return count


def _coordinate(plan: WarpPlan, dim: Texts, name: str) -> str:
    """Where a copy starts in a memory axis, as a 32-bit number."""
    if plan.fold.over in dim and name != "query":
        return "(first_key + n0).to(gl.int32)" if plan.packed else "n0"
    if TOKENS in dim:
        at = f"start // {group_of(plan)} + part * {_box(plan, dim, name)}"
        return f"first + {at}" if plan.packed else at
    sizes, text = sizes_of(plan), ""
    for axis in dim:
        index = "0" if axis in plan.tile_axes else f"at_{axis}"
        text = f"{atom(text)} * {sizes[axis]} + {index}" if text else index
    return "0" if set(dim) <= set(plan.tile_axes) else f"({text}).to(gl.int32)"
