"""Strategies of hypothesis that several tests draw from; small sizes, every corner of them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import strategies as st

from attncc.dsl.axes import Pattern

AXES = ("B", "T", "S", "H", "Hkv", "G", "D", "K", "V", "N", "W")


@st.composite
def patterns(draw: st.DrawFn, axes: Sequence[str] = AXES) -> Pattern:
    """A layout: distinct axes in any order, neighbours grouped at will."""
    names = draw(st.lists(st.sampled_from(axes), unique=True, max_size=6))
    dims: list[tuple[str, ...]] = []
    for name in names:
        if dims and draw(st.booleans()):
            dims[-1] = (*dims[-1], name)
        else:
            dims.append((name,))
    return Pattern(tuple(dims))


@st.composite
def cuts(draw: st.DrawFn, length: int, pieces: int = 3) -> list[int]:
    """Lengths of consecutive pieces of a sequence, empty ones among them."""
    inner = draw(st.lists(st.integers(0, length), min_size=pieces - 1, max_size=pieces - 1))
    edges = [0, *sorted(inner), length]
    return [stop - start for start, stop in pairwise(edges)]


def seeds() -> st.SearchStrategy[int]:
    """A seed for :func:`randn`."""
    return st.integers(0, 2**31 - 1)


def randn(
    seed: int, *shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> torch.Tensor:
    """Standard normal values; the same for the same seed and shape on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def whole(seed: int, *shape: int, low: int = -3, high: int = 3) -> torch.Tensor:
    """Small whole numbers in fp64: sums of them are exact in any order, and ties are common."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).double()
