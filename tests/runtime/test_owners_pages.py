"""Sequences in pages: forks, roll-backs, batches that stay where they are, and every mistake."""

import itertools

import pytest
import torch

import attncc as ac
from attncc.dsl import errors
from attncc.runtime.quantised import Quantised
from tests.runtime.eager_ops import documents
from tests.runtime.owner_ops import close
from tests.runtime.test_owners_kept import fails

ATTENTION = ac.ops.attention
HEADS, GROUP, DIM = 2, 2, 4
SIZES = {"Hkv": HEADS, "D": DIM, "E": DIM}


def owner(pages=16, page=4, **options):
    """Pages of attention in fp32."""
    return ac.PageOwner.allocate(
        ATTENTION, sizes=SIZES, pages=pages, page=page, dtype=torch.float32, **options
    )


def tokens(n, seed=0):
    """q, k, v of some tokens of one sequence, end to end."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, h, DIM, generator=g) for h in (HEADS * GROUP, HEADS, HEADS)]


def close_to_whole(got, qkv, first=0):
    """The rows behind the first ones of a sequence, as one pass gives them."""
    close(got[None], ATTENTION, [x[None] for x in qkv], slice(None), slice(first, None))


def extend(pages, handles, parts):
    """Append to sequences, in one packed call."""
    counts = [len(p[0]) for p in parts]
    cu = torch.tensor([0, *itertools.accumulate(counts)])
    with pages.append(handles, counts) as cache:
        o = ATTENTION(*(torch.cat(x) for x in zip(*parts, strict=True)), cache=cache, cu_seqlens=cu)
    return o.split(counts)


def cut(qkv, *ends):
    """Pieces of a sequence."""
    return [[x[a:b] for x in qkv] for a, b in itertools.pairwise((0, *ends))]


@pytest.mark.parametrize("layouts", [None, {"k": "pages Hkv page D", "v": "Hkv pages page E"}])
@pytest.mark.parametrize("prefix", [3, 4, 6, 8])
def test_a_forked_prefix_is_shared_until_one_of_them_writes(prefix, layouts):
    pages = owner(layouts=layouts)
    start, a_new, b_new = tokens(8), tokens(5, 1), tokens(3, 2)
    a = pages.add()
    extend(pages, [a], [start])
    free = pages.free
    b = pages.fork(a, prefix)
    assert pages.free == free and pages.length(b) == prefix
    shared = pages.pages_of(b)
    assert all(pages.references(p) == 2 for p in shared)
    o_a, o_b = extend(pages, [a, b], [a_new, b_new])
    full = prefix // 4
    assert pages.pages_of(a)[:full] == pages.pages_of(b)[:full] == shared[:full]
    assert not set(pages.pages_of(a)[full:]) & set(pages.pages_of(b)[full:])
    own = [torch.cat(x) for x in zip(start, a_new, strict=True)]
    other = [torch.cat([x[:prefix], y]) for x, y in zip(start, b_new, strict=True)]
    close_to_whole(o_a, own, 8)
    close_to_whole(o_b, other, prefix)
    pages.release(a)
    assert all(pages.references(p) == 1 for p in pages.pages_of(b))


def test_rejected_drafts_are_rolled_back_and_their_pages_are_free_again():
    pages = owner(pages=4, page=2)
    a = pages.add()
    one, drafts, rest = cut(tokens(8), 3, 7, 8)
    extend(pages, [a], [one])
    extend(pages, [a], [drafts])
    assert (pages.length(a), pages.free) == (7, 0)
    pages.truncate(a, 4)
    assert (pages.length(a), pages.free) == (4, 2)
    (o,) = extend(pages, [a], [rest])
    kept = [torch.cat([x, y[:1], z]) for x, y, z in zip(one, drafts, rest, strict=True)]
    close_to_whole(o, kept, 4)


def test_a_roll_back_may_keep_its_pages_reserved():
    pages = owner(pages=3, page=2)
    a = pages.add(6)
    one, drafts, rest = cut(tokens(6), 3, 5, 6)
    extend(pages, [a], [one])
    extend(pages, [a], [drafts])
    pages.truncate(a, 2, give_back=False)
    fails(errors.ExhaustedError, lambda: pages.add(1))
    (o,) = extend(pages, [a], [rest])
    close_to_whole(o, [torch.cat([x[:2], y]) for x, y in zip(one, rest, strict=True)], 2)


def test_labels_and_interleaved_pages_are_copied_as_well():
    kv = torch.zeros(6, 4, 2, HEADS, DIM)
    none = torch.empty(0, dtype=torch.int32)
    pages = ac.PageOwner(
        ATTENTION, ac.PagedCache({"k": kv[:, :, 0], "v": kv[:, :, 1]}, none.view(0, 0), none)
    )
    a = pages.add()
    start, new = cut(tokens(7), 6, 7)
    extend(pages, [a], [start])
    b = pages.fork(a)
    extend(pages, [b], [new])
    source, target = pages.pages_of(a)[1], pages.pages_of(b)[1]
    assert torch.equal(kv[source, :2], kv[target, :2]) and kv[target, 2].any()
    assert not kv[source, 2].any()

    held = ac.PageOwner.allocate(
        documents, sizes={"H": 1, "D": DIM}, pages=4, page=4,
        dtype={"k": torch.float32, "v": torch.float32, "doc": torch.int32},
    )  # fmt: skip
    q, doc = torch.randn(1, 6, 1, DIM), torch.tensor([[0, 0, 1, 1, 1, 2]], dtype=torch.int32)
    a = held.add()
    with held.append([a], 5) as cache:
        documents(q[:, :5], q[:, :5], q[:, :5], doc[:, :5], cache=cache)
    b = held.fork(a)
    with held.append([b], 1) as cache:
        o = documents.decode(q[:, 5:], q[:, 5:], q[:, 5:], doc[:, 5:], cache)
    close(o, documents, (q, q, q, doc), slice(None), slice(5, None))


@pytest.mark.parametrize("layouts", [None, {"k": "pages Hkv page D"}])
@pytest.mark.parametrize("scale", [torch.float32, "ue8m0"])
def test_a_copy_of_quantised_rows_has_their_scales(scale, layouts):
    width = 32
    pages = ac.PageOwner.allocate(
        ATTENTION, sizes={"Hkv": 1, "D": width, "E": width}, pages=6, page=4, layouts=layouts,
        dtype={"k": Quantised(block=32, scale=scale), "v": Quantised(scale=scale)},
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 7, 1, width, generator=g) * torch.arange(1, 8)[:, None, None]
    a = pages.add()
    with pages.append([a], 6) as cache:
        ATTENTION(*(3 * [x[:, :6]]), cache=cache, backend="torch")
    b = pages.fork(a)
    with pages.append([b], 1) as cache:
        ATTENTION.decode(*(3 * [x[:, 6:]]), cache, backend="torch")
    view = pages.view([a, b])
    source, target = pages.pages_of(a)[1], pages.pages_of(b)[1]
    assert source != target
    for name in ("k", "v"):
        turned = layouts is not None and name in layouts
        rows = (view.pages[name].transpose(1, 2) if turned else view.pages[name]).view(torch.uint8)
        scales = view.scales[name]  # [pages, H, D', page]
        assert torch.equal(rows[source, :2], rows[target, :2]) and rows[target, 2].any()
        assert torch.equal(scales[source, ..., :2], scales[target, ..., :2])
        assert scales[source, ..., :2].all() and scales[target, ..., 2].all()
        assert not rows[source, 2].any() and not scales[source, ..., 2].any()


def test_a_batch_keeps_its_tensors_while_sequences_come_and_go():
    pages = owner(pages=20, page=2)
    batch = pages.batch(3, 10)
    cache = batch.cache
    addresses = [x.data_ptr() for x in (cache.block_table, cache.lengths, *cache.pages.values())]
    lives = {}

    def step(handles, seed):
        new = [tokens(1, 100 * seed + i) for i in range(3)]
        batch.set(handles)
        with batch.append(1) as given:
            o = ATTENTION.decode(*(torch.stack(x) for x in zip(*new, strict=True)), given)
        for row, h in enumerate(handles):
            if h is None:
                continue
            lives.setdefault(h, []).append(new[row])
            own = [torch.cat(x) for x in zip(*lives[h], strict=True)]
            close_to_whole(o[row], own, len(lives[h]) - 1)

    a, b = pages.add(), pages.add()
    step([a], 0)
    step([None, b, a], 1)
    for seed in range(2, 7):
        step([a, b], seed)
    c = pages.fork(b)
    lives[c] = list(lives[b])
    step([c, a, b], 7)
    pages.release(a)
    pages.truncate(b, 4)
    del lives[b][4:]
    step([b, None, c], 8)
    assert batch.handles == (b, None, c)
    assert batch.cache is cache and batch.cache.lengths.tolist() == [5, 1, 8]
    now = [x.data_ptr() for x in (cache.block_table, cache.lengths, *cache.pages.values())]
    assert now == addresses
    batch.close()
    pages.release(b)
    pages.release(c)
    assert pages.free == 20


def test_pages_are_handed_out_in_steps_and_nothing_moves():
    pages = owner(pages=4, page=2, handed_out=1)
    address = pages.view([]).pages["k"].data_ptr()
    a = pages.add(2)
    first = cut(tokens(5), 2, 5)
    (before,) = extend(pages, [a], [first[0]])
    error = fails(errors.ExhaustedError, lambda: pages.reserve([a], 3))
    assert (error.missing, error.free, error.wanted, error.unit) == (2, 0, 2, "page")
    assert "2 pages are missing" in str(error)
    pages.grow(3)
    (after,) = extend(pages, [a], [first[1]])
    close_to_whole(torch.cat([before, after]), tokens(5))
    assert pages.view([]).pages["k"].data_ptr() == address
    assert fails(errors.CacheError, lambda: pages.grow(1), "no more pages").expected == "0 .. 0"


def test_exhaustion_is_found_before_anything_is_taken_or_copied():
    pages = owner(pages=3, page=4)
    a = pages.add()
    extend(pages, [a], [tokens(6)])
    b = pages.fork(a)
    held = {n: x.clone() for n, x in pages.view([]).pages.items()}
    tables = pages.pages_of(a), pages.pages_of(b)
    error = fails(errors.ExhaustedError, lambda: pages.reserve([a, b], [1, 3]))
    assert (error.missing, error.wanted, error.op) == (1, 2, "attention")  # a copy and a new one
    fails(errors.ExhaustedError, lambda: pages.add(5))
    with pytest.raises(errors.ExhaustedError), pages.append([b], 20):
        pytest.fail("no call is made")
    assert tables == (pages.pages_of(a), pages.pages_of(b)) and pages.free == 1
    assert all(torch.equal(held[n], x) for n, x in pages.view([]).pages.items())
    assert pages.handles == (a, b)


def test_a_call_that_fails_leaves_lengths_as_they_were():
    pages = owner()
    a = pages.add()
    q, k, v = tokens(3)
    with pytest.raises(errors.CallError), pages.append([a], 3) as cache:
        ATTENTION(q[None], k[None], v[None, :2], cache=cache)
    assert pages.length(a) == 0
    close_to_whole(extend(pages, [a], [(q, k, v)])[0], (q, k, v))


def test_mistakes_are_named_and_nothing_changes():
    pages = owner(pages=6)
    a, b = pages.add(4, handle=7), pages.add()
    assert (a, b) == (7, 8)
    extend(pages, [a], [tokens(3)])

    def wrong(match, call):
        return fails(errors.CacheError, call, match)

    assert wrong("no such sequence", lambda: pages.length(3)).found == 3
    wrong("no such sequence", lambda: pages.release(0))
    wrong("of this handle is there", lambda: pages.add(handle=7))
    wrong("of this handle is there", lambda: pages.fork(a, child=b))
    wrong("named twice", lambda: pages.reserve([a, b, a], 1))
    wrong("other tokens", lambda: pages.truncate(a, 4))
    wrong("other tokens", lambda: pages.fork(a, 4))
    wrong("negative", lambda: pages.reserve([a], -1))
    wrong("one number a sequence", lambda: pages.reserve([a, b], [1]))
    wrong("no room was reserved", lambda: pages.advance([a], 2))
    shared = pages.fork(a)
    wrong("no room was reserved", lambda: pages.advance([a], 1))
    pages.release(shared)
    batch = pages.batch(2, 8)
    wrong("more sequences than rows", lambda: batch.set([a, b, None]))
    wrong("named twice", lambda: batch.set([a, a]))
    wrong("no such sequence", lambda: batch.set([a, 99]))
    batch.set([a])
    assert wrong("row 0 would pass", lambda: batch.reserve([6, 0])).axis == "S"
    wrong("than a row without a sequence has room for", lambda: batch.reserve([1, 2]))
    wrong("does not fit the batch's capacity", lambda: pages.batch(1, 4, tokens=5))
    batch.reserve(1)
    error = wrong("the device has other lengths", lambda: batch.advance(1))
    assert (error.expected, error.found) == ([4, 1], [3, 0])
    c = pages.add(12)
    wrong("row 1 would pass", lambda: batch.set([a, c]))
    pages.release(a)
    wrong("no such sequence", lambda: batch.reserve(1))
    assert batch.handles == (a, None)
    with pytest.raises(errors.SizeError):
        other = {"k": torch.zeros(3, 4, HEADS, DIM), "v": torch.zeros(2, 4, HEADS, DIM)}
        none = torch.empty(0, dtype=torch.int32)
        ac.PageOwner(ATTENTION, ac.PagedCache(other, none.view(0, 0), none))


def test_a_released_handle_may_come_back_as_another_sequence():
    pages = owner(page=2)
    batch = pages.batch(1, 8)
    for seed in range(3):
        pages.add(handle=5)
        batch.set([5])
        q, k, v = (x[None] for x in tokens(1, seed))
        with batch.append(1) as cache:
            o = ATTENTION.decode(q, k, v, cache)
        close(o, ATTENTION, (q, k, v))
        pages.release(5)
