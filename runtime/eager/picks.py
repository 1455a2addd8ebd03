"""Top-k in fp32 with one call of torch: score and position as one whole number, all different."""

from __future__ import annotations

import torch

from attncc.dsl.axes import union
from attncc.dsl.interp import Env, Named, evaluate
from attncc.dsl.ir import TopK

LAST = (1 << 31) - 1
"""The greatest position, and the bits of a number that a position takes."""


def picks(node: TopK, env: Env) -> Named:
    """The picks of a block of queries, in the contract's order.

    Args:
        node: the top-k.
        env: values of the block, in fp32.
    """
    score = evaluate(node.score, env)
    seen = None if node.where is None else evaluate(node.where, env)
    axes = union(score.axes, () if seen is None else seen.axes)
    axes = (*(a for a in axes if a != node.over), node.over)
    shape = [env.sizes[a] for a in axes]
    order = ordered(score.aligned(axes).float().expand(shape))
    if seen is not None:
        order = order.masked_fill(~seen.aligned(axes), -LAST - 1)
    length = shape[-1]
    places = LAST - torch.arange(length, device=env.device)
    best = ((order << 31) + places).topk(min(node.k, length), dim=-1).values
    found = torch.where(best >> 31 == -LAST - 1, -1, LAST - (best & LAST))
    found = torch.nn.functional.pad(found, (0, node.k - found.shape[-1]), value=-1)
    return Named(found, (*axes[:-1], node.axis))


def ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 between -2^31 and 2^31 that orders as fp32 numbers do, NaN below -inf, zeros equal.

    -2^31 itself is none of them.
    """
    bits = torch.where(x == 0, 0.0, x).contiguous().view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ LAST, bits)
    return torch.where(x.isnan(), -LAST, order)
