"""One unit key for all tokens under a weak gate: the delta rule's answer has a closed form."""

import math

import torch


def weak_gate(tokens, dtype, size=128, device="cpu"):
    """q, k, v, g and beta ``[1, tokens, 1, ...]`` of the report: a beta near 1, a gate near 0."""
    k = torch.full((1, tokens, 1, size), size**-0.5, dtype=dtype, device=device)
    v = torch.randn(1, tokens, 1, size, device=device).to(dtype)
    g = torch.full((1, tokens, 1), -5 / (1 + math.exp(12)), device=device)
    return k, k, v, g, torch.full_like(g, 1 / (1 + math.exp(-8)))


def answer(args):
    """The state ``[K, V]`` and the outputs ``[tokens, V]`` in fp64.

    With one key the state is ``k (x) w``, and ``w = exp(g) (1 - beta k.k) w + beta v``.
    """
    k, _, v, g, beta = (x[0, :, 0].cpu().double() for x in args)
    square = k[0] @ k[0]
    kept = g.exp() * (1 - beta * square)
    w, rows = torch.zeros_like(v[0]), []
    for keep, weight, new in zip(kept, beta, v, strict=True):
        w = keep * w + weight * new
        rows.append(w)
    return k[0][:, None] * w, torch.stack(rows) * square * len(k[0]) ** -0.5
