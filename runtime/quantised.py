"""Quantised storage of histories: e4m3 elements beside scales, chosen by whoever allocates a cache.

A history's tensor holds e4m3 numbers in its own layout; beside it lies a tensor of scales, one for
each row of the innermost axis (a token and head), or one for each block of it:

    x[..., i] = data[..., i] * scale[..., i // block]

The scales of ``[B S Hkv D]`` are ``[B Hkv D' S]``, D' = D / block, tokens innermost, so that a
kernel reads those of neighbouring tokens together; pages ``[pages page Hkv D]`` have
``[pages Hkv D' page]`` whatever the order of the pages' own axes. Scales are fp32, or ue8m0: a
power of two as its exponent in uint8, 2^(e - 127), 255 is NaN (Open Compute Project, Microscaling
Formats 1.0, 2023).

Quantising a row (or block), in fp32: the scale is the largest finite magnitude over 448, at least
2^-126, and 1 where nothing finite differs from zero; ue8m0 takes the next power of two that is not
less. An element becomes the nearest e4m3 number to x / scale, ties to even; infinity becomes the
largest (448 scales), NaN stays NaN (0x7F), and so does the sign of zero. The torch lowering, the
reference and the kernels store the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attncc.codegen.quantised import LARGEST, SMALLEST
from attncc.dsl.axes import Pattern, block_axis, scales_of
from attncc.dsl.errors import ArgumentError
from attncc.dsl.interp import Named, unpack

E4M3 = torch.float8_e4m3fn
BLOCKS = (32, 64, 128)
"""Sizes that a block of a row may have; a row may also have one scale."""

E8M0 = torch.float8_e8m0fnu
"""torch's own dtype of ue8m0; it has few operations, so its bytes are taken as uint8."""

_SCALES: Mapping[object, torch.dtype] = {
    torch.float32: torch.float32, "fp32": torch.float32, "ue8m0": torch.uint8,
    torch.uint8: torch.uint8, E8M0: torch.uint8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantised:
    """A storage type for a cache's histories: what ``dtype=`` of a cache's allocation may also be.

    Attributes:
        dtype: of the elements: ``torch.float8_e4m3fn``.
        block: elements with one scale, 32, 64 or 128, along the innermost axis; None for one scale
            a row, of any length.
        scale: ``torch.float32``, or ``"ue8m0"`` for powers of two in one byte.

    Raises:
        ArgumentError: another dtype, block or scale.
    """

    dtype: torch.dtype = E4M3
    block: int | None = None
    scale: torch.dtype | str = torch.float32

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("dtype", self.dtype, (E4M3,)),
            ("block", self.block, (None, *BLOCKS)),
            ("scale", self.scale, tuple(_SCALES)),
        ):
            if value not in allowed:
                raise ArgumentError(
                    "no such quantised storage",
                    argument=name, expected=" or ".join(map(str, allowed)), found=value,
                )  # fmt: skip

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the tensor of scales: fp32 or uint8."""
        return _SCALES[self.scale]


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """A whole history as it is stored, for a call without a cache object.

    Attributes:
        data: e4m3, in the argument's pattern.
        scales: fp32, or uint8 (ue8m0), laid out as this module says: ``[B Hkv D' S]`` for
            ``[B S Hkv D]``; packed calls without B.
    """

    data: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, pattern: Pattern, storage: Quantised) -> QuantisedTensor:
        """Quantise a history.

        Args:
            x: fp32, bf16 or fp16, in ``pattern``; its innermost memory axis is one axis.
            pattern: for instance ``parse("B S Hkv D")``.
            storage: blocks and scales.

        Raises:
            ArgumentError: the innermost memory axis is several axes, or no multiple of the block.
        """
        if len(pattern.dims[-1]) != 1 or any(len(d) != 1 for d in pattern.dims):
            raise ArgumentError(
                "several axes in one memory axis", expected="one axis each", found=f"[{pattern}]"
            )
        axis, width = pattern.axes[-1], x.shape[-1]
        block = storage.block or width
        if not block or width % block:
            raise ArgumentError(
                "the block does not divide the row", axis=axis, expected=block, found=width
            )
        sizes = dict(zip(pattern.axes, x.shape, strict=True))
        data, scales = quantise(x, pattern, axis, block, storage.scale_dtype, sizes)
        return QuantisedTensor(data, scales)


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a call's history, checked.

    Attributes:
        tensor: fp32 or uint8, in ``pattern``.
        pattern: its memory axes.
        axis: the axis that the scales run along.
        block: elements of that axis with one scale.
    """

    tensor: torch.Tensor
    pattern: Pattern
    axis: str
    block: int

    def sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Every axis' size, the blocks' included."""
        return {**sizes, block_axis(self.axis): sizes[self.axis] // self.block}


def quantise(
    x: torch.Tensor, pattern: Pattern, axis: str, block: int, dtype: torch.dtype,
    sizes: Mapping[str, int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rows as e4m3 and scales, by the rule of this module.

    Args:
        x: fp32, bf16 or fp16.
        pattern: its memory axes.
        axis: the axis with the scales.
        block: elements of it with one scale.
        dtype: of the scales: fp32, or uint8 for ue8m0.
        sizes: every axis.

    Returns:
        e4m3 in the pattern of ``x``, and the scales in :func:`attncc.dsl.axes.scales_of` it.
    """
    named = unpack(x, pattern, dict(sizes))
    rest = tuple(a for a in named.axes if a != axis)
    rows = torch.unflatten(named.aligned((*rest, axis)).float(), -1, (-1, block))
    size = rows.abs()
    most = torch.where(size < math.inf, size, 0.0).amax(-1)
    # A tensor: torch on a GPU multiplies by the reciprocal of a number, which rounds twice.
    scale = (most / torch.full_like(most, LARGEST)).clamp_min(SMALLEST)
    stored = scale = torch.where(most > 0, scale, 1.0)
    if dtype == torch.uint8:  # the next power of two, by its exponent
        exponent = (scale.view(torch.int32) + 0x7FFFFF) >> 23
        stored, scale = exponent.to(torch.uint8), (exponent << 23).view(torch.float32)
    code = (rows / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    code = torch.where(code.isnan(), math.nan, code)
    data = Named(code.to(E4M3).flatten(-2), (*rest, axis)).aligned(named.axes)
    own = Named(stored, (*rest, block_axis(axis)))
    return data.reshape(x.shape), own.aligned(scales_of(pattern, axis).axes).contiguous()


def dequantise(
    data: torch.Tensor, pattern: Pattern, scales: Scales, sizes: Mapping[str, int],
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The numbers that a history's stored bits mean.

    Args:
        data: e4m3 in ``pattern``.
        pattern: its memory axes.
        scales: its scales.
        sizes: every axis.
        dtype: fp32 (one rounding, of the product) or fp64 (exact).

    Returns:
        The history in ``pattern``.
    """
    named = unpack(data, pattern, dict(sizes))
    rest = tuple(a for a in named.axes if a != scales.axis)
    real = named.aligned((*rest, scales.axis)).float().to(dtype)
    rows = torch.unflatten(real, -1, (-1, scales.block))
    factor = unpack(scale_values(scales.tensor), scales.pattern, scales.sizes(sizes))
    wide = factor.aligned((*rest, block_axis(scales.axis))).to(dtype).unsqueeze(-1)
    values = Named((rows * wide).flatten(-2), (*rest, scales.axis)).aligned(named.axes)
    return values.reshape(data.shape)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Scales as fp32; an exponent e as 2^(e - 127)."""
    if scales.dtype == torch.float32:
        return scales
    e = scales.int()
    bits = (e << 23).clamp_min(0x400000)  # 2^-127 is subnormal
    return torch.where(e == 255, math.nan, bits.view(torch.float32))


def as_bytes(scales: torch.Tensor) -> torch.Tensor:
    """ue8m0 as uint8, whichever of its dtypes it has; fp32 as it is."""
    return scales.view(torch.uint8) if scales.dtype == E8M0 else scales
