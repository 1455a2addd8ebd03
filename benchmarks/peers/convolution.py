"""Short convolutions elsewhere: torch's depthwise ``conv1d``, shifted sums compiled, and FLA."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import conv1d, pad, silu

from benchmarks.case import Inputs, Work


def plain(inputs: Inputs) -> Work:
    """``conv1d`` over channels first, copied so before the timing, then SiLU; whole sequences."""
    x, w = inputs["x"].transpose(1, 2).contiguous(), inputs["w"]
    width = w.shape[1]

    def fn() -> dict[str, torch.Tensor]:
        y = conv1d(x, w[:, None], padding=width - 1, groups=len(w))
        return {"o": silu(y[..., : x.shape[-1]]).transpose(1, 2)}

    return Work(fn)


def shifted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The convolution as a sum of shifted rows, in fp32, and SiLU."""
    width, tokens = w.shape[1], x.shape[1]
    rows = pad(x, (0, 0, width - 1, 0)).float()
    y = sum(rows[:, i : i + tokens] * w[:, i].float() for i in range(width))
    return silu(y).to(x.dtype)


def compiled(inputs: Inputs) -> Work:
    """:func:`shifted` under ``torch.compile(dynamic=False)``."""
    torch._dynamo.reset()
    call: Any = torch.compile(shifted, dynamic=False)
    x, w = inputs["x"], inputs["w"]
    return Work(lambda: {"o": call(x, w)})


def _fla(name: str) -> Any:
    """A function of FLA's convolutions, wherever its version has them."""
    places = ("fla.modules.convolution", "fla.modules.conv")
    for place in places:
        try:
            return getattr(import_module(place), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"no {name} in {' or '.join(places)}")


def fla(inputs: Inputs) -> Work:
    """FLA's Triton kernel over whole sequences."""
    call = _fla("causal_conv1d")
    x, w = inputs["x"], inputs["w"]

    def fn() -> dict[str, torch.Tensor]:
        found = call(x, w, activation="silu")
        return {"o": found[0] if isinstance(found, tuple) else found}

    return Work(fn)


def fla_update(inputs: Inputs) -> Work:
    """FLA's single-token update; it keeps all W rows, ``[B, D, W]``."""
    call = _fla("causal_conv1d_update")
    x, w = inputs["x"], inputs["w"]
    cache = pad(inputs["win"].transpose(1, 2), (1, 0)).contiguous()
    start = cache.clone()

    def fn() -> dict[str, torch.Tensor]:
        found = call(x, cache, weight=w, activation="silu")
        return {"o": found[0] if isinstance(found, tuple) else found}

    return Work(fn, reset=lambda: cache.copy_(start))
