"""Windows, element-wise states and several states on the GPU, against the fp64 interpreter."""

import pytest
import torch

import attncc as ac
from tests.gpu.checking import DEVICE, check, offsets
from tests.runtime import state_ops as ops

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FP32 = ("g", "beta")  # gates may stay fp32


def moved(args, held, dtype):
    """The arguments on the GPU: tokens and parameters in a dtype, states in fp32."""
    return {n: x.to(DEVICE, x.dtype if n in held or n in FP32 else dtype) for n, x in args.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ops.NAMES)
def test_dense(name, dtype):
    op, args, held, _ = ops.cases(2, 70)[name]
    check(op, **moved(args, held, dtype), sizes=ops.SIZES.get(name, {}))


@pytest.mark.parametrize("name", ops.NAMES)
def test_packed_with_empty_sequences(name):
    op, args, held, model = ops.cases(1, 90)[name]
    args = moved(args, held, torch.bfloat16)
    states = {n: ops.cases(5, 1)[name][1][n].to(DEVICE) for n in held}
    tokens = {n: x[0] for n, x in args.items() if n not in held and n not in model}
    params = {n: args[n] for n in model}
    cu = offsets([0, 2, 0, 64, 24])
    found = check(op, **tokens, **params, **states, cu_seqlens=cu, sizes=ops.SIZES.get(name, {}))
    for n, x in states.items():
        assert torch.equal(found[n][[0, 2]], x[[0, 2]])


def convolution(batch, tokens, channels, width, dtype, *, bias=True):
    """Random arguments of a short convolution."""
    x = torch.randn(batch, tokens, channels, device=DEVICE, dtype=dtype)
    w = torch.randn(channels, width, device=DEVICE, dtype=dtype)
    return {"x": x, "w": w, "bias": w[:, 0].contiguous()} if bias else {"x": x, "w": w}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize(("tokens", "channels"), [(1, 64), (5, 96), (16, 128), (1000, 2048)])
def test_a_convolution_of_any_width(tokens, channels, width, dtype):
    args = convolution(2, tokens, channels, width, dtype)
    win = torch.randn(2, channels, width - 1, device=DEVICE, dtype=dtype)
    check(ops.short_convolution, **args, win=win)
    del args["bias"]
    check(ops.short_convolution, **args, sizes={"W": width})


@pytest.mark.parametrize("tokens", [1, 2, 3, 100])
def test_a_window_may_be_updated_in_place(tokens):
    args = convolution(64, tokens, 512, 4, torch.bfloat16)
    win = torch.randn(64, 512, 3, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(5):  # a race would show as another value now and then
        want = ops.short_convolution(**args, win=win, backend="triton")
        same = win.clone()
        pool = ac.StatePool(same, torch.arange(64, device=DEVICE, dtype=torch.int32))
        o = ops.short_convolution(**args, win=pool, backend="triton")
        assert torch.equal(same, want.win) and torch.equal(o, want.o)


def test_pieces_of_a_convolution_equal_the_whole():
    args = convolution(1, 300, 256, 4, torch.float32)
    win, whole = ops.short_convolution(**args, backend="triton")
    kept, outs = None, []
    for cut in (slice(0, 2), slice(2, 3), slice(3, 260), slice(260, 300)):
        part = {**args, "x": args["x"][:, cut]}
        kept, o = ops.short_convolution(**part, win=kept, backend="triton")
        outs.append(o)
    assert torch.equal(torch.cat(outs, 1), whole) and torch.equal(kept, win)


@pytest.mark.timing
def test_a_convolution_keeps_most_of_the_bandwidth():
    args = convolution(8, 4096, 4096, 4, torch.bfloat16)
    out = {"o": torch.empty_like(args["x"]), "win": torch.empty(8, 4096, 3, device=DEVICE)}

    def best(work):
        times = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    def work():
        ops.short_convolution(**args, out=out, backend="triton")

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()  # the kernel's own time: the host's is another test's subject
    with torch.cuda.graph(graph):
        work()
    copied = best(lambda: out["o"].copy_(args["x"]))
    taken = best(graph.replay)
    assert taken < 2 * copied, f"{taken:.3f} ms against a copy of {copied:.3f} ms"
