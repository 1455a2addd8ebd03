"""a22: element offsets on both sides of 2^31, in memory of which only a few pages are touched.

Real sizes come from the reports; the views name the corners of their tensors.
"""

import tempfile

import pytest
import torch

import attncc as ac
from tests.gpu.checking import check

LIMIT = 2**31


def corner(shape: list[int], strides: list[int], seed: int) -> torch.Tensor:
    """A bf16 view whose last elements lie where these strides put them.

    Only the places that are used hold values: of the outermost axis 0, 3 and the last.
    """
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    with tempfile.NamedTemporaryFile() as sparse:  # a hole in a file needs no memory behind it
        sparse.truncate(2 * (last + 1))
        storage = torch.from_file(sparse.name, shared=True, size=last + 1, dtype=torch.bfloat16)
    view = storage.as_strided(shape, strides)
    generator = torch.Generator().manual_seed(seed)
    for at in sorted({0, min(3, shape[0] - 1), shape[0] - 1}):
        view[at] = torch.randn(shape[1:], generator=generator)
    return view


def far(tokens: int, kept: int, heads: int, dim: int, seed: int) -> torch.Tensor:
    """The last ``kept`` tokens of two sequences, sixteen apart, in ``[16, tokens, 64, 128]``."""
    return corner([2, kept, heads, dim], [15 * tokens * 64 * 128, 64 * 128, 128, 1], seed)


@pytest.mark.parametrize("tokens", [17476, 17477])
def test_a22_rows_of_a_prefill(tokens: int) -> None:
    assert (((16 - 1) * tokens * 64 + 63) * 128 < LIMIT) is (tokens == 17476)
    q, k, v = (far(tokens, 12, 2, 16, i) for i in range(3))
    check(ac.ops.gated_delta_rule, q, k, v)
    check(ac.ops.attention, q, k, v)


@pytest.mark.parametrize("slot", [4095, 4096])
def test_a22_a_state_beyond_4096_slots(slot: int) -> None:
    pool = corner([slot + 1, 1, 16, 16], [32 * 128 * 128, 128 * 128, 128, 1], 0)
    q, k, v = (torch.randn(2, 1, 1, 16).bfloat16() for _ in range(3))
    slots = torch.tensor([slot, 0], dtype=torch.int32)
    held = pool[[slot, 0]].clone()
    want = ac.ops.gated_delta_rule.reference(q, k, v, s=held)
    o = ac.ops.gated_delta_rule.decode(q, k, v, s=ac.StatePool(pool, slots), backend="triton")
    for found, exact in ((o, want.o), (pool[[slot, 0]], want.s)):
        error = (found.double() - exact).abs().max()
        assert error <= 2 * 2**-7 * exact.abs().max()


@pytest.mark.parametrize("block", [LIMIT // (16 * 2 * 8 * 128) - 1, LIMIT // (16 * 2 * 8 * 128)])
def test_a22_a_page_beyond_2_31_elements(block: int) -> None:
    # keys and values interleaved: [blocks, 2, 16, 8, 128]
    both = corner([block + 1, 2, 16, 1, 16], [2 * 16 * 8 * 128, 16 * 8 * 128, 8 * 128, 128, 1], 0)
    pages = {"k": both[:, 0], "v": both[:, 1]}
    table = torch.tensor([[block, 3]], dtype=torch.int32)
    cache = ac.PagedCache(pages, table, torch.tensor([20], dtype=torch.int32))
    q, k, v = (torch.randn(1, 1, 1, 16).bfloat16() for _ in range(3))
    full = [torch.cat([x[block], x[3]])[:20] for x in (pages["k"], pages["v"])]
    full = [torch.cat([x, y[0]])[None] for x, y in zip(full, (k, v), strict=True)]
    want = ac.ops.attention.reference(q, *full)
    o = ac.ops.attention.decode(q, k, v, cache, backend="triton")
    assert (o.double() - want).abs().max() <= 2 * 2**-7 * want.abs().max()
    assert torch.equal(pages["k"][3, 4], k[0, 0])
