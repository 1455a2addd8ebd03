"""Decode that merges in its own launch on the GPU: captured, on streams at once, repeated."""

import pytest
import torch

import attncc as ac
from tests.gpu.checking import DEVICE, check

pytestmark = pytest.mark.gpu
ATTENTION = ac.ops.attention


def inputs(batch: int, history: int, *, seed: int = 0, tokens: int = 1, dim: int = 128):
    """q, k, v of 32 query heads and 8 key heads."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    shapes = ((batch, tokens, 32, dim), (batch, history, 8, dim), (batch, history, 8, dim))
    return [torch.randn(s, generator=g, device=DEVICE, dtype=torch.bfloat16) for s in shapes]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 5])
def test_splits_are_merged_right_every_time(tokens, dim):
    args = inputs(1, 9000, tokens=tokens, dim=dim)
    first = check(ATTENTION, *args, phase="decode", return_lse=True)
    for _ in range(20):
        again = ATTENTION.decode(*args, backend="triton", return_lse=True)
        assert torch.equal(again.o, first["o"]) and torch.equal(again.lse, first["lse"])


def test_two_streams_at_once_have_counters_of_their_own():
    calls = [inputs(1, 8000 + 64 * i, seed=i) for i in range(2)]
    want = [ATTENTION.decode(*args, backend="triton") for args in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(ATTENTION.decode(*calls[i], backend="triton"))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(o, want[i]) for o in found[i])


def test_captured_graphs_replay_beside_each_other_and_eager_calls():
    args = inputs(2, 6000)
    want = ATTENTION.decode(*args, backend="triton")
    outs = [torch.empty_like(want) for _ in range(3)]
    graphs = []
    for out in outs[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                ATTENTION.decode(*args, backend="triton", out=out)
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        ATTENTION.decode(*args, backend="triton", out=outs[2])
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("page", [0, 16])
def test_lengths_grow_once_a_call_in_the_kernel_that_reads_them(page, monkeypatch):
    """Eager, repeated, prepared and captured steps, which nobody else adds to the lengths of."""
    monkeypatch.setattr("attncc.runtime.api.grow", None)
    sizes = {"B": 3, "Hkv": 8, "D": 128, "E": 128}
    kind = ac.PagedCache if page else ac.DenseCache
    more = {"page": page} if page else {}
    cache = kind.allocate(ATTENTION, sizes=sizes, capacity=9000, device=DEVICE, **more)
    for held in cache.tensors.values():
        held.normal_()
    start = torch.tensor([0, 8000, 130], dtype=torch.int32, device=DEVICE)
    q, k, v = inputs(3, 1)
    k[:] = q[:, :, ::4]  # the new row counts
    out = torch.empty_like(q)

    def step():
        return ATTENTION.decode(q, k, v, cache, out=out, backend="triton")

    cache.lengths.copy_(start)
    want = []
    for n in range(6):  # the third and later ones are repeated from memory
        exact = ATTENTION.reference(q, k, v, cache=cache)
        want.append(step().clone())
        assert (want[-1] - exact).abs().max() < 2e-2
        assert torch.equal(cache.lengths, start + n + 1)
    prepared = ATTENTION.prepare(q, k, v, cache=cache, out=out, backend="triton", phase="decode")
    assert torch.equal(cache.lengths, start + 7)
    cache.lengths.copy_(start)
    prepared()
    assert torch.equal(cache.lengths, start + 1) and torch.equal(out, want[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    for _ in range(2):
        cache.lengths.copy_(start)
        graph.replay()
        assert torch.equal(cache.lengths, start + 3) and torch.equal(out, want[2])
        graph.replay()
        assert torch.equal(cache.lengths, start + 6) and torch.equal(out, want[5])
