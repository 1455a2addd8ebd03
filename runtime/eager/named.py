"""Algebra on named tensors, beside what ``dsl.interp`` has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from attncc.dsl.axes import Pattern, union
from attncc.dsl.interp import Named


def view(tensor: torch.Tensor, pattern: Pattern, sizes: Mapping[str, int]) -> Named:
    """A stored tensor with one dimension an axis, never a copy."""
    return Named(tensor.view([sizes[a] for a in pattern.axes]), pattern.axes)


def narrow(value: Named, axis: str, start: int, length: int) -> Named:
    """A range of an axis, as a view; the value itself if it has no such axis."""
    if axis not in value.axes:
        return value
    return Named(value.data.narrow(value.axes.index(axis), start, length), value.axes)


def rename(value: Named, old: str, new: str) -> Named:
    """The same data with one axis called otherwise."""
    return Named(value.data, tuple(new if a == old else a for a in value.axes))


def upcast(value: Named, dtype: torch.dtype) -> Named:
    """Reals in the compute dtype; whole numbers and truth values as they are."""
    if not value.data.is_floating_point() or value.data.dtype == dtype:
        return value
    return Named(value.data.to(dtype), value.axes)


def with_axis(value: Named, axis: str, size: int) -> Named:
    """The value with the axis, repeated along it (a view) if it had none."""
    if axis in value.axes:
        return value
    return Named(value.data.expand(size, *value.data.shape), (axis, *value.axes))


def split(value: Named, axis: str, outer: str, inner: str, size: int) -> Named:
    """An axis as ``outer`` pieces of ``size`` elements of ``inner``."""
    dim = value.axes.index(axis)
    axes = (*value.axes[:dim], outer, inner, *value.axes[dim + 1 :])
    shape = value.data.shape
    return Named(
        value.data.reshape(*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :]), axes
    )


def join(value: Named, outer: str, inner: str, axis: str) -> Named:
    """Two axes as one, the inner one fastest."""
    rest = tuple(a for a in value.axes if a not in (outer, inner))
    return Named(value.aligned((*rest, outer, inner)).flatten(-2), (*rest, axis))


def pad(value: Named, axis: str, count: int, fill: float) -> Named:
    """``count`` more elements of ``fill`` at the end of an axis."""
    if not count:
        return value
    dim = value.axes.index(axis)
    shape = [*value.data.shape[:dim], count, *value.data.shape[dim + 1 :]]
    return Named(torch.cat([value.data, value.data.new_full(shape, fill)], dim), value.axes)


def stack(values: Sequence[Named], axis: str) -> Named:
    """Values side by side along a new last axis; they broadcast against each other."""
    axes = union(*(v.axes for v in values))
    sizes = {a: n for v in values for a, n in zip(v.axes, v.data.shape, strict=True)}
    shape = [sizes[a] for a in axes]
    return Named(torch.stack([v.aligned(axes).expand(shape) for v in values], -1), (*axes, axis))


def plus(a: Named, b: Named) -> Named:
    """Sum, by axis name."""
    axes = union(a.axes, b.axes)
    return Named(a.aligned(axes) + b.aligned(axes), axes)


def times(a: Named, b: Named | None) -> Named:
    """Product, by axis name; None is 1."""
    if b is None:
        return a
    axes = union(a.axes, b.axes)
    return Named(a.aligned(axes) * b.aligned(axes), axes)


def contract(a: Named, b: Named, over: Sequence[str]) -> Named:
    """Product summed over axes."""
    axes = union(a.axes, b.axes)
    letter = {axis: chr(ord("a") + i) for i, axis in enumerate(axes)}
    kept = tuple(axis for axis in axes if axis not in over)
    left, right, out = ("".join(letter[x] for x in names) for names in (a.axes, b.axes, kept))
    return Named(torch.einsum(f"{left},{right}->{out}", a.data, b.data), kept)
