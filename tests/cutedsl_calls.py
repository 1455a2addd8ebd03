"""Calls of CuTe-DSL prefill, for the tests on a GPU and for whoever builds their kernels ahead."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

import attncc as ac
from tests.gluon_ops import CASES, CROWDED, apart, extras

Made = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An op, its arguments and options."""
SHAPES = [(128, 128), (200, 200), (130, 700), (700, 130), (1, 300), (512, 0)]
LENGTHS = [
    (1, 1),
    (2, 33),
    (31, 64),
    (64, 0),
    (127, 129),
    (128, 1),
    (129, 500),
    (200, 31),
    (500, 2),
]
"""Tokens, and how many keys lie before them."""
PACKED = [
    [5], [0, 0], [1, 2, 31], [128, 0, 129], [64, 200, 33, 1, 0, 500, 2], [0, 127, 128],
]  # fmt: skip
OTHER_HISTORIES = [
    ([31, 0, 200], [64, 33, 500]), ([128, 1], [0, 129]), ([0, 127], [200, 1]),
    ([2, 2, 2], [1, 0, 2]),
]  # fmt: skip
KINDS = [(name, 128, torch.bfloat16) for name in CASES]
KINDS += [(name, 64, torch.float16) for name in ("causal", "windowed", "capped", "documents")]


def qkv(device, batch, tokens, history, heads, group, dim, dtype):
    """Random operands."""
    q = torch.randn(batch, tokens, heads * group, dim, device=device, dtype=dtype)
    k = torch.randn(batch, history, heads, dim, device=device, dtype=dtype)
    v = torch.randn(batch, history, heads, dim, device=device, dtype=dtype)
    return q, k, v


def offsets(device, lengths):
    """cu_seqlens of sequence lengths."""
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], device=device)


def op_of(name):
    """A case's op."""
    return {**CASES, **CROWDED, "apart": apart}[name]


def plain(name, tokens, history, dim, dtype, group=4, batch=2, heads=2, lse=True):
    """A call over whole prompts."""

    def make(device) -> Made:
        args = qkv(device, batch, tokens, history, heads, group, dim, dtype)
        more = extras(name, args[0], history)
        if name == "crowded":
            more = extras("documents", args[0], history) | extras("alibi", args[0], history)
            more["weight"] = torch.randn(batch, history, device=device)
        if name == "biased":
            more = {"bias": torch.randn(heads * group, tokens, history, device=device, dtype=dtype)}
        if name == "many_bands":
            more = {"width": 150}
        if name == "apart":
            args = (args[0].unflatten(2, (heads, group)), *args[1:])
        return op_of(name), args, {**more, "return_lse": lse}

    return make


def packed(name, lengths, keys=None, group=4, lse=True, dim=128):
    """A call over sequences that lie end to end."""

    def make(device) -> Made:
        total, rows = sum(lengths), sum(keys or lengths)
        q, _, _ = (x[0] for x in qkv(device, 1, total, 0, 2, group, dim, torch.bfloat16))
        _, k, v = (x[0] for x in qkv(device, 1, 0, rows, 2, group, dim, torch.bfloat16))
        more = extras(name, q[None], rows)
        own = {
            n: x[0] if isinstance(x, torch.Tensor) and x.dim() > 1 else x for n, x in more.items()
        }
        own["cu_seqlens"] = offsets(device, lengths)
        if keys is not None:
            own["cu_seqlens_k"] = offsets(device, keys)
        return op_of(name), (q, k, v), {**own, "return_lse": lse}

    return make


def _plain_calls() -> Iterator[tuple[str, Callable[[Any], Made]]]:
    for name, dim, dtype in KINDS:
        for tokens, history in SHAPES:
            if name != "documents" or (history and tokens <= history):
                label = f"{name} {dim} {tokens}x{history}"
                yield label, plain(name, tokens, history, dim, dtype)
    for name, group in (("causal", 1), ("causal", 6), ("alibi", 6), ("alibi", 8)):
        yield f"{name} G{group}", plain(name, 300, 400, 128, torch.bfloat16, group)
    for name in (*CROWDED, "apart"):
        yield name, plain(name, 300, 400, 128, torch.bfloat16)
    for dim in (64, 128):
        for i, (tokens, past) in enumerate(LENGTHS):
            own = plain("causal", tokens, tokens + past, dim, torch.bfloat16, batch=1 + 2 * (i % 2))
            yield f"{dim} {tokens} after {past}", own
    many = plain("causal", 2000, 2000, 64, torch.bfloat16, batch=3, heads=8, lse=False)
    yield "many more tiles than programs", many


def _packed_calls() -> Iterator[tuple[str, Callable[[Any], Made]]]:
    for lengths in PACKED:
        yield f"packed {lengths}", packed("causal", lengths)
    for lengths, keys in OTHER_HISTORIES:
        yield f"packed {lengths} over {keys}", packed("causal", lengths, keys)
    for name, group in (("windowed", 1), ("windowed", 6), ("gated", 4), ("documents", 4),
                        ("full", 6)):  # fmt: skip
        yield f"packed {name} G{group}", packed(name, [0, 300, 1, 64, 0, 135, 128], group=group)
    yield "packed without lse", packed("causal", [100, 70, 200], lse=False)
    yield "packed 64", packed("causal", [100, 70, 200], dim=64)


CALLS = dict((*_plain_calls(), *_packed_calls()))
"""Every call by name: makes its arguments on a device."""


def long_prompts(name: str) -> Callable[[Any], Made]:
    """A call of many tiles, to be repeated."""
    return plain(name, 3000, 3000, 128, torch.bfloat16, heads=4)


LONG = {name: long_prompts(name) for name in ("causal", "documents", "windowed")}
NO_LSE = plain("causal", 300, 300, 128, torch.bfloat16, lse=False)


def attention_of(q, k, v, **options):
    """The library's attention by this dialect."""
    return ac.ops.attention.prefill(q, k, v, backend="cutedsl", **options)
