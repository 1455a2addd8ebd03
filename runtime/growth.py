"""Who adds a call's tokens to the lengths of its cache: a kernel that reads them, or nobody yet.

A call that appends grows its lengths once all of it has read them. A kernel whose last program is
the last to read a length can do so itself, which saves a launch; whoever runs such a kernel asks
:func:`tokens` how much to add. Where no kernel has done it, the caller does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Growth:
    """What one call wants added.

    Attributes:
        lengths: int32 ``[B]``, the cache's own tensor.
        tokens: of each sequence.
        done: a launched kernel adds them.
    """

    lengths: torch.Tensor
    tokens: int
    done: bool = False


_CURRENT: ContextVar[Growth | None] = ContextVar("growth", default=None)


@contextmanager
def wanted(lengths: torch.Tensor, tokens: int) -> Iterator[Growth]:
    """Within this, the first kernel over these lengths that can add to them does."""
    growth = Growth(lengths, tokens)
    token = _CURRENT.set(growth)
    try:
        yield growth
    finally:
        _CURRENT.reset(token)


def tokens(lengths: torch.Tensor) -> int:
    """What the kernel that is about to be launched has to add to lengths: nothing but once.

    Other calls within one (the trials of a kernel) have lengths of their own.
    """
    growth = _CURRENT.get()
    if growth is None or growth.done or growth.lengths is not lengths:
        return 0
    growth.done = True
    return growth.tokens
