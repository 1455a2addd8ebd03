"""Sequences in pages, what an append to them takes, and the tensors that lie in pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attncc.dsl.axes import PAGES, scales_of
from attncc.dsl.build import Declaration
from attncc.runtime import bind_caches
from attncc.runtime.caches import PagedCache, scaled_axis
from attncc.runtime.owners.units import Units, alone


@dataclass(slots=True)
class Held:
    """One sequence.

    Attributes:
        pages: its pages in order.
        length: tokens it holds.
        version: counts changes of ``pages``.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    version: int = 0


def append_plan(
    held: Sequence[Held], counts: Sequence[int], page: int, pages: Units
) -> tuple[list[tuple[Held, int]], list[int]]:
    """What has to be there before tokens are appended.

    Of n sequences that append to one shared page all but the last copy it, unless others have it as
    well.

    Args:
        held: distinct sequences.
        counts: their new tokens.
        page: rows of a page.
        pages: the pages with their references.

    Returns:
        Shared pages to copy, as sequence and place, and how many more pages each sequence needs.
    """
    copies, left = [], Counter[int]()
    needed = [-(-(s.length + n) // page) for s, n in zip(held, counts, strict=True)]
    for s, n, need in zip(held, counts, needed, strict=True):
        for i in range(s.length // page, min(need, len(s.pages)) if n else 0):
            if pages.references(s.pages[i]) - left[s.pages[i]] > 1:
                left[s.pages[i]] += 1
                copies.append((s, i))
    return copies, [max(need - len(s.pages), 0) for s, need in zip(held, needed, strict=True)]


def page_views(
    declaration: Declaration, cache: PagedCache, sizes: Mapping[str, int]
) -> Iterator[tuple[torch.Tensor, int]]:
    """Every tensor that lies in pages, scales included, and its dimension that counts them."""
    for t in bind_caches.histories(declaration.name, declaration.tensors):
        pattern = cache.pattern(declaration.name, t)
        held = cache.tensors[t.name]
        if held.dtype.itemsize == 1:
            held = held.view(torch.uint8)  # torch copies rows of bytes by index, not of e4m3
        yield alone(held, pattern, PAGES, sizes)
        if t.name in cache.scales:
            layout = scales_of(pattern, scaled_axis(declaration.name, t))
            yield cache.scales[t.name], layout.dim_of(PAGES)
