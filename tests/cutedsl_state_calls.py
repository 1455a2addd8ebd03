"""Calls of the state pass in CuTe-DSL, for tests on a GPU and for whoever builds kernels ahead."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.cutedsl_calls import Made, offsets
from tests.gdp_document import Shape
from tests.state_pass_ops import OPS, arguments

TOKENS = (1, 33, 64, 200)
PACKED = [[5], [0, 0], [1, 2, 31], [64, 0, 65], [130, 200, 33, 1, 0, 500, 2]]
ROWS = (2, 3, 4, 5)


def whole(
    name: str, tokens: int, sizes: tuple[int, int], *, batch: int = 2, heads: int = 3,
    dtype: torch.dtype = torch.bfloat16, rows: int = 2, given: bool = True,
    stored: torch.dtype = torch.float32,
) -> Callable[[Any], Made]:  # fmt: skip
    """A call over whole prompts."""

    def make(device: Any) -> Made:
        args, state = arguments(name, batch, tokens, heads, *sizes, dtype, device, rows)
        options = {"sizes": {"N": rows}} if name == "two_rows" else {}
        return OPS[name], args, options | ({"s": state.to(stored)} if given else {})

    return make


def packed(name: str, lengths: list[int], rows: int = 2) -> Callable[[Any], Made]:
    """A call over sequences that lie end to end, each with a state."""

    def make(device: Any) -> Made:
        args, state = arguments(name, 1, sum(lengths), 2, 128, 128, torch.bfloat16, device, rows)
        state = torch.randn(len(lengths), *state.shape[1:], device=device)
        options = {"sizes": {"N": rows}} if name == "two_rows" else {}
        options |= {"s": state, "cu_seqlens": offsets(device, lengths)}
        return OPS[name], [x[0] for x in args], options

    return make


def _calls() -> Iterator[tuple[str, Callable[[Any], Made]]]:
    for name in OPS:
        for tokens in TOKENS:
            yield f"{name} {tokens}", whole(name, tokens, (64, 64))
        yield f"{name} 128", whole(name, 200, (128, 128))
    for rows in ROWS:
        for tokens in (1, 21, 100):
            label = f"{rows} rows {tokens}"
            yield label, whole("two_rows", tokens, (128, 128), rows=rows)
        yield f"{rows} rows packed", packed("two_rows", [20, 0, 45, 1], rows)
    for sizes in ((128, 64), (64, 256)):
        yield f"delta {sizes}", whole("delta", 200, sizes, batch=1)
    yield "fp16", whole("delta", 200, (128, 128), dtype=torch.float16)
    yield "no state", whole("delta", 150, (128, 128), given=False)
    yield "a state of 16 bits", whole("delta", 100, (128, 128), stored=torch.bfloat16)
    yield "many systems", whole("delta", 300, (128, 128), batch=3, heads=16)
    yield "long, in segments", whole("delta", 2500, (128, 128), batch=1, heads=2)
    yield "linear in segments", whole("linear", 4000, (128, 128), batch=1, heads=2)
    for lengths in PACKED:
        yield f"packed {lengths}", packed("delta", lengths)
    yield "packed in segments", packed("delta", [0, 2400, 100])


CALLS = dict(_calls())
"""Every call by name: makes its arguments on a device."""

PRODUCTS = {
    "n1, more values": Shape((200, 0, 70), 1, (1, 1, 3), 64, 128, torch.float16),
    "n2": Shape((130, 64), 2, (2, 2, 2), 128, 128),
    "n3, keys of the values": Shape((100, 1), 3, (2, 4, 4), 128, 64, gate=torch.bfloat16),
    "n4": Shape((33, 50), 4, (2, 2, 2), 128, 128),
}
"""Calls of ``attncc.gdp``, as ``tests.gdp_document.arguments`` makes them."""
