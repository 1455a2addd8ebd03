"""Pages and pools: the same results as whole tensors, nothing else touched, every mistake named."""

import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.dsl import errors
from attncc.runtime.bind import bind
from attncc.runtime.gathered import each_token
from attncc.runtime.reference import reference_results
from tests.runtime.eager_ops import convolved, documents
from tests.strategies import randn as randn64

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
PROPERTY = settings(max_examples=25)
HEADS, GROUP, DIM = 2, 2, 4


def randn(seed, *shape):
    """Standard normal values in fp32."""
    return randn64(seed, *shape, dtype=torch.float32)


def fails(kind, call, match=None):
    """The error of a call: exactly of that kind, and it survives pickling."""
    with pytest.raises(kind, match=match) as caught:
        call()
    assert type(caught.value) is kind
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return caught.value


# --- paged histories


@st.composite
def batches(draw):
    """Lengths held, pieces of new tokens in two calls, page size, and permuted pages."""
    count = draw(st.integers(1, 4))
    held = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    news = [
        draw(st.lists(st.sampled_from([0, 1, 1, 2, 5, 16]), min_size=count, max_size=count))
        for _ in range(2)
    ]
    page = draw(st.sampled_from([1, 2, 3, 4, 16]))
    seed = draw(st.integers(0, 9))
    return held, news, page, seed


def rows(seed, lengths, *shape):
    """One tensor ``[length, *shape]`` a sequence."""
    return [randn(seed + 100 * b, n, *shape) for b, n in enumerate(lengths)]


def paged(op, dense, lengths, page, seed, spare=3, layouts=None):
    """The first rows of whole histories in permuted pages; all else is NaN, -1 where unused."""
    most = [-(-len(x) // page) for x in next(iter(dense.values()))]
    order = torch.randperm(sum(most) + spare, generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(most), max(most) + 1), -1, dtype=torch.int32)
    at = 0
    for b, n in enumerate(most):
        table[b, :n] = order[at : at + n]
        at += n
    pages = {}
    for name, sequences in dense.items():
        held = torch.full((len(order), page, *sequences[0].shape[1:]), torch.nan)
        for b, x in enumerate(sequences):
            for i in range(lengths[b]):
                held[table[b, i // page], i % page] = x[i]
        if layouts and name in layouts:  # heads outside
            held = held.transpose(1, 2).contiguous()
        pages[name] = held
    return ac.PagedCache(pages, table, torch.tensor(lengths, dtype=torch.int32), layouts or {})


def packed_call(op, cache, parts, **options):
    """One call with sequences end to end."""
    cu = torch.tensor([0, *itertools.accumulate(len(x) for x in parts[0])])
    return op(*(torch.cat(x) for x in parts), cache=cache, cu_seqlens=cu, **options)


@pytest.mark.parametrize("layout", [None, {"k": "pages Hkv page D", "v": "pages Hkv page E"}])
@given(batches())
@PROPERTY
def test_pages_equal_dense_caches_and_one_pass(layout, case):
    held, news, page, seed = case
    total = [a + b + c for a, b, c in zip(held, *news, strict=True)]
    q = rows(1, total, HEADS * GROUP, DIM)
    k, v = rows(2, total, HEADS, DIM), rows(3, total, HEADS, DIM)
    cache = paged(ATTENTION, {"k": k, "v": v}, held, page, seed, layouts=layout)
    flat = ac.DenseCache.allocate(
        ATTENTION, sizes={"B": len(held), "Hkv": HEADS, "D": DIM, "E": DIM}, capacity=64,
        dtype=torch.float32,
    )  # fmt: skip
    for b, n in enumerate(held):
        for name, x in (("k", k), ("v", v)):
            flat.tensors[name][b, :n] = x[b][:n]
    flat.lengths.copy_(torch.tensor(held))
    whole = [ATTENTION(*(x[b][None] for x in (q, k, v)))[0] for b in range(len(held))]
    at = list(held)
    for new in news:
        parts = [
            [x[b][n : n + t] for b, (n, t) in enumerate(zip(at, new, strict=True))]
            for x in (q, k, v)
        ]
        exact = packed_call(ATTENTION.reference, cache, parts)
        got = packed_call(ATTENTION, cache, parts)
        assert torch.equal(got, packed_call(ATTENTION, flat, parts))
        want = [x[n : n + t] for x, n, t in zip(whole, at, new, strict=True)]
        assert torch.allclose(got, torch.cat(want), atol=2e-6)
        assert torch.allclose(got.double(), exact, atol=2e-6)
        at = [n + t for n, t in zip(at, new, strict=True)]
        assert cache.lengths.tolist() == at
    kept = paged(ATTENTION, {"k": k, "v": v}, at, page, seed, layouts=layout)
    for name in ("k", "v"):
        assert torch.equal(cache.pages[name].nan_to_num(7), kept.pages[name].nan_to_num(7))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("tokens", [1, 16])
def test_a_dense_batch_decodes_through_pages(backend, tokens):
    total = [tokens + n for n in (5, 0, 17)]
    q, k, v = (rows(i, total, h, DIM) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
    cache = paged(ATTENTION, {"k": k, "v": v}, [5, 0, 17], 4, 0)
    new = [torch.stack([x[-tokens:] for x in part]) for part in (q, k, v)]
    got, lse = ATTENTION.decode(*new, cache, return_lse=True, backend=backend)
    for b in range(3):
        o, l = ATTENTION(*(x[b][None] for x in (q, k, v)), return_lse=True)
        assert torch.allclose(got[b], o[0, -tokens:], atol=2e-6)
        assert torch.allclose(lse[b], l[0, -tokens:], atol=2e-6)


def test_interleaved_keys_and_values_share_pages():
    kv = torch.zeros(6, 4, 2, HEADS, DIM)
    plain = ac.PagedCache.allocate(
        ATTENTION, sizes={"B": 2, "Hkv": HEADS, "D": DIM, "E": DIM}, capacity=9, page=4,
        dtype=torch.float32,
    )  # fmt: skip
    mixed = ac.PagedCache(
        {"k": kv[:, :, 0], "v": kv[:, :, 1]}, plain.block_table, plain.lengths.clone()
    )
    q, k, v = (
        randn(0, 2, 6, HEADS * GROUP, DIM),
        randn(1, 2, 6, HEADS, DIM),
        randn(2, 2, 6, HEADS, DIM),
    )
    assert torch.equal(ATTENTION(q, k, v, cache=mixed), ATTENTION(q, k, v, cache=plain))
    assert torch.equal(kv[:, :, 1], plain.pages["v"])


def test_labels_in_pages_are_read_at_the_query_too():
    n = 11
    q, k, v = (rows(i, [n], 1, DIM) for i in range(3))
    doc = [torch.arange(n).div(4, rounding_mode="floor").float()]
    cache = paged(documents, {"k": k, "v": v, "doc": doc}, [8], 3, 1)
    got = documents.decode(*(x[0][None, 8:] for x in (q, k, v)), doc[0][None, 8:], cache)
    assert torch.allclose(
        got, documents(*(x[0][None] for x in (q, k, v)), doc[0][None])[:, 8:], atol=1e-6
    )


def small(**changes):
    """A paged cache of two sequences with 3 pages of 4 rows each."""
    cache = ac.PagedCache.allocate(
        ATTENTION, sizes={"B": 2, "Hkv": 1, "D": DIM, "E": DIM}, capacity=12, page=4,
        dtype=torch.float32,
    )  # fmt: skip
    for name, value in changes.items():
        getattr(cache, name).copy_(torch.tensor(value))
    return cache


def decode(cache, tokens=2):
    """A dense decode of two sequences."""
    return ATTENTION.decode(*(randn(i, 2, tokens, 1, DIM) for i in range(3)), cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [3, 11]}, "sequence 1 lacks 1 page for its tokens"),
        ({"block_table": [[-1, -1, -1], [3, 4, 5]], "lengths": [4, 0]}, "sequence 0 lacks 2 pages"),
        ({"block_table": [[0, 1, 2], [6, 4, 5]]}, "sequence 1 has a page that does not exist"),
        ({"block_table": [[0, 1, 2], [-2, 4, 5]]}, "sequence 1 has a page that does not exist"),
        (
            {"block_table": [[0, 1, 2], [0, 4, 5]]},
            "a page that sequence 1 writes",
        ),
        ({"block_table": [[0, 1, 2], [0, 4, 5]], "lengths": [0, 5]}, "that sequence 1 reads"),
        (
            {"block_table": [[0, 0, 2], [3, 4, 5]], "lengths": [4, 0]},
            "a page that sequence 0 reads",
        ),
    ],
)
def test_a_block_table_that_does_not_fit_is_named_and_nothing_is_written(changes, message):
    cache = small(**changes)
    before = {n: t.clone() for n, t in cache.pages.items()}
    lengths = cache.lengths.clone()
    error = fails(errors.PageError, lambda: decode(cache), message)
    assert (error.op, error.argument) == ("attention", "cache.block_table")
    assert all(torch.equal(before[n], t) for n, t in cache.pages.items())
    assert torch.equal(lengths, cache.lengths)


def test_a_full_page_that_nobody_writes_may_be_shared():
    cache = small(block_table=[[0, 1, 2], [0, 4, 5]], lengths=[4, 6])
    assert decode(cache).isfinite().all()


def test_caches_of_the_wrong_form_are_refused():
    cache = small()
    table = cache.block_table
    for kind, bad in (("Cache", table.long()), ("Cache", table[:1]), ("Rank", table[0])):
        wrong = ac.PagedCache(cache.pages, bad, cache.lengths)
        error = fails(getattr(errors, f"{kind}Error"), lambda wrong=wrong: decode(wrong))
        assert error.argument == "cache.block_table"
    wrong = ac.PagedCache(cache.pages, cache.block_table, cache.lengths, {"k": "pages page D"})
    assert fails(errors.CacheError, lambda: decode(wrong), "other axes").argument == "layouts[k]"
    fails(errors.CacheError, lambda: decode(small(lengths=[-1, 0])), "negative length")
    apart = torch.zeros(2, 2, dtype=torch.int32)[:, 0]
    wrong = ac.PagedCache(cache.pages, cache.block_table, apart)
    assert fails(errors.StrideError, lambda: decode(wrong)).argument == "cache.lengths"
    other = ac.PagedCache(
        {**cache.pages, "v": cache.pages["v"][:, :2]}, cache.block_table, cache.lengths
    )
    assert fails(errors.SizeError, lambda: decode(other)).axis == "page"


# --- histories in blocks


@ac.op(out="B T H D")
def block_means(q=ac.Activation("B T H D"), k=ac.Cache("B (Sb C) H D"), v=ac.Cache("B (Sb C) H D")):
    score = ac.dot(q, ac.sum(k, "C") / ac.size("C"), "D") / (1 + ac.index("T"))
    return ac.dot(ac.softmax(score, "Sb"), ac.sum(v, "C"), "Sb")


def test_a_history_in_blocks_is_whole_blocks_passed_whole():
    q, k = randn(0, 1, 10, 2, DIM), randn(1, 1, 12, 2, DIM)
    got = block_means(q, k, k, sizes={"C": 4})
    assert torch.allclose(got.double(), block_means.reference(q, k, k, sizes={"C": 4}), atol=1e-5)
    error = fails(
        errors.SizeError, lambda: block_means(q[:, :10], k[:, :10], k[:, :10], sizes={"C": 4})
    )
    assert (error.argument, error.axis, error.found) == ("k", "Sb", 10)
    cache = ac.DenseCache({"k": k, "v": k}, torch.zeros(1, dtype=torch.int32))
    fails(
        errors.RefusedError, lambda: block_means(q, k, k, cache=cache, sizes={"C": 4}), "in blocks"
    )
    packed = (q[0], k[0], k[0])
    cu = torch.tensor([0, 12])
    fails(
        errors.RefusedError,
        lambda: block_means(*packed, cu_seqlens=cu, sizes={"C": 4}),
        "in blocks",
    )


# --- pools


def delta(batch, tokens, seed=0):
    """Arguments of the gated delta rule: q, k, v, g, beta with 2 heads of 4 x 3."""
    shape = (batch, tokens, 2)
    q, k = (torch.nn.functional.normalize(randn(seed + i, *shape, 4), dim=-1) for i in range(2))
    return (
        q,
        k,
        randn(seed + 2, *shape, 3),
        -randn(seed + 3, *shape).abs(),
        randn(seed + 4, *shape).sigmoid(),
    )


def pool_of(slots, dtype=torch.float32):
    """A pool with states of 2 x 4 x 3."""
    return randn(9, slots, 2, 4, 3).to(dtype)


@st.composite
def slot_choices(draw):
    """Slots read and written by up to 4 sequences of a pool of 7, and their numbers of tokens."""
    count = draw(st.integers(1, 4))
    slots = draw(st.permutations(range(7)))[:count]
    slots = [draw(st.sampled_from([s, s, -1])) for s in slots]
    out = None
    if draw(st.booleans()):
        free = draw(st.permutations([s for s in range(7) if s not in slots]))
        out = [draw(st.sampled_from([s, f, -1])) for s, f in zip(slots, free, strict=False)]
        out += [-1] * (count - len(out))
    return (
        slots,
        out,
        draw(st.lists(st.sampled_from([0, 1, 2, 70]), min_size=count, max_size=count)),
    )


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(slot_choices())
@PROPERTY
def test_named_slots_are_read_and_written_and_no_other_changes(backend, dtype, case):
    slots, out, counts = case
    pool = pool_of(7, dtype)
    before = pool.clone()
    args = [torch.cat([delta(1, n, b)[i][0] for b, n in enumerate(counts)]) for i in range(5)]
    cu = torch.tensor([0, *itertools.accumulate(counts)])
    int32 = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in (slots, out)]
    o = GDR(*args, s=ac.StatePool(pool, *int32), cu_seqlens=cu, backend=backend)
    changed = before.clone()
    for b, slot in enumerate(slots):
        start = before[slot][None] if slot >= 0 else torch.zeros_like(before[:1])
        s, own = GDR(*(x[None, cu[b] : cu[b + 1]] for x in args), s=start, backend=backend)
        assert torch.equal(o[cu[b] : cu[b + 1]], own[0])
        if (to := (slots if out is None else out)[b]) >= 0:
            changed[to] = s[0]
    assert torch.equal(pool, changed)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_slot_a_token_holds_the_state_after_that_token(backend, packed):
    args = delta(3, 5)
    pool = pool_of(20)
    slots = torch.tensor([2, -1, 4], dtype=torch.int32)
    out = torch.tensor(
        [[2, 5, 6, -1, 7], [8, 9, 10, 11, 12], [13, 14, -1, 15, 4]], dtype=torch.int32
    )
    counts = [5, 5, 5]
    before, options = pool.clone(), {}
    given_args = args
    if packed:
        counts = [5, 0, 3]
        given_args = [torch.cat([x[b, :n] for b, n in enumerate(counts)]) for x in args]
        options = {"cu_seqlens": torch.tensor([0, 5, 5, 8])}
    GDR.decode(*given_args, s=ac.StatePool(pool, slots, out), backend=backend, **options)
    changed = before.clone()
    for b, n in enumerate(counts):
        s = before[slots[b]][None] if slots[b] >= 0 else torch.zeros_like(before[:1])
        for t in range(n):
            s, _ = GDR(*(x[b : b + 1, t : t + 1] for x in args), s=s, backend="reference")
            if out[b, t] >= 0:
                changed[out[b, t]] = s[0]
    written = (pool != before).flatten(1).any(1)
    assert torch.equal(written, (changed != before).flatten(1).any(1))
    assert torch.allclose(pool, changed, atol=1e-6)


def test_states_laid_out_otherwise_live_in_pools():
    @ac.op(scan="T", out="B T H V")
    def turned(k=ac.Activation("B T H K"), v=ac.Activation("B T H V"), s=ac.State("H B V K")):
        s = 0.5 * s + k * v
        return s, ac.dot(s, k, "K")

    k, v = randn(0, 2, 3, 2, 4), randn(1, 2, 3, 2, 3)
    pool = randn(2, 2, 5, 3, 4)
    start, slots = pool[:, [3, 1]].contiguous(), torch.tensor([3, 1], dtype=torch.int32)
    o = turned(k, v, s=ac.StatePool(pool, slots))
    s, own = turned(k, v, s=start)
    assert torch.equal(o, own) and torch.equal(pool[:, [3, 1]], s)


def test_windows_and_states_have_pools_of_their_own():
    k, v, w = randn(0, 2, 5, 2, 4), randn(1, 2, 5, 2, 3), randn(2, 2, 4, 3)
    windows, states = randn(3, 6, 2, 4, 2), randn(4, 20, 2, 4, 3)
    win, s = windows[[4, 1]], states[[3, 0]]
    slots, out = torch.tensor([3, 0]).int(), torch.arange(10).view(2, 5).int() + 8
    pools = {
        "win": ac.StatePool(windows, torch.tensor([4, 1]).int()),
        "s": ac.StatePool(states, slots, out),
    }
    o = convolved(k, v, w, **pools)
    parts = []
    for t in range(5):
        win, s, part = convolved(k[:, t : t + 1], v[:, t : t + 1], w, win=win, s=s)
        parts.append(part)
        assert torch.allclose(states[out[:, t].long()], s, atol=1e-6)
    assert torch.allclose(o, torch.cat(parts, 1), atol=1e-6)
    assert torch.allclose(windows[[4, 1]], win, atol=1e-6)


def test_what_is_wrong_with_a_pool_is_named_and_nothing_is_written():
    args = delta(2, 3)
    pool = pool_of(4)
    before = pool.clone()

    def run(slots, out=None, kind=errors.SlotError, **changes):
        view = ac.StatePool(
            pool, *(None if x is None else torch.tensor(x).int() for x in (slots, out))
        )
        return fails(kind, lambda: GDR(*args, **{"s": view, **changes}))

    assert run([0, 4]).found == 4
    assert run([-2, 1]).expected == "-1 .. 3"
    assert "written twice" in run([1, 1]).message
    assert run([0, 1], [2, 9]).argument == "s.out_slots"
    assert "sequence 1 writes a slot that sequence 0 reads" in run([0, 1], [1, 0]).message
    assert "written twice" in run([0, 1], [[2, 3, 2], [-1, -1, -1]]).message
    assert run([0, 1, 2], kind=errors.SizeError).axis == "B"
    assert run([0, 1], [[0, 1], [2, 3]], kind=errors.SizeError).axis == "T"
    assert run([[0], [1]], kind=errors.RankError).argument == "s.slots"
    far = ac.StatePool(pool, torch.tensor([0, 1]))
    assert fails(errors.DtypeError, lambda: GDR(*args, s=far)).argument == "s.slots"
    narrow = ac.StatePool(pool[:, :1], torch.tensor([0, 1]).int())
    assert fails(errors.SizeError, lambda: GDR(*args, s=narrow)).argument == "s"
    assert fails(errors.ArgumentError, lambda: GDR(far, *args[1:])).argument == "q"
    wide = delta(2, 3)
    shared = ac.StatePool(wide[2].view(-1)[:24].view(1, 2, 4, 3), torch.tensor([-1, 0]).int())
    assert fails(errors.OverlapError, lambda: GDR(*wide, s=shared)).argument == "s"
    good = ac.StatePool(pool, torch.tensor([0, 1]).int())
    assert fails(
        errors.OverlapError, lambda: GDR(*args, s=good, out=pool.view(-1)[:36].view(2, 3, 2, 3))
    )
    assert torch.equal(before, pool)


def test_padding_rows_with_slot_minus_one_leave_a_live_slot_alone():
    pool = torch.zeros(3, 2, 4, 3)
    pool[0] = 7.0
    GDR.decode(*delta(2, 1), s=ac.StatePool(pool, torch.tensor([-1, 2]).int()))
    assert (pool[0] == 7).all() and not pool[1].any() and pool[2].any()


def test_the_reference_of_a_pool_reads_it_and_writes_nothing():
    pool = pool_of(5)
    before = pool.clone()
    out = torch.tensor([[0, 1], [-1, 3]]).int()
    kwargs = {"s": ac.StatePool(pool, torch.tensor([4, -1]).int(), out)}
    assert GDR.reference(*delta(2, 2), **kwargs).shape == (2, 2, 2, 3)
    call, _ = bind(GDR.declaration, delta(2, 2), kwargs)
    results, tokens = reference_results(call)
    assert torch.equal(tokens["s"][:, -1], results["s"]) and each_token(call)["s"].shape == (
        2,
        2,
        2,
        4,
        3,
    )
    assert torch.equal(before, pool)


@pytest.mark.parametrize("tokens", [1, 4])
def test_an_initial_state_is_honoured_and_two_calls_equal_one(tokens):
    args, start = delta(2, 2 * tokens), randn(8, 2, 2, 4, 3)
    s, o = GDR(*args, s=start)
    first = GDR(*(x[:, :tokens] for x in args), s=start)
    second = GDR(*(x[:, tokens:] for x in args), s=first.s)
    assert s.shape == (2, 2, 4, 3)
    assert torch.allclose(torch.cat([first.o, second.o], 1), o, atol=1e-6)
    assert torch.allclose(second.s, s, atol=1e-6)
