"""torch.compile with Inductor around the generated kernels: one graph for every length."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import attncc as ac
from tests.gpu.checking import DEVICE, eager, offsets, unit
from tests.runtime.compiled_calls import CALLS, overload_of
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
DTYPE = torch.bfloat16
LENGTHS = [2, 3, 15, 16, 17, 31, 33, 48, 63, 64, 65, 80, 96, 100, 127, 128, 129, 160, 191, 200]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def counted(step):
    counter = CompileCounterWithBackend("inductor")
    return torch.compile(step, fullgraph=True, backend=counter), counter


def qkv(*rows):
    """Queries of four heads, keys and values of two."""
    return [torch.randn(*rows, heads, 128, device=DEVICE, dtype=DTYPE) for heads in (4, 2, 2)]


def delta(*rows):
    """Arguments of the gated delta rule."""
    q, k = (unit(*rows, 4, 128, dtype=DTYPE) for _ in range(2))
    v = torch.randn(*rows, 4, 128, device=DEVICE, dtype=DTYPE)
    g = torch.nn.functional.logsigmoid(torch.randn(*rows, 4, device=DEVICE) + 2)
    return [q, k, v, g, torch.rand(*rows, 4, device=DEVICE)]


def paged(lengths, capacity):
    """A cache with rows in permuted pages of 16."""
    sizes = {"B": len(lengths), "Hkv": 2, "D": 128, "E": 128}
    cache = ac.PagedCache.allocate(
        ATTENTION, sizes=sizes, capacity=capacity, page=16, dtype=DTYPE, device=DEVICE
    )
    for held in cache.pages.values():
        held.normal_()
    cache.block_table.copy_(cache.block_table.flip(0))
    cache.lengths.copy_(torch.tensor(lengths))
    return cache


def attends(q, k, v, cache):
    """What Inductor compiles stands before and behind the op; the queries it saw come back."""
    x = torch.nn.functional.silu(q) * 2
    o = ATTENTION.decode(x, k, v, cache, backend="triton")
    return o, x, torch.relu(o).sum(-1), cache.lengths.clone()


def check_step(found, k, v, cache, before):
    """A step's output against the oracle; the cache against an eager append, bit for bit."""
    o, x, behind, lengths = found
    exact = ATTENTION.reference(x, k, v, cache=copy.deepcopy(before))
    rough = eager(ATTENTION, (x, k, v), {"cache": copy.deepcopy(before)})["o"]
    assert_close(o, exact, rough, DTYPE, "o")
    torch.testing.assert_close(behind, torch.relu(o).sum(-1))
    ATTENTION.decode(x, k, v, before, backend="triton")
    assert torch.equal(cache.lengths, before.lengths) and torch.equal(lengths, before.lengths)
    assert all(torch.equal(cache.pages[name], before.pages[name]) for name in "kv")


def test_attention_compiles_once_for_twenty_lengths():
    compiled, counter = counted(attends)
    for n in LENGTHS:
        args, cache = qkv(2, n), paged([5, 33], 300 + n)
        torch._dynamo.mark_dynamic(args[0], 1)
        for t in args[1:]:
            torch._dynamo.mark_dynamic(t, 1)
        for t in cache.pages.values():
            torch._dynamo.mark_dynamic(t, 0)
        torch._dynamo.mark_dynamic(cache.block_table, 1)
        before = copy.deepcopy(cache)
        check_step(compiled(*args, cache), *args[1:], cache, before)
    assert counter.frame_count == 1


def test_a_decode_loop_compiles_once():
    compiled, counter = counted(attends)
    cache = paged([5, 33, 128], 400)
    for _ in range(20):
        args, before = qkv(3, 1), copy.deepcopy(cache)
        check_step(compiled(*args, cache), *args[1:], cache, before)
    assert counter.frame_count == 1
    assert cache.lengths.tolist() == [25, 53, 148]


def test_the_delta_rule_compiles_once_for_twenty_lengths():
    def scans(q, k, v, g, beta, s):
        v = torch.tanh(v)
        return GDR(q, k, v, g, beta, s=s, backend="triton"), v

    compiled, counter = counted(scans)
    for n in LENGTHS:
        args = delta(2, n)
        for t in args:
            torch._dynamo.mark_dynamic(t, 1)
        s = torch.randn(2, 4, 128, 128, device=DEVICE)
        found, v = compiled(*args, s)
        call = (*args[:2], v, *args[3:])
        exact, rough = GDR.reference(*call, s=s), eager(GDR, call, {"s": s})
        for name in ("s", "o"):
            got = getattr(found, name)
            assert_close(got, getattr(exact, name), rough[name], got.dtype, name)
    assert counter.frame_count == 1


def test_a_pool_is_updated_in_place_for_packed_lengths():
    def scans(q, k, v, g, beta, cu, pool, slots):
        state = ac.StatePool(pool, slots)
        return GDR(q, k, v, g, beta, cu_seqlens=cu, s=state, backend="triton"), pool[0].sum()

    compiled, counter = counted(scans)
    slots = torch.tensor([4, 1], dtype=torch.int32, device=DEVICE)
    for n in LENGTHS:
        args, cu = delta(n), offsets([1, n - 1])
        for t in args:
            torch._dynamo.mark_dynamic(t, 0)
        pool = torch.randn(7, 4, 128, 128, device=DEVICE)
        before, rough = pool.clone(), pool.clone()
        o, _ = compiled(*args, cu, pool, slots)
        options = {"cu_seqlens": cu, "s": before[slots.long()]}
        exact = GDR.reference(*args, **options)
        rough = eager(GDR, args, options)
        assert_close(o, exact.o, rough["o"], o.dtype, "o")
        assert_close(pool[slots.long()], exact.s, rough["s"], pool.dtype, "s")
        others = [0, 2, 3, 5, 6]
        assert torch.equal(pool[others], before[others])
    assert counter.frame_count == 1


def test_a_compiled_step_replays_from_a_cuda_graph():
    compiled, _ = counted(attends)
    cache, args = paged([5, 33], 400), qkv(2, 1)
    for _ in range(3):
        compiled(*args, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compiled(*args, cache)
    for lengths in ([5, 33], [0, 390], [128, 17]):
        cache.lengths.copy_(torch.tensor(lengths))
        for t in args:
            t.normal_()
        before = copy.deepcopy(cache)
        graph.replay()
        check_step(found, *args[1:], cache, before)


def test_inductors_own_cuda_graphs_give_the_eager_answers():
    compiled = torch.compile(attends, fullgraph=True, mode="reduce-overhead")
    cache = paged([5, 33], 400)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        args, before = qkv(2, 1), copy.deepcopy(cache)
        check_step(compiled(*args, cache), *args[1:], cache, before)


@pytest.mark.parametrize(
    "name",
    [
        "attention", "attention out", "attention dense", "attention paged packed",
        "attention partial", "delta", "delta pool packed", "delta each token", "window",
    ],
)  # fmt: skip
def test_opcheck(name):
    overload, flat = overload_of(CALLS[name](5))
    moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in flat]
    torch.library.opcheck(overload, tuple(moved))


def test_kernels_tell_autograd_what_they_wrote():
    cache = paged([5, 33], 100)
    written = [*cache.pages.values(), cache.lengths]
    before = [t._version for t in written]
    overload = ATTENTION.register("decode", cache="paged")
    layouts = (None, None)
    with torch.no_grad():
        overload(*qkv(2, 1), None, *written[:2], cache.block_table, *layouts, cache.lengths)
    assert all(t._version > n for t, n in zip(written, before, strict=True))
