"""Declarations by seed, for kernels: dims that tiles know, and calls of them."""

from random import Random

import torch

from tests.drawn.affine import draw_affine
from tests.drawn.calls import Drawing, draw_call
from tests.drawn.score import draw_score

DIMS = (16, 32, 64)
SEEDS = 200
"""Seeds that the GPU tier runs."""


def drawing(
    seed: int, *, dims: tuple[int, ...] = DIMS, lengths: tuple[int, ...] | None = None,
    device: str = "cpu", dtypes: tuple[torch.dtype, ...] | None = None,
) -> Drawing:  # fmt: skip
    """The declaration of a seed and one call: scans for even seeds, folds for odd ones."""
    r = Random(seed)
    drawn = draw_score(r, dims) if seed % 2 else draw_affine(r, dims, spoil=4)
    more = {} if dtypes is None else {"dtypes": dtypes}
    if lengths is not None:
        more["lengths"] = lengths
    return draw_call(r, drawn, device=device, **more)
