"""Prepared and repeated calls on the GPU: the ordinary call's bits, graphs, streams, host time."""

import random
import threading
import time

import pytest
import torch

import attncc as ac
from attncc.runtime import dispatch, kernels
from attncc.runtime.loader import Route
from tests.gpu.checking import DEVICE, unit

pytestmark = pytest.mark.gpu
ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
BF16 = torch.bfloat16
SIZES = {"B": 4, "Hkv": 2, "D": 64, "E": 64}
PAGE, PAGES, CAPACITY = 16, 1200, 2048


def randn(*shape, dtype=BF16):
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def qkv(batch=4, tokens=1, held=None):
    rows = held or tokens
    q = randn(batch, tokens, 8, 64)
    return q, randn(batch, rows, 2, 64), randn(batch, rows, 2, 64)


def dense(lengths):
    cache = ac.DenseCache.allocate(ATTENTION, sizes=SIZES, capacity=CAPACITY, device=DEVICE)
    for held in cache.tensors.values():
        held.normal_()
    cache.lengths.copy_(int32(lengths))
    return cache


def paged(lengths):
    spare = ac.PagedCache.allocate(
        ATTENTION, sizes=SIZES, capacity=CAPACITY, page=PAGE, pages=PAGES, device=DEVICE
    )
    for held in spare.pages.values():
        held.normal_()
    spare.lengths.copy_(int32(lengths))
    order = torch.randperm(PAGES, device=DEVICE).int()[: spare.block_table.numel()]
    return ac.PagedCache(spare.pages, order.view(spare.block_table.shape).clone(), spare.lengths)


def copied(cache):
    held = {n: t.clone() for n, t in cache.tensors.items()}
    if isinstance(cache, ac.DenseCache):
        return ac.DenseCache(held, cache.lengths.clone())
    return ac.PagedCache(held, cache.block_table.clone(), cache.lengths.clone())


def delta(batch=4, tokens=1, heads=4, dim=64):
    q, k = (unit(batch, tokens, heads // 2, dim, dtype=BF16) for _ in range(2))
    v, beta = randn(batch, tokens, heads, dim), torch.rand(batch, tokens, heads, device=DEVICE)
    g = -torch.rand(batch, tokens, heads, device=DEVICE)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta.to(BF16)}


def pool_of(slots, heads=4, dim=64):
    return ac.StatePool(randn(16, heads, dim, dim, dtype=torch.float32), int32(slots))


def ordinary(op, phase, *args, **kwargs):
    """The call with every check and with planning, whatever is remembered."""
    return op.ordinary(phase, args, {**kwargs, "backend": "triton"})


def agree(cache, rival):
    pairs = zip(cache.tensors.values(), rival.tensors.values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and torch.equal(cache.lengths, rival.lengths)


MAKES = pytest.mark.parametrize("make", [dense, paged])


@MAKES
def test_decode_with_a_cache_equals_the_ordinary_call(make):
    cache = make([70, 0, 1000, 2000])
    out = torch.full((4, 1, 8, 64), torch.nan, device=DEVICE, dtype=BF16)
    prepared = ATTENTION.prepare(
        *qkv(), copied(cache), phase="decode", out=out, return_lse=True, backend="triton"
    )
    for lengths in ([70, 0, 1000, 2000], [5, 900, 17, 64]):
        cache.lengths.copy_(int32(lengths))
        for _ in range(3):
            q, k, v = qkv()
            rival = copied(cache)
            want = ordinary(ATTENTION, "decode", q, k, v, cache=rival, return_lse=True)
            found = prepared(q=q, k=k, v=v, cache=cache)
            assert found.o is out and torch.equal(out, want.o)
            assert torch.equal(found.lse, want.lse) and agree(cache, rival)


def test_a_step_in_a_pool_equals_the_ordinary_call():
    args, pool = delta(), pool_of([3, 0, 9, 5])
    prepared = GDR.prepare(**args, s=pool, phase="decode", backend="triton")
    for slots in ([3, 0, 9, 5], [1, 2, -1, 0]):
        pool.slots.copy_(int32(slots))
        for _ in range(3):
            now = delta()
            rival = ac.StatePool(pool.pool.clone(), pool.slots.clone())
            want = ordinary(GDR, "decode", **now, s=rival)
            assert torch.equal(prepared(**now), want) and torch.equal(pool.pool, rival.pool)


@pytest.mark.parametrize("tokens", [1000, 9000])
def test_packed_prefill_equals_the_ordinary_call(tokens):
    cu = int32([0, 64, 64, tokens // 2, tokens])

    def packed(op):
        args = delta(1, tokens) if op is GDR else dict(zip("qkv", qkv(1, tokens), strict=True))
        return {n: x[0] for n, x in args.items()}

    for op in (GDR, ATTENTION):
        prepared = op.prepare(**packed(op), cu_seqlens=cu.clone(), backend="triton")
        for change in ([0, 64, 64, tokens // 2, tokens], [0, 1, 700, 701, tokens]):
            now, cu = packed(op), int32(change)
            found = prepared(**now, cu_seqlens=cu)
            want = ordinary(op, "prefill", **now, cu_seqlens=cu)
            pairs = [(found, want)] if torch.is_tensor(found) else zip(found, want, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


@MAKES
def test_a_graph_of_a_prepared_decode_replays_with_other_lengths_and_tables(make):
    cache, (q, k, v) = make([70, 0, 1000, 2000]), qkv()
    out = torch.empty_like(q)
    prepared = ATTENTION.prepare(q, k, v, cache, phase="decode", out=out, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared()
    for lengths in ([5, 900, 17, 64], [2000, 1, 0, 1]):
        cache.lengths.copy_(int32(lengths))
        if make is paged:
            cache.block_table.copy_(cache.block_table.flip(0))
        q.normal_()
        prepared()  # an eager run between replays has workspaces of its own
        rival = copied(cache)
        want = ordinary(ATTENTION, "decode", q, k, v, cache=rival)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want) and agree(cache, rival)


def test_a_graph_of_a_prepared_step_replays_with_other_slots():
    args, pool = delta(), pool_of([3, 0, 9, 5])
    out = torch.empty_like(args["v"])
    prepared = GDR.prepare(**args, s=pool, phase="decode", out=out, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared()
    for slots in ([1, 2, 4, 0], [-1, 7, 8, 15]):
        pool.slots.copy_(int32(slots))
        rival = ac.StatePool(pool.pool.clone(), pool.slots.clone())
        want = ordinary(GDR, "decode", **args, s=rival)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want) and torch.equal(pool.pool, rival.pool)


def test_two_streams_at_once_do_not_share_workspaces():
    inputs = [qkv(1, 1, held=8192) for _ in range(2)]
    outs = [torch.empty_like(x[0]) for x in inputs]
    wanted = [ordinary(ATTENTION, "decode", *x) for x in inputs]
    prepared = ATTENTION.prepare(*inputs[0], out=outs[0], phase="decode", backend="triton")
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, (q, k, v), out in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(torch.nan)
                prepared(q=q, k=k, v=v, out=out)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))


def test_threads_share_a_prepared_call():
    q, k, v = qkv(1, 1, held=4096)
    prepared = ATTENTION.prepare(q, k, v, phase="decode", backend="triton")
    queries = [torch.randn_like(q) for _ in range(4)]
    wanted = [ordinary(ATTENTION, "decode", x, k, v) for x in queries]
    failures = []

    def work(x, want):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                found = [prepared(q=x) for _ in range(20)]
                torch.cuda.current_stream().synchronize()
            failures.extend(1 for o in found if not torch.equal(o, want))
        except Exception as error:
            failures.append(error)

    pairs = zip(queries, wanted, strict=True)
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_kernel_that_triton_loaded_can_be_prepared(monkeypatch):
    from attncc.runtime import loader

    monkeypatch.setattr(loader, "USUAL", Route.TRITON)
    for kernel in kernels._LOADED.values():
        kernel.forget()
    args = delta()
    prepared = GDR.prepare(**args, phase="decode", backend="triton")
    now = delta()
    for a, b in zip(prepared(**now), ordinary(GDR, "decode", **now), strict=True):
        assert torch.equal(a, b)
    monkeypatch.undo()
    for kernel in kernels._LOADED.values():
        kernel.forget()


# --- repeated ordinary calls


def test_a_repeated_call_is_done_from_memory_and_equal(monkeypatch):
    went = []
    run = dispatch._Known.run
    monkeypatch.setattr(
        dispatch._Known, "run", lambda self, *a: went.append(1) or run(self, *a), raising=True
    )
    for make in (dense, paged):
        cache = make([70, 0, 1000, 2000])
        went.clear()
        for _ in range(5):
            q, k, v = qkv()
            rival = copied(cache)
            want = ordinary(ATTENTION, "decode", q, k, v, cache=rival)
            assert torch.equal(ATTENTION.decode(q, k, v, cache, backend="triton"), want)
            assert agree(cache, rival)
        assert len(went) >= 3


def test_a_repeated_call_is_captured_and_replayed():
    args, pool = delta(), pool_of([3, 0, 9, 5])
    out = torch.empty_like(args["v"])
    for _ in range(3):
        GDR.decode(**args, s=pool, out=out, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        GDR.decode(**args, s=pool, out=out, backend="triton")
    pool.slots.copy_(int32([1, 2, 4, 0]))
    rival = ac.StatePool(pool.pool.clone(), pool.slots.clone())
    want = ordinary(GDR, "decode", **args, s=rival)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want) and torch.equal(pool.pool, rival.pool)


@pytest.mark.parametrize("make", [None, dense, paged])
def test_fifty_different_calls_compile_one_kernel_of_each_kind(make, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path))
    for kernel in kernels._LOADED.values():
        kernel.forget()
    r, counts = random.Random(1), []
    for _ in range(50):
        batch = r.randint(2, 9)  # a step of few states has a plan of its own
        q, k, v = qkv(batch, 1, held=None if make else r.randint(1, 3000))
        if make is None:
            ATTENTION.decode(q, k, v, backend="triton")
        else:
            monkeypatch.setitem(SIZES, "B", batch)
            ATTENTION.decode(q, k, v, make([r.randint(0, 500)] * batch), backend="triton")
        slots = r.sample(range(16), batch)
        GDR.decode(**delta(batch), s=pool_of(slots), backend="triton")
        counts.append(kernels.compilations())
    new = counts[-1] - counts[0]
    # The first call may not need the kernels that cut a history and merge.
    assert new <= 2 and counts[-1] == counts[25]
    for kernel in kernels._LOADED.values():
        kernel.forget()


# --- host time


def host_us(work, calls=200, series=10):
    """Median host time of a call in us, the device not waited for."""
    found = []
    for _ in range(series):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return sorted(found)[series // 2]


@pytest.mark.timing
def test_a_prepared_call_costs_the_host_little(capsys):
    q, k, v = qkv(1, 1, held=128)
    out = torch.empty_like(q)
    decode = ATTENTION.prepare(q, k, v, out=out, phase="decode", backend="triton")
    other = [x.clone() for x in (q, k, v, out)]
    swap = dict(zip(("q", "k", "v", "out"), other, strict=True))
    args, pool = delta(1), pool_of([3])
    given = torch.empty_like(args["v"])
    step = GDR.prepare(**args, s=pool, out=given, phase="decode", backend="triton")
    with torch.no_grad():
        times = {
            "decode": host_us(decode),
            "decode, 4 tensors replaced": host_us(lambda: decode(**swap)),
            "gated delta rule step": host_us(step),
            "decode, repeated call": host_us(
                lambda: ATTENTION.decode(q, k, v, out=out, backend="triton")
            ),
            "step, repeated call": host_us(
                lambda: GDR.decode(**args, s=pool, out=given, backend="triton")
            ),
            "decode, ordinary": host_us(
                lambda: ordinary(ATTENTION, "decode", q, k, v, out=out), calls=50
            ),
        }
    with capsys.disabled():
        print("\nhost time in us: " + ", ".join(f"{n} {t:.1f}" for n, t in times.items()))
    prepared = [t for n, t in times.items() if "repeated" not in n and "ordinary" not in n]
    assert max(prepared) < 30
    assert max(t for n, t in times.items() if "repeated" in n) < 60
