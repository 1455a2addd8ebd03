"""Into how many ranges the keys of a softmax are cut."""

from __future__ import annotations

from functools import lru_cache

KEYS_A_SPLIT = 4
"""Blocks of keys below which a split does not pay for its merge."""

START = 3
"""What a program takes besides its blocks, in blocks: queries, first keys, what leaves."""
MERGE, MERGED = 3, 16
"""What a merge takes in blocks of keys, and how many splits take one more."""


def split_count(programs: int, keys: int, block_n: int, sms: int) -> int:
    """How many ranges to cut the keys into, so that one wave of programs is just not passed.

    Args:
        programs: program instances without splitting.
        keys: most keys a sequence can have.
        block_n: keys of a block.
        sms: multiprocessors of the device.
    """
    room = sms // max(programs, 1)
    most = -(-keys // (KEYS_A_SPLIT * block_n))
    return max(1, min(room, most))


@lru_cache(maxsize=1024)
def even_splits(programs: int, blocks: int, sms: int) -> int:
    """The number of ranges that is over first where one program fills a multiprocessor.

    Counted in blocks of keys: a wave lasts as long as a program of it. The last wave is rarely
    full, and shorter programs leave less of it empty; each starts and is merged, which costs.

    Args:
        programs: program instances without splitting.
        blocks: blocks of keys that a sequence can have.
        sms: multiprocessors of the device.
    """
    most = min(max(1, blocks // KEYS_A_SPLIT), max(1, 4 * sms // max(programs, 1)))

    def cost(splits: int) -> tuple[float, int]:
        waves = -(-programs * splits // sms)
        merge = MERGE + splits / MERGED if splits > 1 else 0.0
        return waves * (-(-blocks // splits) + START) + merge, splits

    return min(map(cost, range(1, most + 1)))[1]
