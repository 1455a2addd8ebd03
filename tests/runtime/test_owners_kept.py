"""Bytes from a declaration, and the allocation that has exactly them."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.dsl import errors
from attncc.dsl.ir import Lifetime
from attncc.runtime.quantised import Quantised
from tests.runtime.eager_ops import convolved, documents
from tests.runtime.owner_ops import close, smoothed, tally

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
GIB = 2**30


@ac.op(out="B T H D")
def common_prefix(q=ac.Activation("B T H D"), k=ac.Cache("S H D"), v=ac.Cache("S H D")):
    return ac.dot(ac.softmax(ac.dot(q, k, "D"), "S"), v, "S")


@ac.op(out="B T H D")
def in_blocks(q=ac.Activation("B T H D"), k=ac.Cache("B (Sb C) H D"), v=ac.Cache("B (Sb C) H D")):
    return ac.dot(ac.softmax(ac.dot(q, ac.sum(k, "C"), "D"), "Sb"), ac.sum(v, "C"), "Sb")


OPS = {
    "attention": (ATTENTION, {"Hkv": 3, "D": 8, "E": 4}),
    "documents": (documents, {"H": 2, "D": 4}),
    "gated_delta_rule": (GDR, {"Hk": 2, "G": 3, "K": 8, "V": 4}),
    "convolved": (convolved, {"H": 2, "K": 4, "V": 3, "W": 4}),
    "tally": (tally, {"D": 5, "W": 1}),
    "smoothed": (smoothed, {"D": 5, "W": 4}),
}


def fails(kind, call, match=None):
    """The error of a call: exactly of that kind, and it survives pickling."""
    with pytest.raises(kind, match=match) as caught:
        call()
    assert type(caught.value) is kind
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return caught.value


def test_bytes_of_the_document_are_those_of_its_arithmetic():
    # 2 * B * Hkv * T * d * 2 bytes of one of 32 layers that hold 4 GiB together
    sizes = {"B": 1, "Hkv": 32, "D": 128, "E": 128}
    dense = ac.bytes_of(ATTENTION, sizes=sizes, capacity=8192)
    assert dense.total == 4 * GIB // 32 + 4  # and the length
    assert dense.token == 2 * 32 * 128 * 2 and dense.page == 0
    paged = ac.bytes_of(ATTENTION, sizes={**sizes, "B": 7}, capacity=8190, page=16)
    assert (paged.page, paged.rows) == (16 * dense.token, 8192)
    assert paged.sequence == 8192 * dense.token + 4 + 512 * 4
    assert paged.total == 7 * paged.sequence
    state = ac.bytes_of(GDR, sizes={"B": 5, "Hk": 16, "G": 2, "K": 128, "V": 128})
    assert (state.token, state.sequence) == (0, 32 * 128 * 128 * 4 + 4)
    assert state.total == 5 * state.sequence


def test_each_object_has_its_lifetime_and_dtype():
    sizes = {"B": 2, "H": 2, "K": 4, "V": 3, "W": 4}
    dtype = {"win": torch.float32}
    found = ac.bytes_of(convolved, sizes=sizes, dtype=dtype, state_dtype=torch.bfloat16)
    each = {o.name: (o.lifetime, o.dtype, o.sequence) for o in found.objects}
    assert each == {
        "win": (Lifetime.WINDOW, torch.float32, 2 * 4 * 3 * 4),
        "s": (Lifetime.STATE, torch.bfloat16, 2 * 4 * 3 * 2),
        "slots": (Lifetime.CONTROL, torch.int32, 4),
    }


def tensors_of(allocation):
    """Every tensor of an allocation, each once."""
    cache = allocation.cache
    found = list(cache.tensors.values()) if cache is not None else []
    found += [cache.lengths] if cache is not None else []
    found += [cache.block_table] if isinstance(cache, ac.PagedCache) else []
    for pool in allocation.states.values():
        found += [pool.pool, pool.slots]
    return {id(t): t for t in found}.values()


@pytest.mark.parametrize("name", OPS)
@given(
    batch=st.integers(0, 3), capacity=st.integers(0, 20), page=st.sampled_from([None, 1, 4, 16]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)  # fmt: skip
@settings(max_examples=25)
def test_what_is_promised_is_what_is_allocated(name, batch, capacity, page, dtype):
    op, sizes = OPS[name]
    options = {
        "sizes": {**sizes, "B": batch}, "capacity": capacity, "page": page, "dtype": dtype,
        "state_dtype": torch.float16,
    }  # fmt: skip
    allocation = op.caches(**options)
    got = sum(t.numel() * t.element_size() for t in tensors_of(allocation))
    assert got == ac.bytes_of(op, **options).total
    assert not any(t.any() for t in kept_tensors(allocation).values())


def kept_tensors(allocation):
    """Rows and states by name."""
    rows = {} if allocation.cache is None else dict(allocation.cache.tensors)
    return {**rows, **{n: p.pool for n, p in allocation.states.items()}}


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("scale", [torch.float32, "ue8m0"])
@pytest.mark.parametrize(("block", "scales"), [(32, 4), (None, 1)])
def test_quantised_rows_count_their_scales(block, scales, scale, page):
    stored = Quantised(block=block, scale=scale)
    options = {"sizes": {"B": 3, "Hkv": 2, "D": 128, "E": 64}, "capacity": 20, "page": page}
    dtype = {"k": stored, "v": torch.bfloat16}
    found = ac.bytes_of(ATTENTION, **options, dtype=dtype)
    each = {o.name: o.token for o in found.objects if o.lifetime is Lifetime.CACHE}
    width = 2 * scales * stored.scale_dtype.itemsize
    assert each == {"k": 2 * 128, "k.scales": width, "v": 2 * 64 * 2}
    made = ATTENTION.caches(**options, dtype=dtype)
    held = [*tensors_of(made), *made.cache.scales.values()]
    assert sum(t.nbytes for t in held) == found.total


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn, torch.bool])
def test_a_dtype_that_no_call_takes_is_refused_before_anything_is_allocated(dtype):
    sizes = {"B": 2, "Hk": 1, "G": 1, "K": 4, "V": 4}
    for call in (
        lambda: GDR.caches(sizes=sizes, state_dtype=dtype),
        lambda: GDR.caches(sizes=sizes, dtype={"s": dtype}),
        lambda: ac.bytes_of(GDR, sizes=sizes, state_dtype=dtype),
        lambda: ac.StateOwner.allocate(GDR, sizes=sizes, slots=2, state_dtype=dtype),
        lambda: ac.StateOwner(GDR, {"s": torch.zeros(2, 1, 4, 4).to(dtype)}),
    ):
        found = fails(errors.DtypeError, call)
        assert (found.op, found.argument) == ("gated_delta_rule", "s")
        assert found.expected == "float32 or bfloat16 or float16"
        assert found.found == str(dtype).removeprefix("torch.")
    window = {"H": 2, "K": 4, "V": 3, "W": 4, "B": 2}
    fails(errors.DtypeError, lambda: convolved.caches(sizes=window, dtype=dtype), "a window of")
    if dtype is not torch.int32:  # which labels of documents may be
        rows = {"B": 2, "Hkv": 1, "D": 4, "E": 4}
        for page in (None, 16):
            fails(
                errors.DtypeError,
                lambda p=page: ATTENTION.caches(sizes=rows, capacity=8, page=p, dtype=dtype),
                "a history of",
            )


def test_a_history_that_all_sequences_share_counts_once():
    options = {"sizes": {"B": 4, "H": 2, "D": 8}, "capacity": 10, "dtype": torch.float32}
    found = ac.bytes_of(common_prefix, **options)
    assert found.total == 2 * 10 * 16 * 4 + 4 * 4
    cache = common_prefix.caches(**options).cache
    assert cache.tensors["k"].shape == (10, 2, 8) and cache.lengths.shape == (4,)


@pytest.mark.parametrize("page", [None, 4])
def test_an_allocation_serves_calls_as_it_is(page):
    sizes = {"B": 2, "Hkv": 2, "D": 4, "E": 4}
    made = ATTENTION.caches(sizes=sizes, capacity=9, page=page, dtype=torch.float32)
    q, k, v = torch.randn(2, 9, 4, 4), torch.randn(2, 9, 2, 4), torch.randn(2, 9, 2, 4)
    parts = [slice(0, 6), slice(6, 7), slice(7, 9)]
    o = [ATTENTION(*(x[:, p] for x in (q, k, v)), **made.arguments) for p in parts]
    close(torch.cat(o, 1), ATTENTION, (q, k, v))

    x, w = torch.randn(2, 5, 3), torch.randn(4, 3)
    made = smoothed.caches(sizes={"B": 2, "D": 3, "W": 4}, dtype=torch.float32)
    assert made.cache is None
    o = [smoothed(x[:, p], w, **made.arguments) for p in (slice(0, 1), slice(1, 5))]
    close(torch.cat(o, 1), smoothed, (x, w))
    assert torch.equal(made.states["win"].pool, x[:, 2:].contiguous())


def test_what_cannot_be_allocated_is_named():
    sizes = {"B": 1, "Hkv": 2, "D": 4, "E": 4}
    for take in (ac.bytes_of, ac.allocate):
        error = fails(errors.CacheError, lambda take=take: take(ATTENTION, sizes={"B": 1, "D": 4}))
        assert (error.argument, error.axis) == ("k", "Hkv")
        fails(errors.RefusedError, lambda take=take: take(in_blocks, sizes=sizes), "in blocks")
    missing = fails(errors.CacheError, lambda: ATTENTION.caches(sizes={"Hkv": 2, "D": 4, "E": 4}))
    assert missing.axis == "B"

    @ac.op(out="B T H E")
    def plain(q=ac.Activation("B T H D"), k=ac.Memory("B S H D"), v=ac.Memory("B S H E")):
        return ac.dot(ac.softmax(ac.dot(q, k, "D"), "S"), v, "S")

    fails(errors.CacheError, lambda: ac.bytes_of(plain, sizes=sizes), "keeps no")

    @ac.op(scan="T", out="B T H")
    def grouped(x=ac.Activation("B T H"), s=ac.State("(B H)")):
        s = s + x
        return s, s

    error = fails(errors.ArgumentError, lambda: grouped.caches(sizes={"B": 2, "H": 2}))
    assert error.argument == "s"
    stored = Quantised()
    whole = {"B": 1, "D": 4, "W": 3}
    for dtype in (stored, {"win": stored}):
        error = fails(errors.CacheError, lambda dtype=dtype: tally.caches(sizes=whole, dtype=dtype))
        assert error.argument == "win" and "only histories" in error.message
    error = fails(errors.CacheError, lambda: tally.caches(sizes=whole, dtype={}))
    assert (error.argument, error.message) == ("win", "a storage is missing")
    bad = {"k": "pages page D"}
    fails(errors.CacheError, lambda: ATTENTION.caches(sizes=sizes, page=4, layouts=bad), "axes")
