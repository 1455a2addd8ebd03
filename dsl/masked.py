"""Softmax and top-k over the last axis of plain tensors, by the contract's rules.

Each takes the mask itself and never a sentinel score, so that a visible -inf still counts. Only
methods of tensors are used, so that importing this does not import torch.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor as Data


def weights(score: Data, seen: Data | None, sink: Data | None) -> tuple[Data, Data, Data]:
    """Unnormalised softmax weights.

    Args:
        score: logits; the last axis is the one to sum over and may be empty.
        seen: truth values that broadcast to ``score``; None sees everything.
        sink: one more logit a row, size 1 in the last axis.

    Returns:
        exp(score - m) with 0 where unseen, the maximum m (of what is seen and the sink; -inf if
        there is nothing) and the sum of exponentials including the sink's.
    """
    x = score if seen is None else score.masked_fill(~seen, -inf)
    m = x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -inf)
    if sink is not None:
        m = m.maximum(sink)
    base = m.masked_fill(m == -inf, 0.0)
    weight = (x - base).exp()
    if seen is not None:
        weight = weight.masked_fill(~seen, 0.0)
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - base).exp()
    return weight, m, total


def best(score: Data, seen: Data, k: int) -> Data:
    """Indices of the k best seen places in the contract's total order, -1 where there are fewer.

    Seen before unseen, then score descending (NaN below -inf, -0.0 equal to 0.0), then index
    ascending.
    """
    x = score + 0.0  # -0.0 becomes 0.0
    length = x.shape[-1]
    nan = x.isnan()
    order = x.new_ones(x.shape).long().cumsum(-1) - 1  # 0 1 2 ... in every row
    # least significant key first, each pass stable
    for key in (-x.masked_fill(nan, -inf), nan.to(x.dtype), (~seen).to(x.dtype)):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    picked = order[..., :k]
    picked = picked.masked_fill(~seen.gather(-1, picked), -1)
    out = picked.new_full((*picked.shape[:-1], k), -1)
    out[..., : min(k, length)] = picked
    return out
