"""Owners on the GPU: a serving loop in captured graphs, copies, and checks of what tables hold."""

import itertools
import random

import pytest
import torch

import attncc as ac
from attncc.dsl import errors
from tests.gpu.checking import DEVICE, eager, unit
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
HEADS, GROUP, DIM, PAGE, ROWS = 2, 4, 64, 16, 4
SIZES = {"Hkv": HEADS, "D": DIM, "E": DIM}
STATE = {"Hk": HEADS, "G": 1, "K": DIM, "V": DIM}


def captured(step):
    """A CUDA graph of a step that has run once before."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def qkv(*shape):
    """New tokens in bf16."""
    return [
        torch.randn(*shape, h, DIM, device=DEVICE, dtype=torch.bfloat16)
        for h in (HEADS * GROUP, HEADS, HEADS)
    ]


def delta(batch, tokens):
    """Arguments of the gated delta rule in bf16."""
    shape = (batch, tokens, HEADS)
    return [
        unit(*shape, DIM, dtype=torch.bfloat16),
        unit(*shape, DIM, dtype=torch.bfloat16),
        torch.randn(*shape, DIM, device=DEVICE, dtype=torch.bfloat16),
        torch.nn.functional.logsigmoid(torch.randn(*shape, device=DEVICE) + 2),
        torch.rand(*shape, device=DEVICE),
    ]


class Histories:
    """Keys and values of every sequence as plain tensors, beside the owner's pages."""

    def __init__(self, pages):
        self.pages, self.rows = pages, {}

    def prefill(self, handles, counts):
        """Prompts of several sequences in one packed call."""
        q, k, v = qkv(sum(counts))
        cu = torch.tensor([0, *itertools.accumulate(counts)], device=DEVICE)
        with self.pages.append(handles, counts) as cache:
            o = ATTENTION(q, k, v, cache=cache, cu_seqlens=cu, backend="triton")
        parts = (x.split(counts) for x in (q, k, v, o))
        for h, *own in zip(handles, *parts, strict=True):
            self.extend(h, *own)

    def extend(self, handle, q, k, v, o):
        """Hold new rows' outputs to the contract, and keep their keys and values."""
        new = (k, v)
        old = self.rows.get(handle, tuple(x[:0] for x in new))
        held = self.rows[handle] = tuple(torch.cat(x) for x in zip(old, new, strict=True))
        args = [q[None], *(x[None] for x in held)]
        rough = eager(ATTENTION, args, {})["o"]
        assert_close(o[None], ATTENTION.reference(*args), rough, o.dtype, f"sequence {handle}")

    def cut(self, handle, tokens):
        """A sequence's first tokens."""
        return tuple(x[:tokens] for x in self.rows[handle])


@pytest.mark.parametrize("tokens", [1, 3])
def test_requests_come_and_go_in_one_captured_decode(tokens):
    draw = random.Random(tokens)
    pages = ac.PageOwner.allocate(ATTENTION, sizes=SIZES, pages=120, page=PAGE, device=DEVICE)
    for held in pages.view([]).pages.values():
        held.fill_(torch.nan)
    batch = pages.batch(ROWS, 400, tokens=tokens)
    args = qkv(ROWS, tokens)
    out = torch.empty_like(args[0])
    graph = captured(lambda: ATTENTION.decode(*args, batch.cache, out=out, backend="triton"))
    live = Histories(pages)
    first = pages.add()
    live.prefill([first], [70])
    running = []
    for step in range(14):
        while len(running) < ROWS - step % 2:
            h = pages.fork(first, 70 - draw.choice([0, 6, 33]))
            live.rows[h] = live.cut(first, pages.length(h))
            live.prefill([h], [draw.choice([1, 16, 50])])
            running.append(h)
        rows = [*running, *[None] * (ROWS - len(running))]
        draw.shuffle(rows)
        batch.set(rows)
        for x in args:
            x.normal_()
        out.fill_(torch.nan)
        with batch.append(tokens):
            graph.replay()
        for row, h in enumerate(rows):
            if h is not None:
                live.extend(h, *(x[row] for x in (*args, out)))
                kept = pages.length(h) - draw.randrange(tokens)
                pages.truncate(h, kept)
                live.rows[h] = live.cut(h, kept)
        gone = running.pop(draw.randrange(len(running)))
        pages.release(gone)
        del live.rows[gone]
    for h, (k, v) in live.rows.items():  # the prefix is as it was, whatever its forks did
        places = torch.arange(len(k), device=DEVICE)
        table = torch.tensor(pages.pages_of(h), device=DEVICE)[places // PAGE]
        view = pages.view([h])
        assert torch.equal(view.pages["k"][table, places % PAGE], k)
        assert torch.equal(view.pages["v"][table, places % PAGE], v)
    for h in pages.handles:
        pages.release(h)
    batch.close()
    assert pages.free == 120


def test_drafts_come_and_go_in_one_captured_step():
    draw, tokens = random.Random(0), 3
    states = ac.StateOwner.allocate(GDR, sizes=STATE, slots=20, device=DEVICE)
    states.pools["s"].fill_(torch.nan)
    batch = states.batch(ROWS, tokens=tokens)
    args = delta(ROWS, tokens)
    out = torch.empty_like(args[2])
    graph = captured(lambda: GDR.decode(*args, **batch.arguments, out=out, backend="triton"))
    assert states.pools["s"].isnan().all(), "rows without a sequence write nothing"
    running = []
    for step in range(10):
        while len(running) < ROWS - step % 2:
            fork = running and draw.random() < 0.5
            running.append(states.fork(draw.choice(running)) if fork else states.add())
        rows = [*running, *[None] * (ROWS - len(running))]
        draw.shuffle(rows)
        batch.set(rows)
        before = states.pools["s"].clone()
        kept = {h: states.slot_of(h) for h in running}
        for x, new in zip(args, delta(ROWS, tokens), strict=True):
            x.copy_(new)
        batch.speculate()
        taken = {h: states.sequence(h).drafts for h in running}
        graph.replay()
        counts = [draw.randrange(tokens + 1) for _ in rows]
        batch.accept(counts)
        for row, h in enumerate(rows):
            if h is None:
                continue
            s = before[kept[h]][None]
            assert torch.equal(states.pools["s"][kept[h]], s[0])
            given = [x[row : row + 1] for x in args]
            exact, rough = GDR.reference(*given, s=s), eager(GDR, given, {"s": s})
            assert_close(out[row], exact.o[0], rough["o"][0], out.dtype, f"row {row}")
            n = counts[row]
            assert states.slot_of(h) == (kept[h], *taken[h])[n]
            if n:
                given = [x[:, :n] for x in given]
                exact, rough = GDR.reference(*given, s=s).s[0], eager(GDR, given, {"s": s})["s"][0]
                got = states.pools["s"][states.slot_of(h)]
                assert_close(got, exact, rough, got.dtype, f"state of row {row}")
        states.release(running.pop(draw.randrange(len(running))))
    for h in states.handles:
        states.release(h)
    assert states.free == 20


def test_exhaustion_leaves_the_device_alone():
    pages = ac.PageOwner.allocate(ATTENTION, sizes=SIZES, pages=4, page=PAGE, device=DEVICE)
    a = pages.add()
    live = Histories(pages)
    live.prefill([a], [40])
    b = pages.fork(a)
    held = {n: t.clone() for n, t in pages.view([]).pages.items()}
    with pytest.raises(ac.ExhaustedError) as caught:
        pages.reserve([a, b], [8, 9])
    assert (caught.value.missing, caught.value.wanted, caught.value.free) == (1, 2, 1)
    assert all(torch.equal(held[n], t) for n, t in pages.view([]).pages.items())
    assert pages.pages_of(a) == pages.pages_of(b)


def int32(values):
    """A vector or table of int32 on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


TABLE = [[0, 1, 2, 3], [4, 5, 6, 7]]
PAGED = {
    "a page beyond the pool": ([[0, 1, 2, 3], [4, 5, 9, 7]], [3, 40]),
    "a page below the pool": ([[-2, 1, 2, 3], [4, 5, 6, 7]], [3, 40]),
    "a place without a page": ([[0, 1, 2, 3], [4, 5, -1, 7]], [3, 40]),
    "a page of two writers": ([[0, 1, 2, 3], [4, 5, 0, 7]], [3, 40]),
    "a length beyond the table": (TABLE, [3, 64]),
}


@pytest.mark.parametrize("case", PAGED)
def test_a_bad_table_is_one_error_and_nothing_is_written(case, monkeypatch):
    monkeypatch.setenv("ATTNCC_CHECK", "1")
    table, lengths = PAGED[case]
    pages = {n: torch.zeros(8, PAGE, HEADS, DIM, device=DEVICE).bfloat16() for n in ("k", "v")}
    cache = ac.PagedCache(pages, int32(table), int32(lengths))
    with pytest.raises(errors.PageError) as caught:
        ATTENTION.decode(*qkv(2, 1), cache, backend="triton")
    assert caught.value.argument == "cache.block_table" and "\n" not in str(caught.value)
    assert not any(t.any() for t in pages.values()) and cache.lengths.tolist() == lengths


@pytest.mark.parametrize("lengths", [[0, 20], [0, 21], [-1, 0]])
def test_a_length_that_does_not_fit_is_one_error_and_nothing_is_written(lengths, monkeypatch):
    monkeypatch.setenv("ATTNCC_CHECK", "1")
    cache = ATTENTION.caches(sizes={**SIZES, "B": 2}, capacity=20, device=DEVICE).cache
    cache.lengths.copy_(int32(lengths))
    with pytest.raises(errors.CacheError):
        ATTENTION.decode(*qkv(2, 1), cache, backend="triton")
    assert not any(t.any() for t in cache.tensors.values()) and cache.lengths.tolist() == lengths


@pytest.mark.parametrize(
    ("slots", "out"),
    [([0, 4], None), ([-2, 0], None), ([1, 1], None), ([0, 1], [2, 2]), ([0, 1], [1, 2]),
     ([0, 1], [[2, 3], [3, -1]]), ([0, 1], [[2, 9], [3, -1]])],
)  # fmt: skip
def test_a_bad_slot_is_one_error_and_nothing_is_written(slots, out, monkeypatch):
    monkeypatch.setenv("ATTNCC_CHECK", "1")
    pool = torch.zeros(4, HEADS, DIM, DIM, device=DEVICE)
    view = ac.StatePool(pool, int32(slots), None if out is None else int32(out))
    with pytest.raises(errors.SlotError):
        GDR.decode(*delta(2, 2), s=view, backend="triton")
    assert not pool.any()


@pytest.mark.parametrize("cu", [[0, 5, 3, 8], [1, 3, 5, 8], [0, 3, 5, 7], [0, 3, 5, 9]])
def test_bad_cu_seqlens_are_one_error_and_nothing_is_written(cu, monkeypatch):
    monkeypatch.setenv("ATTNCC_CHECK", "1")
    cache = ATTENTION.caches(sizes={**SIZES, "B": 3}, capacity=64, page=PAGE, device=DEVICE).cache
    with pytest.raises(errors.SeqlensError) as caught:
        ATTENTION(*qkv(8), cache=cache, cu_seqlens=int32(cu), backend="triton")
    assert caught.value.argument == "cu_seqlens"
    pool = torch.zeros(3, HEADS, DIM, DIM, device=DEVICE)
    view = ac.StatePool(pool, int32([0, 1, 2]))
    with pytest.raises(errors.SeqlensError):
        GDR(*(x[0] for x in delta(1, 8)), s=view, cu_seqlens=int32(cu), backend="triton")
    assert not pool.any() and not any(t.any() for t in cache.pages.values())
    assert cache.lengths.tolist() == [0, 0, 0]


def test_a_call_with_checks_can_be_captured_all_the_same(monkeypatch):
    monkeypatch.setenv("ATTNCC_CHECK", "1")
    pages = ac.PageOwner.allocate(ATTENTION, sizes=SIZES, pages=8, page=PAGE, device=DEVICE)
    batch = pages.batch(2, 32)
    args = qkv(2, 1)
    out = torch.empty_like(args[0])
    graph = captured(lambda: ATTENTION.decode(*args, batch.cache, out=out, backend="triton"))
    live = Histories(pages)
    batch.set([pages.add(), pages.add()])
    for _ in range(3):
        for x in args:
            x.normal_()
        with batch.append(1):
            graph.replay()
        for row, h in enumerate(batch.handles):
            live.extend(h, *(x[row] for x in (*args, out)))
    batch.reserve(1)
    with pytest.raises(errors.CacheError, match="the device has other lengths"):
        batch.advance(1)  # no call was made
