"""Tables made on the device from ``cu_seqlens``: which program instance works on which piece."""

from __future__ import annotations

import torch


def tile_capacity(rows: int, sequences: int, block: int) -> int:
    """Most tiles of ``block`` rows that packed sequences can need."""
    return rows // block + sequences


def tile_table(cu_seqlens: torch.Tensor, block: int, rows: int, *, least: int = 0) -> torch.Tensor:
    """Cut packed sequences into tiles; no tile crosses a boundary, and nothing is read by the host.

    Args:
        cu_seqlens: int32 ``[B + 1]``.
        block: rows of a tile.
        rows: rows of all sequences together (an upper bound will do).
        least: tiles of an empty sequence, 0 or 1.

    Returns:
        int32 ``[capacity, 2]``: sequence and first row within it; -1 and 0 for unused places. Tiles
        of one sequence are neighbours, in order.
    """
    sequences = cu_seqlens.numel() - 1
    capacity = tile_capacity(rows, sequences, block)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    tiles = ((lengths + block - 1) // block).clamp(min=least)
    ends = torch.cumsum(tiles, 0, dtype=torch.int32)
    at = torch.arange(capacity, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(ends, at, right=True, out_int32=True)
    inside = sequence.clamp(max=max(sequences - 1, 0))
    start = (at - (ends - tiles)[inside]) * block
    used = sequence < sequences
    table = torch.stack([torch.where(used, sequence, -1), torch.where(used, start, 0)], 1)
    return table.to(torch.int32)


def tile_offsets(cu_seqlens: torch.Tensor, block: int) -> torch.Tensor:
    """int32 ``[B + 1]``: index of each sequence's first tile in :func:`tile_table`."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    tiles = (lengths + block - 1) // block
    return torch.nn.functional.pad(torch.cumsum(tiles, 0, dtype=torch.int32), (1, 0))


def block_ranges(values: torch.Tensor, dim: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest value of each block along a dimension.

    A block that holds a NaN is unbounded, and so is never taken for one that surely hides or shows
    something.

    Args:
        values: whole or real numbers.
        dim: the dimension that is cut.
        block: elements of a block; the last may have fewer.

    Returns:
        Two tensors with blocks in place of elements.
    """
    whole = values.shape[dim] // block * block
    shape = (*values.shape[:dim], whole // block, block, *values.shape[dim + 1 :])
    pieces = [values.narrow(dim, 0, whole).reshape(shape)]
    if whole < values.shape[dim]:
        pieces.append(values.narrow(dim, whole, values.shape[dim] - whole).unsqueeze(dim))
    least, most = (
        torch.cat([getattr(p, name)(dim + 1) for p in pieces if p.shape[dim]], dim)
        if values.shape[dim]
        else values.contiguous()
        for name in ("amin", "amax")
    )
    if values.is_floating_point():
        least = least.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        most = most.nan_to_num(torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return least.contiguous(), most.contiguous()
