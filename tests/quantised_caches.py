"""Quantised caches for every tier of tests: poisoned ones, values at the edges of e4m3, bits."""

import math
from dataclasses import replace

import torch

from attncc.runtime.quantised import Quantised, QuantisedTensor

STORAGES = [
    Quantised(),
    Quantised(scale="ue8m0"),
    Quantised(block=32),
    Quantised(block=64, scale="ue8m0"),
]
NAMES = ["rows fp32", "rows ue8m0", "blocks of 32 fp32", "blocks of 64 ue8m0"]

SPECIAL = [
    0.0, -0.0, 448.0, 449.0, 463.0, 464.0, 465.0, 1000.0, -1000.0, 2.0**-6, 2.0**-9, 2.0**-10,
    1.5 * 2.0**-9, 2.5 * 2.0**-9, -(2.0**-9), 17.0, 18.0, 19.0, 1e-3, 3e-5, 1.0, -1.0,
]  # fmt: skip


def special_rows(width):
    """Rows [n, width], fp32: what rounding, saturation, the choice of scale and NaN are about."""
    rows = [torch.tensor(SPECIAL)]
    rows += [torch.tensor([448.0, x]) for x in SPECIAL]  # scale 1: elements as they are
    rows += [torch.tensor([x]) for x in SPECIAL]
    rows += [
        torch.tensor(values)
        for values in (
            [0.0],
            [-0.0],
            [math.inf],
            [math.inf, -math.inf, 3.0],
            [math.nan, 2.0, -math.nan],
            [math.nan],
            [math.nan, math.inf, -0.0],
            [1e-38, -3e-38],
            [1e-40],
            [2.0**-126 * 448, 2.0**-130],
            [3e38, -1e38, 1.0],
            [448.0 * 2.0**5],
            [448.0 * 2.0**5 * (1 + 2.0**-7)],
            [2.0**-17, 2.0**-18],
        )
    ]
    return torch.stack([x.repeat(-(-width // len(x)))[:width] for x in rows])


def poisoned(cache):
    """The cache with NaN in every element and scale."""
    for held in cache.tensors.values():
        held.view(torch.uint8).fill_(0x7F) if held.element_size() == 1 else held.fill_(math.nan)
    for scales in cache.scales.values():
        scales.fill_(255) if scales.dtype == torch.uint8 else scales.fill_(math.nan)
    return cache


def copy_of(cache):
    """The same cache in other memory."""
    held = {n: t.clone() for n, t in cache.tensors.items()}
    scales = {n: t.clone() for n, t in cache.scales.items()}
    name = "pages" if hasattr(cache, "pages") else "tensors"
    return replace(cache, **{name: held}, scales=scales, lengths=cache.lengths.clone())


def bits(cache):
    """Every stored bit by name, as whole numbers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    found = {n: t.view(kinds[t.element_size()]) for n, t in cache.tensors.items()}
    return found | {
        f"scales of {n}": t.view(kinds[t.element_size()]) for n, t in cache.scales.items()
    }


def assert_same_bits(a, b):
    """Two caches hold the same bits."""
    left, right = bits(a), bits(b)
    assert left.keys() == right.keys()
    for name in left:
        differ = (left[name] != right[name]).nonzero()
        assert not len(differ), f"{name}: {len(differ)} elements differ, first {differ[0].tolist()}"


def every_byte(dtype, device="cpu"):
    """One query over one key whose value holds every e4m3 number: arguments, and the output."""
    data = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scale = torch.ones(1, 1, 1, 1, device=device)
    row = data.view(1, 1, 1, 256)
    q = torch.ones(1, 1, 4, 256, dtype=dtype, device=device)
    args = {"q": q, "k": QuantisedTensor(row.new_zeros(row.shape), scale),
            "v": QuantisedTensor(row.clone(), scale)}  # fmt: skip
    return args, data.float().expand(1, 1, 4, 256).to(dtype)
