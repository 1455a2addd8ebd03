"""Quantised histories in Triton's interpreter: the stored bits, and what is read from them."""

import itertools
import math

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl.axes import parse
from attncc.runtime import softmax
from attncc.runtime.backends import run_eager, spec_of
from attncc.runtime.bind import bind
from attncc.runtime.quantised import Quantised, QuantisedTensor
from attncc.runtime.reference import run_reference
from tests.interpreter.test_softmax import alibi_of_documents
from tests.quantised_caches import (
    NAMES,
    STORAGES,
    assert_same_bits,
    copy_of,
    every_byte,
    poisoned,
    special_rows,
)
from tests.strategies import randn
from tests.tolerance import assert_close

ATTENTION = ac.ops.attention
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@ac.op(out="B T H R")
def latent(q=ac.Activation("B T H R"), c=ac.Cache("B S R")):
    """Keys that are values too."""
    return ac.dot(ac.softmax(ac.dot(q, c, "R") * ac.rsqrt("R"), "S", where=ac.causal), c, "S")


@ac.op(out="B T (Hkv G) E")
def indexed(
    q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E"),
    qi=ac.Activation("B T Hi Di"), ki=ac.Cache("B S Di"), cap=ac.param(default=4.0),
):  # fmt: skip
    """A soft cap, and an inner sum over heads of another key."""
    inner = ac.sum(ac.relu(ac.dot(qi, ki, "Di")), "Hi")
    score = cap * ac.tanh(ac.dot(q, k, "D") * ac.rsqrt("D") / cap) + inner * 0.1
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


def sized(batch, dim=64, heads=2):
    return {"B": batch, "Hkv": heads, "D": dim, "E": dim}


def new(op, seed, lead, sizes, dtype, group=2):
    """This call's rows of every argument, ``lead`` in place of B and T."""
    full = {"G": group, "Hi": 3, "Di": 32, "H": 4, **sizes}
    found = {}
    for i, t in enumerate(x for x in op.declaration.tensors if not x.scalar):
        shape = [*lead]
        for dim in t.pattern.dims:
            if not {"B", "S", "T"} & set(dim):
                shape.append(math.prod(full[a] for a in dim))
        found[t.name] = randn(seed + i, *shape, dtype=dtype)
    return found


def check(op, args, cache, phase="prefill", splits=None, **options):
    """Outputs, lse and stored bits against the oracle and the torch lowering."""
    kwargs = {**args, **options, "return_lse": True}
    call, _ = bind(op.declaration, (), {**kwargs, "cache": cache})
    exact = run_reference(call)
    other = copy_of(cache)
    rough, _ = bind(op.declaration, (), {**kwargs, "cache": other})
    run_eager(rough, analyse(call.program))
    third = copy_of(cache)
    op(**kwargs, cache=third, backend="reference")
    for tensor in (*call.outputs.values(), call.lse):
        tensor.fill_(torch.nan)
    softmax.run(call, analyse(call.program).softmax, spec_of(call), phase, splits=splits)
    for name, tensor in call.outputs.items():
        assert_close(tensor, exact[name], rough.outputs[name], tensor.dtype, name)
    assert_close(call.lse, exact["lse"], rough.lse, torch.float32, "lse")
    assert_same_bits(cache, other)
    assert_same_bits(cache, third)


def held(op, sizes, lengths, storage, dtype, *, page=None, layouts=None, capacity=96):
    """A cache with NaN everywhere but in the rows it holds, quantised by the torch lowering."""
    if page is None:
        cache = ac.DenseCache.allocate(op, sizes=sizes, capacity=capacity, dtype=storage)
    else:
        cache = ac.PagedCache.allocate(
            op, sizes=sizes, capacity=capacity, page=page, pages=40, layouts=layouts, dtype=storage
        )
        order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).int()
        cache.block_table.copy_(order[: cache.block_table.numel()].view(cache.block_table.shape))
    poisoned(cache)
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    args = new(op, 90, (sum(lengths),), sizes, dtype)
    op(**args, cache=cache, cu_seqlens=cu, backend="torch")
    return cache


@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_a_packed_call_appends_and_reads_pages(storage, dtype):
    sizes, counts = sized(3), [1, 0, 9]
    cache = held(ATTENTION, sizes, [70, 5, 0], storage, dtype, page=16,
                 layouts={"v": "pages Hkv page E"})  # fmt: skip
    cu = torch.tensor([0, *itertools.accumulate(counts)])
    check(ATTENTION, new(ATTENTION, 1, (10,), sizes, dtype), cache, cu_seqlens=cu, splits=1)


@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
@pytest.mark.parametrize(("dtype", "splits"), [(BF16, 2), (FP16, 2), (FP32, 1)])
def test_a_dense_cache_decodes_over_splits(storage, dtype, splits):
    sizes = sized(2)
    cache = held(ATTENTION, sizes, [70, 3], storage, dtype)
    args = new(ATTENTION, 1, (2, 3), sizes, dtype)
    check(ATTENTION, args, cache, phase="decode", splits=splits)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_two_columns_of_values_are_pulled_apart_exactly(dtype):
    args, exact = every_byte(dtype)
    call, _ = bind(ATTENTION.declaration, (), args)
    form = analyse(call.program).softmax
    kernels = softmax.prepare(call.program, form, spec_of(call), "decode")
    assert kernels.whole.plan.paired and all(part.plan.paired for part in kernels.parts)
    softmax.run(call, form, spec_of(call), "decode")
    assert torch.equal(call.outputs["o"].nan_to_num(7777.0), exact.nan_to_num(7777.0))


@pytest.mark.parametrize("page", [64, 24, 8])  # a block of keys in one page, or in several
def test_prefill_into_pages_and_decode_from_them(page):
    sizes = sized(1, 32, 1)
    cache = held(ATTENTION, sizes, [0], Quantised(), BF16, page=page, capacity=96)
    for at, tokens in enumerate((70, 1)):
        args = new(ATTENTION, at, (1, tokens), sizes, BF16)
        check(ATTENTION, args, cache, phase="prefill" if tokens > 1 else "decode")
        cache.lengths.add_(tokens)


@pytest.mark.parametrize("dim", [40, 96])  # one scale a row of no power of two; three blocks of 32
def test_head_dims_of_no_power_of_two(dim):
    sizes, storage = sized(2, dim), Quantised(block=None if dim % 32 else 32)
    cache = held(ATTENTION, sizes, [33, 70], storage, BF16)
    check(ATTENTION, new(ATTENTION, 3, (2, 2), sizes, BF16), cache, phase="decode")


@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
def test_one_history_is_key_and_value(storage):
    sizes = {"B": 2, "R": 64, "H": 4}
    cache = held(latent, sizes, [66, 0], storage, BF16)
    check(latent, new(latent, 3, (2, 2), sizes, BF16), cache, phase="decode")


def test_keys_of_an_inner_sum_and_a_soft_cap():
    sizes = {**sized(2, 32), "Di": 32, "Hi": 3}
    storage = {"k": Quantised(), "v": BF16, "ki": Quantised(scale="ue8m0")}
    cache = held(indexed, sizes, [66, 0], storage, BF16)
    check(indexed, new(indexed, 3, (2, 2), sizes, BF16), cache, phase="decode")


def test_a_quantised_history_beside_labels_that_are_not():
    sizes = sized(2, 32)
    storage = {"k": Quantised(), "v": Quantised(block=32), "document": BF16}
    cache = ac.DenseCache.allocate(alibi_of_documents, sizes=sizes, capacity=80, dtype=storage)
    label = torch.arange(70).div(9, rounding_mode="floor").to(BF16).expand(2, 70).contiguous()
    slope = torch.tensor([0.5, 0.25, 0.125, 1.0])
    for lo, hi in ((0, 68), (68, 70)):
        args = {
            n: randn(i + lo, 2, hi - lo, h, 32, dtype=BF16)
            for i, (n, h) in enumerate({"q": 4, "k": 2, "v": 2}.items())
        }
        args |= {"slope": slope, "document": label[:, lo:hi].contiguous()}
        check(alibi_of_documents, args, cache, phase="decode" if lo else "prefill")
        cache.lengths.add_(hi - lo)


@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
def test_a_whole_history_is_read_as_it_is_stored(storage):
    args = new(ATTENTION, 5, (2, 70), sized(2), BF16)
    stored = {
        n: QuantisedTensor.of(args[n], parse(p), storage)
        for n, p in (("k", "B S Hkv D"), ("v", "B S Hkv E"))
    }
    call, _ = bind(ATTENTION.declaration, (), {**args, **stored, "return_lse": True})
    exact = run_reference(call)
    rough, _ = bind(ATTENTION.declaration, (), {**args, **stored, "return_lse": True})
    run_eager(rough, analyse(call.program))
    softmax.run(call, analyse(call.program).softmax, spec_of(call), "prefill")
    assert_close(call.outputs["o"], exact["o"], rough.outputs["o"], BF16, "o")
    assert_close(call.lse, exact["lse"], rough.lse, torch.float32, "lse")


@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_same_bits_are_stored_of_special_values(storage, dtype):
    rows = special_rows(64).to(dtype)
    sizes = sized(1, 64, 1)
    caches = [
        ac.DenseCache.allocate(ATTENTION, sizes=sizes, capacity=len(rows), dtype=storage)
        for _ in range(3)
    ]
    q = torch.zeros(1, len(rows), 1, 64, dtype=dtype)
    k, v = rows[None, :, None], rows.flip(0)[None, :, None].contiguous()
    for cache, backend in zip(caches, ("triton", "torch", "reference"), strict=True):
        ATTENTION(q, k, v, cache=cache, backend=backend)
    assert_same_bits(caches[0], caches[1])
    assert_same_bits(caches[0], caches[2])


def test_tiny_and_huge_rows_of_values_keep_their_digits():
    """Scales far apart: weights times scales would leave fp16's range by themselves."""
    sizes = sized(1, 32, 1)
    for dtype in (FP16, BF16):
        size = torch.tensor([1e-4, 3.0, 1e-3, 6e4]).repeat(18)[:70, None, None]
        for factor in (1.0, 1e-3):
            args = new(ATTENTION, 7, (1, 70), sizes, dtype)
            args["v"] = (args["v"].float() * size * factor).clamp(-6e4, 6e4).to(dtype)
            cache = ac.DenseCache.allocate(
                ATTENTION, sizes=sizes, capacity=70, dtype=Quantised(block=32)
            )
            check(ATTENTION, args, cache)


def test_queries_and_keys_of_any_magnitude():
    """bf16 queries reach an fp16 product: rows far outside its range, mixed ones, and zeros."""
    sizes, storage = sized(1, 32, 1), {"k": Quantised(), "v": Quantised(block=32)}
    for factor in (1e30, 1e-30, 1.0):
        args = new(ATTENTION, 8, (1, 70), sizes, BF16)
        size = torch.tensor([factor, factor * 2, 0.0, factor * 0.7]).repeat(18)[:70, None, None]
        spread = torch.ones(32).index_fill(0, torch.arange(1, 32, 2), 2.0**-20)
        args["q"] = (args["q"].float() * size * spread).to(BF16)
        args["k"] = (args["k"].float() / factor / spread.clamp(2.0**-5)).to(BF16)
        cache = ac.DenseCache.allocate(ATTENTION, sizes=sizes, capacity=70, dtype=storage)
        check(ATTENTION, args, cache)
