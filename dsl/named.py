"""Tensors whose dimensions carry axis names: what the interpreter computes with.

Only methods of tensors are used, so that importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from attncc.dsl.axes import Pattern
from attncc.dsl.errors import RankError, SizeError
from attncc.dsl.ir import Node

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Data


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor whose dimensions carry axis names."""

    data: Data
    axes: tuple[str, ...]

    def aligned(self, axes: tuple[str, ...]) -> Data:
        """The data with these dimensions in this order, of size 1 where it lacks the axis."""
        data = self.data.permute([self.axes.index(a) for a in axes if a in self.axes])
        for i, axis in enumerate(axes):
            if axis not in self.axes:
                data = data.unsqueeze(i)
        return data

    def select(self, axis: str, at: int) -> Named:
        """One position of an axis; the value itself if it has no such axis."""
        if axis not in self.axes:
            return self
        dim = self.axes.index(axis)
        return Named(self.data.select(dim, at), self.axes[:dim] + self.axes[dim + 1 :])

    def renamed(self, old: str, new: str) -> Named:
        """The same data under another axis name."""
        return Named(self.data, tuple(new if a == old else a for a in self.axes))


def extents(axes: tuple[str, ...], *values: Named) -> list[int]:
    """The size of each axis, from the values that have it."""
    sizes = {a: n for v in values for a, n in zip(v.axes, v.data.shape, strict=True)}
    return [sizes[a] for a in axes]


def unpack(tensor: Data, pattern: Pattern, sizes: Mapping[str, int]) -> Named:
    """Split grouped memory axes: a stored tensor as a named one.

    Raises:
        RankError: the tensor has another number of axes than the pattern.
        SizeError: a memory axis has another extent than its axes' sizes say.
    """
    want = tuple(prod(sizes[a] for a in dim) for dim in pattern.dims)
    if tensor.dim() != pattern.rank:
        raise RankError("a tensor laid out otherwise", expected=str(pattern), found=tensor.dim())
    if tuple(tensor.shape) != want:
        raise SizeError("a tensor of another size", expected=want, found=tuple(tensor.shape))
    return Named(tensor.reshape([sizes[a] for a in pattern.axes]), pattern.axes)


def pack(value: Named, pattern: Pattern, sizes: Mapping[str, int]) -> Data:
    """Lay a named value out as a pattern says (axes it lacks are broadcast)."""
    data = value.aligned(pattern.axes).expand([sizes[a] for a in pattern.axes])
    return data.reshape([prod(sizes[a] for a in dim) for dim in pattern.dims])


def lookup(value: Named, over: str, index: Named, *, zero_below: bool) -> Named:
    """``value`` at ``index`` along ``over``; other axes that both have go element by element.

    Args:
        value: the table.
        over: its axis that is looked up; ``index`` may have an axis of the same name.
        index: whole numbers (a real one is cut to one), clamped to the table.
        zero_below: a negative index gives 0 instead of the first row.
    """
    table = value.renamed(over, "<table>")
    rest = tuple(a for a in table.axes if a != "<table>")
    axes = tuple(dict.fromkeys((*index.axes, *rest)))
    shape = extents(axes, table, index)
    at = index.aligned(axes).expand(shape).long()
    (length,) = extents(("<table>",), table)
    if not length:
        return Named(table.data.new_zeros(shape), axes)
    rows = table.aligned((*axes, "<table>")).expand([*shape, length])
    picked = rows.gather(-1, at.clamp(0, length - 1).unsqueeze(-1)).squeeze(-1)
    return Named(picked.masked_fill(at < 0, 0) if zero_below else picked, axes)


@dataclass(slots=True)
class Env:
    """What a body is evaluated in."""

    sizes: Mapping[str, int]
    inputs: Mapping[str, Named]
    dtype: torch.dtype
    device: torch.device
    query_offset: int = 0  # absolute position of T = 0
    token: int = 0  # absolute position of the scan's token
    memo: dict[Node, Named] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SoftmaxParts:
    """Masked weights exp(score - m), the shared maximum and the sum, sink included."""

    weight: Data
    m: Data
    total: Data
    axes: tuple[str, ...]  # of weight; the softmax axis is last, size 1 in m and total


@dataclass(frozen=True, slots=True)
class Result:
    """Unrounded results in the compute dtype, laid out by their patterns."""

    states: dict[str, Data]
    outputs: dict[str, Data]
    lse: Data | None = None  # axes of lse_axes, only on request and for one softmax
    lse_axes: tuple[str, ...] = ()
