"""Into how many ranges the keys of a softmax are cut, and which kernel combines them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from attncc.codegen.plan_softmax import MergePlan
from attncc.runtime.kernels import Kernel

KEYS_A_SPLIT = 4
"""Blocks of keys below which a split does not pay for its merge."""

PAIRED = 2
"""Programs of four warps over e4m3 that a multiprocessor holds at once; one leaves it half idle."""

START = 3
"""What a program takes besides its blocks, in blocks: queries, first keys, what leaves."""
MERGE, MERGED = 1, 55
"""What a merge takes in blocks of keys (of 2 us), and how many programs' partials take one more.
Measured with 64 rows of 512 columns: 128 programs 6.6 us, 192 10.6, 256 11.6."""


def split_count(programs: int, keys: int, block_n: int, sms: int) -> int:
    """How many ranges to cut the keys into, so that one wave of programs is just not passed.

    Args:
        programs: program instances without splitting.
        keys: most keys a sequence can have.
        block_n: keys of a block.
        sms: multiprocessors of the device, times the programs that one holds.
    """
    room = sms // max(programs, 1)
    most = -(-keys // (KEYS_A_SPLIT * block_n))
    return max(1, min(room, most))


@lru_cache(maxsize=1024)
def even_splits(programs: int, blocks: int, sms: int, least: int = KEYS_A_SPLIT) -> int:
    """The number of ranges that is over first where one program fills a multiprocessor.

    Counted in blocks of keys: a wave lasts as long as a program of it. The last wave is rarely
    full, and shorter programs leave less of it empty; each starts and is merged, which costs.

    Args:
        programs: program instances without splitting.
        blocks: blocks of keys that a sequence can have.
        sms: multiprocessors of the device.
        least: blocks below which a split does not pay.
    """
    most = min(max(1, blocks // least), max(1, 4 * sms // max(programs, 1)))

    def cost(splits: int) -> tuple[float, int]:
        waves = -(-programs * splits // sms)
        merge = MERGE + programs * splits / MERGED if splits > 1 else 0.0
        return waves * (-(-blocks // splits) + START) + merge, splits

    return min(map(cost, range(1, most + 1)))[1]


def merging(ranges: int, fewer: Sequence[Kernel], merge: Kernel | None) -> Kernel | None:
    """The kernel that combines a row's partials: one that reads no more at a time than it has to.

    Args:
        ranges: partials of a row.
        fewer: kernels that read fewer than the usual one at a time, fewest first.
        merge: the usual one.
    """
    for kernel in fewer:
        assert isinstance(kernel.plan, MergePlan)
        if ranges <= kernel.plan.block_i:
            return kernel
    return merge
