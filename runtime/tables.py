"""Device work beside the kernels: tables that say which program instance works on which piece.

All of it can be recorded and is done again at every call (:mod:`attncc.runtime.recorder`).
"""

from __future__ import annotations

import torch

from attncc.runtime.recorder import step


@step
def as_int32(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers as dense int32; the same tensor if they are that."""
    return values.to(torch.int32).contiguous()


@step
def clear(states: torch.Tensor) -> None:
    """Set states to zero, in place."""
    if states.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():  # kernels write such tensors in every mode; torch refuses
            states.zero_()
    else:
        states.zero_()


@step
def grow(lengths: torch.Tensor, tokens: int, cu_seqlens: torch.Tensor | None) -> None:
    """Add this call's tokens to the lengths of a cache, in place.

    Args:
        lengths: int32 ``[B]``.
        tokens: of each sequence, where no ``cu_seqlens`` says it.
        cu_seqlens: int32 ``[B + 1]`` of a packed call.
    """
    added = tokens if cu_seqlens is None else cu_seqlens[1:] - cu_seqlens[:-1]
    if lengths.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():  # kernels write such tensors in every mode; torch refuses
            lengths.add_(added)
    else:
        lengths.add_(added)


def staying(units: int, device: torch.device) -> int:
    """Programs that share units of work, one a multiprocessor; without a device two units each."""
    if device.type != "cuda":
        return -(-units // 2)
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return min(units, count)


def tile_capacity(rows: int, sequences: int, block: int) -> int:
    """Most tiles of ``block`` rows that packed sequences can need."""
    return rows // block + sequences


@step
def tile_table(
    cu_seqlens: torch.Tensor, block: int, rows: int, *, least: int = 0, group: int = 1
) -> torch.Tensor:
    """Cut packed sequences into tiles; no tile crosses a boundary, and nothing is read by the host.

    Args:
        cu_seqlens: int32 ``[B + 1]``.
        block: rows of a tile.
        rows: rows of all sequences together (an upper bound will do).
        least: tiles of an empty sequence, 0 or 1.
        group: rows of a token.

    Returns:
        int32 ``[capacity, 2]``: sequence and first row within it; -1 and 0 for unused places. Tiles
        of one sequence are neighbours, in order.
    """
    sequences = cu_seqlens.numel() - 1
    capacity = tile_capacity(rows, sequences, block)
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]) * group
    tiles = ((lengths + block - 1) // block).clamp(min=least)
    ends = torch.cumsum(tiles, 0, dtype=torch.int32)
    at = torch.arange(capacity, device=cu_seqlens.device, dtype=torch.int32)
    sequence = torch.searchsorted(ends, at, right=True, out_int32=True)
    inside = sequence.clamp(max=max(sequences - 1, 0))
    start = (at - (ends - tiles)[inside]) * block
    used = sequence < sequences
    table = torch.stack([torch.where(used, sequence, -1), torch.where(used, start, 0)], 1)
    return table.to(torch.int32)


@step
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
    pieces = [values.narrow(dim, 0, whole).reshape(shape)] if whole else []
    if whole < values.shape[dim]:
        pieces.append(values.narrow(dim, whole, values.shape[dim] - whole).unsqueeze(dim))
    ends = [torch.aminmax(p, dim=dim + 1) for p in pieces]  # one kernel for both
    if not ends:
        least, most = values, values
    elif len(ends) == 1:
        least, most = ends[0]
    else:
        least, most = (torch.cat([pair[i] for pair in ends], dim) for i in range(2))
    if values.is_floating_point():
        least = least.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        most = most.nan_to_num(torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return least.contiguous(), most.contiguous()
