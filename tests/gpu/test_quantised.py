"""Quantised caches on the GPU: the oracle, the stored bits, CUDA graphs, large offsets."""

import itertools
import math

import pytest
import torch

import attncc as ac
from attncc.dsl.axes import parse
from tests.gpu.checking import DEVICE, check_in_cache, eager, offsets
from tests.gpu.test_caches import captured, int32, qkv
from tests.quantised_caches import (
    NAMES,
    STORAGES,
    assert_same_bits,
    copy_of,
    every_byte,
    poisoned,
    special_rows,
)
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
ATTENTION = ac.ops.attention
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BF16 = torch.bfloat16


@ac.op(out="B T (Hkv G) E")
def capped(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    width=ac.param(default=200, integer=True),
):  # fmt: skip
    """A soft cap and a window."""
    near = ac.causal & (ac.index("T") - ac.index("S") < width)
    score = 4.0 * ac.tanh(ac.dot(q, k, "D") * ac.rsqrt("D") / 4.0)
    return ac.dot(ac.softmax(score, "S", where=near), v, "S")


@ac.op(out="B T H R")
def latent(
    q=ac.Activation("B T H R"), r=ac.Activation("B T H P"), c=ac.Cache("B S R"), p=ac.Cache("B S P")
):
    """A latent that is key and value, and a second key."""
    score = (ac.dot(q, c, "R") + ac.dot(r, p, "P")) * 0.05
    return ac.dot(ac.softmax(score, "S", where=ac.causal), c, "S")


def held(op, lengths, storage, dtype, sizes=None, page=None, capacity=1024):
    """A cache with NaN everywhere but in the rows it holds, quantised by the torch lowering."""
    sizes = {"B": len(lengths), **(sizes or {"Hkv": 2, "D": 128, "E": 128})}
    options = {"sizes": sizes, "capacity": capacity, "dtype": storage, "device": DEVICE}
    if page is None:
        cache = ac.DenseCache.allocate(op, **options)
    else:
        cache = ac.PagedCache.allocate(op, page=page, **options)
        order = torch.randperm(
            cache.block_table.numel(), generator=torch.Generator().manual_seed(2)
        )
        cache.block_table.copy_(order.view(cache.block_table.shape))
    poisoned(cache)
    if sum(lengths):
        full = {"G": 4, "H": 16, **sizes}
        given = {}
        for t in (t for t in op.declaration.tensors if not t.scalar):
            inner = [d for d in t.pattern.dims if not {"B", "S", "T"} & set(d)]
            shape = [sum(lengths), *(math.prod(full[a] for a in d) for d in inner)]
            given[t.name] = torch.randn(shape, device=DEVICE).to(dtype)
        op(**given, cache=cache, cu_seqlens=offsets(lengths), backend="torch")
    return cache


def check(op, args, cache, phase="prefill", **options):
    """One call against the oracle and the eager reference: outputs, lse and the stored bits."""
    other = copy_of(cache)
    check_in_cache(op, args, cache, other, phase, **options)
    assert_same_bits(cache, other)


@pytest.mark.parametrize(
    ("storage", "dtype", "page"),
    [
        *((storage, BF16, page) for storage in STORAGES for page in (None, 16)),
        *((storage, dtype, 64) for storage in STORAGES[::3] for dtype in DTYPES),
    ],
)
def test_decode_of_one_to_sixteen_tokens(storage, dtype, page):
    for tokens, lengths in ((1, [700, 0, 64]), (5, [1000, 63, 1]), (16, [300, 17, 0])):
        cache = held(ATTENTION, lengths, storage, dtype, page=page)
        check(ATTENTION, qkv(3, tokens, dtype=dtype), cache, "decode")


@pytest.mark.parametrize(
    ("storage", "dtype", "page"),
    [
        *((storage, BF16, None) for storage in STORAGES),
        *((storage, dtype, 48) for storage in STORAGES[::3] for dtype in DTYPES),
    ],
)
def test_prefill_into_a_cache_then_decode_from_it(storage, dtype, page):
    cache = held(ATTENTION, [0, 0], storage, dtype, page=page)
    for tokens in (300, 1):
        check(ATTENTION, qkv(2, tokens, dtype=dtype), cache, "decode" if tokens == 1 else "prefill")


@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
@pytest.mark.parametrize("page", [None, 16])
def test_any_mix_in_one_packed_call(page, storage):
    counts = [1, 0, 200, 7]
    cache = held(ATTENTION, [500, 3, 0, 64], storage, BF16, page=page)
    check(ATTENTION, qkv(sum(counts), dtype=BF16), cache, cu_seqlens=offsets(counts))


@pytest.mark.parametrize("batch", [1, 40])  # the keys split over programs, or not
@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
def test_a_window_and_a_soft_cap_over_splits(storage, batch):
    lengths = list(itertools.islice(itertools.cycle([900, 40, 0]), batch))
    cache = held(capped, lengths, storage, BF16)
    check(capped, qkv(batch, 2, dtype=BF16), cache, "decode")


@pytest.mark.parametrize("dim", [64, 80, 96, 192, 256])
def test_head_dims(dim):
    sizes = {"Hkv": 2, "D": dim, "E": dim}
    for block in (None, 32) if dim % 32 == 0 else (None,):
        for tokens, phase in ((1, "decode"), (100, "prefill")):
            cache = held(ATTENTION, [300, 9], ac.Quantised(block=block), BF16, sizes)
            check(ATTENTION, qkv(2, tokens, dtype=BF16, dim=dim), cache, phase)


@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_latent_that_is_key_and_value(heads, block):
    sizes = {"R": 512, "P": 64}
    storage = {"c": ac.Quantised(block=block), "p": BF16}
    cache = held(latent, [700, 33], storage, BF16, sizes)
    args = [
        torch.randn(2, 1, *shape, device=DEVICE, dtype=BF16)
        for shape in ((heads, 512), (heads, 64), (512,), (64,))
    ]
    check(latent, args, cache, "decode")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
def test_the_same_bits_are_stored_of_special_values(storage, dtype):
    rows = special_rows(128).to(dtype).to(DEVICE)
    q = torch.zeros(1, len(rows), 1, 128, dtype=dtype, device=DEVICE)
    k, v = rows[None, :, None], rows.flip(0)[None, :, None].contiguous()
    sizes = {"Hkv": 1, "D": 128, "E": 128}
    caches = [held(ATTENTION, [0], storage, dtype, sizes, capacity=len(rows)) for _ in range(3)]
    for cache, backend in zip(caches, ("triton", "torch", "reference"), strict=True):
        ATTENTION(q, k, v, cache=cache, backend=backend)
    assert_same_bits(caches[0], caches[1])
    assert_same_bits(caches[0], caches[2])
    on_cpu = ac.DenseCache.allocate(
        ATTENTION, sizes={"B": 1, **sizes}, capacity=len(rows), dtype=storage
    )
    ATTENTION(q.cpu(), k.cpu(), v.cpu(), cache=on_cpu, backend="torch")
    for name, held_there in on_cpu.tensors.items():
        caches[2].tensors[name].copy_(held_there)
        caches[2].scales[name].copy_(on_cpu.scales[name])
    assert_same_bits(caches[0], caches[2])


@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
def test_a_whole_history_is_read_as_it_is_stored(storage):
    for phase, tokens in (("decode", 1), ("prefill", 150)):
        q = torch.randn(3, tokens, 8, 128, device=DEVICE, dtype=BF16)
        k, v = (
            ac.QuantisedTensor.of(
                torch.randn(3, 700, 2, 128, device=DEVICE, dtype=BF16), parse(p), storage
            )
            for p in ("B S Hkv D", "B S Hkv E")
        )
        exact = ATTENTION.reference(q, k, v)
        got = getattr(ATTENTION, phase)(q, k, v, backend="triton")
        assert_close(got, exact, eager(ATTENTION, (q, k, v), {})["o"], BF16, phase)


@pytest.mark.parametrize("storage", STORAGES[:2], ids=NAMES[:2])
@pytest.mark.parametrize("page", [None, 16])
def test_a_captured_decode_replays_with_other_lengths(page, storage):
    cache = held(ATTENTION, [3, 500, 64], storage, BF16, page=page)
    full = held(ATTENTION, [1023, 1023, 1023], storage, BF16, page=page)
    for mine, other in ((cache.tensors, full.tensors), (cache.scales, full.scales)):
        for name in mine:
            mine[name].copy_(other[name])
    args = qkv(3, 1, dtype=BF16)
    out = torch.empty_like(args[0])
    graph = captured(lambda: ATTENTION.decode(*args, cache, out=out, backend="triton"))
    for lengths in ([3, 500, 64], [0, 16, 600], [1000, 1, 15]):
        cache.lengths.copy_(int32(lengths))
        for x in args:
            x.normal_()
        exact = ATTENTION.reference(*args, cache=cache)
        other = copy_of(cache)
        rough = eager(ATTENTION, args, {"cache": other})["o"]
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, exact, rough, out.dtype, "o")
        assert_same_bits(cache, other)
        assert cache.lengths.tolist() == [n + 1 for n in lengths]


@pytest.mark.parametrize("page", [16, 64])
def test_page_offsets_past_two_to_the_31(page):
    count = 2**31 // (page * 8 * 128) + 8  # the last pages begin beyond 2**31 elements
    sizes = {"B": 1, "Hkv": 8, "D": 128, "E": 128}
    empty = ac.PagedCache.allocate(
        ATTENTION, sizes=sizes, capacity=3 * page, page=page, pages=count, dtype=ac.Quantised(),
        device=DEVICE,
    )  # fmt: skip
    table, lengths = int32([[count - 1, 0, count - 2]]), int32([2 * page])
    cache = ac.PagedCache(empty.pages, table, lengths, scales=empty.scales)
    q = torch.ones(1, 1, 8, 128, device=DEVICE).bfloat16()
    o = ATTENTION.decode(q, torch.full_like(q, 40.0), torch.ones_like(q), cache, backend="triton")
    assert (o == 1).all()
    assert (cache.pages["v"][count - 2, 0].float() == 448).all()
    assert (cache.scales["v"][count - 2, :, 0, 0] == torch.tensor(1.0).div(448).item()).all()
    assert int((cache.scales["v"] != 0).sum()) == 8


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_two_columns_of_values_are_pulled_apart_exactly(dtype):
    args, exact = every_byte(dtype, DEVICE)
    o = ATTENTION.decode(**args, backend="triton")
    assert torch.equal(o.nan_to_num(7777.0), exact.nan_to_num(7777.0))
