"""Quantised histories without a GPU: the rule of storing, what is read, bytes, every mistake."""

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.dsl import errors
from attncc.dsl.axes import parse, scales_of
from attncc.runtime.quantised import Quantised, QuantisedTensor, Scales, dequantise, quantise
from tests.quantised_caches import (
    NAMES,
    STORAGES,
    assert_same_bits,
    bits,
    copy_of,
    poisoned,
    special_rows,
)
from tests.runtime.eager_ops import documents
from tests.strategies import randn
from tests.tolerance import assert_close

ATTENTION = ac.ops.attention
BF16 = torch.bfloat16
SIZES = {"B": 2, "Hkv": 2, "D": 64, "E": 64}
PROPERTY = settings(max_examples=20, deadline=None)


def nearest(x):
    """e4m3 by its definition: of all 254 finite numbers the nearest, ties to the even code."""
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    finite = ~values.isnan()
    order = sorted(
        (int(c) for c in codes[finite]), key=lambda c: (abs(x - values[c].item()), c & 1)
    )
    best = order[0]
    if values[best] == 0:
        best = 0x80 if math.copysign(1, x) < 0 else 0
    return best


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_every_element_is_the_nearest_number_for_its_scale(dtype):
    rows = special_rows(32)
    rows = torch.cat([rows, randn(0, 8, 32, dtype=torch.float32) * 50])
    data, scales = quantise(rows, parse("S D"), "D", 32, dtype, {"S": len(rows), "D": 32})
    assert scales.shape == (1, len(rows)) and data.dtype == torch.float8_e4m3fn
    for row, code, stored in zip(rows, data.view(torch.uint8), scales[0], strict=True):
        finite = [abs(x) for x in row.tolist() if math.isfinite(x)]
        most = max(finite, default=0.0)
        scale = max(torch.tensor(most).div(448).item(), 2.0**-126) if most else 1.0
        if dtype == torch.uint8:
            scale = 2.0 ** math.ceil(math.log2(scale))
            assert int(stored) - 127 == math.log2(scale)
        else:
            assert stored.item() == scale
        for x, c in zip((row / scale).tolist(), code.tolist(), strict=True):
            assert c == (0x7F if math.isnan(x) else nearest(min(max(x, -448.0), 448.0))), (x, c)


def test_what_was_quantised_comes_back_within_half_a_step():
    x = randn(3, 2, 5, 3, 64, dtype=torch.float32)
    pattern, sizes = parse("B S H D"), {"B": 2, "S": 5, "H": 3, "D": 64}
    for block, kind in itertools.product((32, 64), (torch.float32, torch.uint8)):
        data, scales = quantise(x, pattern, "D", block, kind, sizes)
        assert scales.shape == (2, 3, 64 // block, 5)
        own = Scales(scales, scales_of(pattern, "D"), "D", block)
        back = dequantise(data, pattern, own, sizes, torch.float64)
        most = x.unflatten(-1, (-1, block)).abs().amax(-1).repeat_interleave(block, -1)
        least = most / 448 * (1 if kind == torch.float32 else 2) * 2.0**-6  # smallest normal
        assert ((back - x).abs() <= x.abs().maximum(least) * 2.0**-4).all()


def test_all_exponents_are_read_as_torch_reads_them():
    e = torch.arange(256).to(torch.uint8)
    one = torch.ones(256, 1).to(torch.float8_e4m3fn)
    own = Scales(e[None], scales_of(parse("S D"), "D"), "D", 1)
    back = dequantise(one, parse("S D"), own, {"S": 256, "D": 1}, torch.float32)
    want = e.view(torch.float8_e8m0fnu).float()
    assert torch.equal(back[:, 0].nan_to_num(-1), want.nan_to_num(-1))


@st.composite
def cases(draw):
    """Lengths held, new tokens in two calls, page size (0: dense), storage."""
    count = draw(st.integers(1, 3))
    held = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    news = [
        draw(st.lists(st.sampled_from([0, 1, 2, 5, 16]), min_size=count, max_size=count))
        for _ in range(2)
    ]
    page = draw(st.sampled_from([0, 1, 3, 16]))
    return held, news, page, draw(st.sampled_from(STORAGES))


@given(cases())
@PROPERTY
def test_any_cut_into_calls_stores_and_means_what_one_call_does(case):
    held, news, page, storage = case
    total = [a + b + c for a, b, c in zip(held, *news, strict=True)]
    sizes = {**SIZES, "B": len(held)}
    options = {"sizes": sizes, "capacity": 48, "dtype": storage}

    def fresh():
        if page:
            return poisoned(ac.PagedCache.allocate(ATTENTION, page=page, **options))
        return poisoned(ac.DenseCache.allocate(ATTENTION, **options))

    rows = [
        [randn(i * 10 + b, n, h, 64, dtype=BF16) for b, n in enumerate(total)]
        for i, h in enumerate((4, 2, 2))
    ]

    def call(cache, lows, counts, run=ATTENTION):
        parts = (
            torch.cat([x[lo : lo + n] for x, lo, n in zip(part, lows, counts, strict=True)])
            for part in rows
        )
        cu = torch.tensor([0, *itertools.accumulate(counts)])
        return run(*parts, cache=cache, cu_seqlens=cu)

    whole, cut = fresh(), fresh()
    everything = call(whole, [0] * len(held), total)
    at = [0] * len(held)
    for counts in (held, *news):
        exact = call(cut, at, counts, ATTENTION.reference)
        got = call(cut, at, counts)
        assert_close(got, exact, exact.to(BF16), BF16)
        want = [
            x[lo : lo + n] for x, lo, n in zip(everything.split(total), at, counts, strict=True)
        ]
        assert_close(got, torch.cat(want).double(), torch.cat(want), BF16)
        at = [a + b for a, b in zip(at, counts, strict=True)]
    assert_same_bits(whole, cut)
    assert cut.lengths.tolist() == total


@pytest.mark.parametrize("storage", STORAGES, ids=NAMES)
def test_a_whole_history_is_read_as_it_is_stored(storage):
    q, k, v = (randn(i, 2, 9, h, 64, dtype=BF16) for i, h in enumerate((4, 2, 2)))
    stored = {
        n: QuantisedTensor.of(x, parse(f"B S Hkv {n}"), storage) for n, x in (("D", k), ("E", v))
    }
    cache = ac.DenseCache.allocate(ATTENTION, sizes=SIZES, capacity=9, dtype=storage)
    one, lse = ATTENTION(q, stored["D"], stored["E"], return_lse=True)
    other, again = ATTENTION(q, k, v, cache=cache, return_lse=True)
    assert torch.equal(one, other) and torch.equal(lse, again)
    mixed, exact = ATTENTION(q, stored["D"], v), ATTENTION.reference(q, stored["D"], v)
    assert not torch.equal(mixed, one)
    assert_close(mixed, exact, exact.to(BF16), BF16)


def test_partials_of_a_quantised_history_merge():
    q, k, v = (randn(i, 1, 8, 2, 64, dtype=BF16) for i in range(3))
    k, v = (QuantisedTensor.of(x, parse("B S H D"), Quantised()) for x in (k, v))
    part = [
        QuantisedTensor(x.data[:, rows], x.scales[..., rows])
        for rows in (slice(0, 3), slice(3, 8))
        for x in (k, v)
    ]
    q = q[:, -1:]
    first = memory(q, part[0], part[1], return_partial=True)
    second = memory(q, part[2], part[3], return_partial=True)
    got = ac.merge((first, second)).o
    assert_close(got, memory.reference(q, k, v), got.to(BF16), BF16)


@ac.op(out="B T H E")
def memory(q=ac.Activation("B T H D"), k=ac.Memory("B S H D"), v=ac.Memory("B S H E")):
    """Cross-attention: a history that does not grow."""
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S"), v, "S")


@pytest.mark.parametrize("page", [None, 4])
def test_bytes_of_data_and_scales(page):
    storage = {"k": Quantised(block=32, scale="ue8m0"), "v": BF16}
    options = {"sizes": SIZES, "capacity": 12, "dtype": storage}
    cache = (
        ac.PagedCache.allocate(ATTENTION, page=page, **options)
        if page
        else ac.DenseCache.allocate(ATTENTION, **options)
    )
    rows = 2 * 12 * 2
    found = cache.bytes()
    assert (found["k"].data, found["k"].scales) == (rows * 64, rows * 2)
    assert found["k"].total == rows * 66
    assert (found["v"].data, found["v"].scales) == (rows * 64 * 2, 0)


def fails(kind, call, match):
    """The error of a call: exactly of that kind, and it survives pickling."""
    with pytest.raises(kind, match=match) as caught:
        call()
    assert type(caught.value) is kind
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"dtype": torch.float16}, {"block": 16}, {"block": 256}, {"scale": torch.bfloat16}]
)
def test_storage_outside_the_list_is_refused(wrong):
    fails(errors.ArgumentError, lambda: Quantised(**wrong), "no such quantised storage")


def qkv(cache, **kwargs):
    q, k, v = (randn(i, 2, 3, h, 64, dtype=BF16) for i, h in enumerate((4, 2, 2)))
    return ATTENTION(q, k, v, cache=cache, **kwargs)


def dense(storage=None, **changes):
    cache = ac.DenseCache.allocate(
        ATTENTION, sizes=SIZES, capacity=8, dtype=storage or Quantised(block=32)
    )
    parts = {"tensors": dict(cache.tensors), "scales": dict(cache.scales)}
    for part, entries in changes.items():
        parts[part] |= entries
    return ac.DenseCache(parts["tensors"], cache.lengths, parts["scales"])


ZEROS = torch.zeros(2, 2, 2, 8)


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        (errors.DtypeError, {"scales": {"k": ZEROS.bfloat16()}}, "fp32, or ue8m0"),
        (errors.DtypeError, {"tensors": {"k": torch.zeros(2, 8, 2, 64).bfloat16()}}, "float8"),
        (errors.RankError, {"scales": {"k": ZEROS[0]}}, "number of axes"),
        (errors.SizeError, {"scales": {"k": ZEROS[..., :7].contiguous()}}, "do not fit"),
        (errors.SizeError, {"scales": {"k": torch.zeros(2, 2, 4, 8)}}, "another size"),
        (errors.SizeError, {"scales": {"k": torch.zeros(2, 2, 3, 8)}}, "another size"),
        (errors.StrideError, {"scales": {"k": torch.zeros(2, 2, 8, 2).mT}}, "dense"),
        (errors.CacheError, {"scales": {"w": ZEROS}}, "scales of no history"),
    ],
)
def test_scales_that_do_not_fit_are_refused_before_anything_is_written(kind, changes, match):
    cache = dense(**changes)
    before = {n: x.clone() for n, x in bits(copy_of(cache)).items()}
    fails(kind, lambda: qkv(cache), match)
    assert all(torch.equal(x, before[n]) for n, x in bits(cache).items())


def test_e4m3_without_scales_is_refused():
    cache = dense()
    fails(errors.DtypeError, lambda: qkv(ac.DenseCache(cache.tensors, cache.lengths)), "float8")


def test_new_rows_come_unquantised():
    q, k, v = (randn(i, 2, 3, h, 64, dtype=BF16) for i, h in enumerate((4, 2, 2)))
    stored = QuantisedTensor.of(k, parse("B S Hkv D"), Quantised())
    call = lambda: ATTENTION(q, stored, v, cache=dense())  # noqa: E731
    fails(errors.ArgumentError, call, "as they are appended")
    fails(errors.ArgumentError, lambda: ATTENTION(stored, k, v), "a tensor is wanted")


@ac.op(out="B T H E")
def gated(
    q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H E"), f=ac.Cache("B S H")
):
    """A key that passes through a function, and a cache without rows."""
    score = ac.dot(q, ac.relu(k), "D") + f
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


def test_what_is_not_contracted_cannot_be_quantised():
    sizes = {"B": 1, "H": 2, "D": 64, "E": 64}
    q, k, v = (randn(i, 1, 3, 2, 64, dtype=BF16) for i in range(3))
    f = randn(4, 1, 3, 2, dtype=BF16)
    plain = {"k": BF16, "v": Quantised(), "f": BF16}
    cache = ac.DenseCache.allocate(gated, sizes=sizes, capacity=8, dtype=plain)
    gated(q, k, v, f, cache=cache)
    for name in ("k", "f"):
        cache = ac.DenseCache.allocate(
            gated, sizes=sizes, capacity=8, dtype={**plain, name: Quantised()}
        )
        before = copy_of(cache)
        call = lambda cache=cache: gated(q, k, v, f, cache=cache)  # noqa: E731
        fails(errors.DtypeError, call, "only a history that is contracted")
        assert_same_bits(cache, before)
    fails(
        errors.CacheError,
        lambda: ac.DenseCache.allocate(
            documents, sizes={**SIZES, "H": 2}, capacity=8, dtype=Quantised()
        ),
        "no rows",
    )


def test_a_storage_for_each_history_and_blocks_that_divide():
    options = {"sizes": SIZES, "capacity": 8}
    fails(
        errors.CacheError,
        lambda: ac.DenseCache.allocate(ATTENTION, dtype={"k": BF16}, **options),
        "a storage is missing",
    )
    fails(
        errors.CacheError,
        lambda: ac.DenseCache.allocate(ATTENTION, dtype=Quantised(block=128), **options),
        "does not divide",
    )
    x = randn(0, 1, 3, 48, dtype=BF16)
    fails(
        errors.ArgumentError,
        lambda: QuantisedTensor.of(x, parse("B S D"), Quantised(block=32)),
        "does not divide",
    )
    fails(
        errors.ArgumentError,
        lambda: QuantisedTensor.of(x, parse("B S (H D)"), Quantised()),
        "several axes",
    )


def test_a_forked_sequence_copies_the_scales_it_writes():
    pages = ac.PageOwner.allocate(
        ATTENTION, sizes=SIZES, pages=8, page=4, dtype=Quantised(scale="ue8m0")
    )
    q, k, v = (randn(i, 1, 6, h, 64, dtype=BF16) for i, h in enumerate((4, 2, 2)))
    flat = ac.DenseCache.allocate(
        ATTENTION, sizes={**SIZES, "B": 1}, capacity=8, dtype=Quantised(scale="ue8m0")
    )
    ATTENTION(q, k, v, cache=flat)
    a = pages.add()
    with pages.append([a], 6) as cache:
        ATTENTION(q, k, v, cache=cache)
    b = pages.fork(a)
    other = [x[:, :1] * 3 for x in (q, k, v)]
    with pages.append([b], 1) as cache:
        ATTENTION(*other, cache=cache)
    last = [x[:, 5:] for x in (q, k, v)]
    with pages.append([a], 1) as cache:
        got = ATTENTION(*last, cache=cache)
    assert torch.equal(got, ATTENTION(*last, cache=flat))
