"""Tile sizes of the softmax family by target, element size and head dims."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attncc.codegen.target import shared_limit


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of one program instance's work.

    ``turned``: the columns of the value are the rows of the weighted sum's product. ``ahead``: the
    next block's scores may be multiplied before a block's values are.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    turned: bool = False
    ahead: bool = True

    @property
    def still_turned(self) -> bool:
        """Whether the sum is turned: as it was changed, a tile may no longer be one of those."""
        return self.turned and (self.block_m, self.num_warps) == (TURNED.block_m, TURNED.num_warps)


TURNED = Tiles(64, 64, 8, 3, turned=True)
"""For values of 512 columns whose tile is the keys' tile too.

A row's sum is 2 KB of registers, so two warpgroups have to share the columns of 64 rows: each
multiplies half of the value's columns (as rows of a wgmma) with the weights of all rows, which both
read in shared memory. ``num_stages`` 3 is two blocks of keys there.
"""


PAGED_STAGES = 5
"""Most stages that the rule gives four warps through pages: with blocks of 128 keys Triton 3.6
spills with more. An entry of the table may have more of smaller blocks."""


FEW_PAGES = 4
"""Pages of a block below which they cost little."""


def padded(width: int) -> int:
    """The tile width of an axis: a power of two that a tensor core takes."""
    return max(16, 1 << max(width - 1, 0).bit_length())


def choose_tiles(
    target: str,
    element: int,
    blocks_k: tuple[int, ...],
    block_e: int,
    rows: int,
    shared: int,
    *,
    scores: int = 1,
    more_queries: int = 0,
) -> Tiles:
    """Pick tiles that keep accumulators in registers and blocks of keys in shared memory.

    Args:
        target: ``sm_90`` and the like.
        element: bytes of an operand's element.
        blocks_k: padded contraction lengths.
        block_e: padded columns of the value.
        rows: about how many rows (tokens times group) a sequence has.
        shared: the dot whose key tile is the value tile too, or -1.
        scores: about how many values a score keeps of each of a tile's elements.
        more_queries: columns of query tiles besides those of ``blocks_k``.
    """
    width = max(*blocks_k, block_e) if blocks_k else block_e
    wide = target.startswith("sm_90") and element == 2 and shared >= 0 and scores <= 2
    if wide and block_e == 512 and rows > 32 and not more_queries:
        room = TURNED.block_m * sum(blocks_k) + 2 * TURNED.block_n * sum(blocks_k)
        if element * (room + TURNED.block_m * TURNED.block_n) <= shared_limit(target):
            return TURNED
    tiles = _few(rows, width, element) if rows <= 64 else _many(width, element)
    if scores > 2 and tiles.block_n > 32:
        tiles = replace(tiles, block_n=32)
    query = sum(blocks_k) + more_queries
    keys = sum(blocks_k) + (0 if shared >= 0 else block_e)
    limit = shared_limit(target)
    while _bytes(tiles, query, keys, element) > limit:
        if tiles.num_stages > 2:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.block_n > 16:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        elif tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=1)
        else:
            break
    return tiles


def _bytes(tiles: Tiles, query: int, keys: int, element: int) -> int:
    """Shared memory: the query tile, and ``num_stages`` blocks of keys and values."""
    return element * (tiles.block_m * query + tiles.num_stages * tiles.block_n * keys)


def _few(rows: int, width: int, element: int) -> Tiles:
    """Decode: bandwidth decides, so many blocks in flight."""
    block_m = padded(rows)
    if element == 4:  # products of fp32 take three tensor-core passes, and registers for them
        return Tiles(min(block_m, 32), 32, 4, 3) if width <= 128 else Tiles(16, 16, 8, 3)
    if width <= 128:
        return Tiles(block_m, 64, 4, 4)
    if width <= 256:
        return Tiles(block_m, 64, 4 if block_m < 64 else 8, 3)
    return Tiles(block_m, 32, 8, 4)


def _many(width: int, element: int) -> Tiles:
    """Prefill: tensor cores decide."""
    if element == 4:
        return Tiles(
            64 if width <= 64 else 32, 32 if width <= 128 else 16, 4 if width <= 128 else 8, 2
        )
    if width <= 128:
        return Tiles(128, 64, 8, 3)
    if width <= 256:
        return Tiles(128, 32, 8, 3)
    return Tiles(64, 32, 8, 2)


def through_pages(tiles: Tiles) -> Tiles:
    """The same tiles for a history in pages.

    Triton divides the stages between the table's entries and the keys, so it takes twice the
    distance to keep as many blocks of keys in flight.
    """
    stages = 2 * tiles.num_stages - 1
    return replace(tiles, num_stages=stages if tiles.num_warps > 4 else min(stages, PAGED_STAGES))
