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
