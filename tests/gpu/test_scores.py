"""The breadth of scores on the GPU: generated kernels against the fp64 interpreter."""

import pytest
import torch

import attncc as ac
from tests import score_ops as ops
from tests.gpu.checking import DEVICE, check, offsets

pytestmark = pytest.mark.gpu


def given(name, batch, tokens, history, dtype=torch.bfloat16):
    """Arguments of a case on the device."""
    return ops.arguments(name, batch, tokens, history, dtype, DEVICE)


@pytest.mark.parametrize("name", list(ops.CASES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_prefill(name, dtype):
    for tokens, history in ((200, 200), (65, 700), (4, 2)):
        check(ops.CASES[name][0], **given(name, 2, tokens, history, dtype))


@pytest.mark.parametrize("name", list(ops.CASES))
def test_decode_over_split_histories(name):
    for tokens in (1, 3):
        check(ops.CASES[name][0], phase="decode", **given(name, 2, tokens, 3000))


@pytest.mark.parametrize("name", ["shared_prefix", "relative", "documents", "forgetting"])
def test_the_lse(name):
    check(ops.CASES[name][0], return_lse=True, **given(name, 2, 130, 300))


@pytest.mark.parametrize(
    "name", ["documents", "forgetting", "differential", "rectified", "dilated"]
)
def test_packed_sequences(name):
    lengths = [0, 300, 1, 64, 0, 135]
    args = {
        n: x[0] if isinstance(x, torch.Tensor) and n != "lam" else x
        for n, x in given(name, 1, 500, 500).items()
    }
    check(ops.CASES[name][0], cu_seqlens=offsets(lengths), **args)


@pytest.mark.parametrize("lengths", [[1024, 1024, 1024], [1, 700, 64, 1300, 7], [2072]])
def test_documents_of_any_length_skip_blocks_soundly(lengths):
    total = sum(lengths)
    args = given("documents", 2, total, total)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    args["document"] = torch.stack([ids, ids.flip(0)]).to(DEVICE).contiguous()
    check(ops.documents, **args)
    args["document"] = torch.randint(0, 3, (2, total), device=DEVICE, dtype=torch.int32)
    check(ops.documents, **args)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("lengths", [[1024, 1024, 1024], [1, 700, 64, 1300, 7], [2072], [9000]])
def test_steps_in_documents_of_any_length_scan_soundly(lengths, tokens):
    total = sum(lengths)
    args = given("documents", 2, tokens, total)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    args["document"] = torch.stack([ids, ids.flip(0)]).to(DEVICE).contiguous()
    check(ops.documents, phase="decode", **args)
    args["document"] = torch.randint(0, 3, (2, total), device=DEVICE, dtype=torch.int32)
    check(ops.documents, phase="decode", **args)


@pytest.mark.timing
def test_documents_cost_what_they_show():
    def milliseconds(length):
        size, heads = 8192, 32
        q, k, v = (
            torch.randn(2, size, n, 128, device=DEVICE, dtype=torch.bfloat16) for n in (heads, 8, 8)
        )
        ids = (torch.arange(size, device=DEVICE) // length).int().expand(2, size).contiguous()
        run = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(3):
            ops.documents(q, k, v, ids, backend="triton")
        run[0].record()
        for _ in range(10):
            ops.documents(q, k, v, ids, backend="triton")
        run[1].record()
        torch.cuda.synchronize()
        return run[0].elapsed_time(run[1]) / 10

    assert milliseconds(1024) < milliseconds(8192) / 3


def test_documents_through_a_cache_captured_in_a_graph():
    args = given("documents", 2, 100, 600)
    args["document"] = (torch.arange(600, device=DEVICE) // 128).int().expand(2, 600).contiguous()
    held = {n: args[n].clone() for n in ("k", "v", "document")}
    cache = ac.DenseCache(held, torch.tensor([0, 0], device=DEVICE).int())
    new = given("documents", 2, 100, 100) | {"q": args["q"]}
    new["document"] = torch.ones(2, 100, device=DEVICE, dtype=torch.int32)
    out = torch.empty_like(args["q"])

    def step():
        ops.documents(**new, cache=cache, out=out, backend="triton")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([3, 500], [0, 200], [499, 130]):
        cache.lengths.copy_(torch.tensor(lengths))
        exact = ops.documents.reference(**new, cache=cache)
        graph.replay()
        assert (out.double() - exact).abs().max() < 2e-2


def test_partials_of_two_halves_merge_to_the_whole():
    args = given("relative", 2, 5, 900)
    part = ops.relative(**args, backend="triton", return_partial=True)
    exact = ops.relative.reference(**args, return_lse=True)
    done = part.with_sink(args["sink"].expand(2, 5, 4))
    assert (done.o - exact.o).abs().max() < 1e-2 and (done.lse - exact.lse).abs().max() < 1e-3


def test_the_same_call_gives_the_same_bits():
    for name in ("differential", "documents", "forgetting"):
        args = given(name, 2, 300, 700)
        op = ops.CASES[name][0]
        first = op(**args, backend="triton")
        assert all(torch.equal(first, op(**args, backend="triton")) for _ in range(3))
