"""Complete layers on the GPU: kernels only, against the same weights in fp64."""

import itertools

import pytest
import torch

import attncc as ac
from tests.gpu.checking import DEVICE, check, offsets
from tests.nn.plain import SELECTED, Shape, double, gradients, module, whole
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
LARGE = Shape(width=512, heads=2, group=4, dim=128)
KINDS = ("attention", "delta")


def hidden(*shape, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(0)
    return torch.randn(*shape, LARGE.width, generator=g).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def _no_grad(request):
    with torch.set_grad_enabled("gradients" in request.node.name):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_of_600_and_decode(kind, page, dtype):
    layer = module(kind, LARGE, dtype, DEVICE, backend="triton")
    x = hidden(2, 640, dtype=dtype)
    exact, rough = whole(kind, layer, x, LARGE)
    assert_close(layer(x), exact, rough, dtype, "whole")
    kept = layer.allocate(2, 640, page=page)
    outs = [layer(x[:, :600], kept=kept), layer.decode(x[:, 600:604], kept)]
    outs += [layer.decode(x[:, i : i + 1], kept) for i in range(604, 640)]
    assert_close(torch.cat(outs, 1), exact, rough, dtype, "in steps")


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind):
    layer = module(kind, LARGE, torch.bfloat16, DEVICE, backend="triton")
    x = hidden(3, 300)
    exact, rough = whole(kind, layer, x, LARGE)
    owner = ac.nn.LayerOwner(layer, slots=3, pages=90, page=16)
    handles = [owner.add() for _ in range(3)]
    start = (0, 0, 0)
    for counts in ((170, 0, 33), (1, 257, 20)):
        cu = offsets(counts)
        spans = [slice(s, s + n) for s, n in zip(start, counts, strict=True)]
        with owner.append(handles, counts) as kept:
            y = layer(torch.cat([x[i, s] for i, s in enumerate(spans)]), kept=kept, cu_seqlens=cu)
        want, near = (torch.cat([t[i, s] for i, s in enumerate(spans)]) for t in (exact, rough))
        assert_close(y, want, near, torch.bfloat16)
        start = tuple(s + n for s, n in zip(start, counts, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_goes_on_with_other_sequences(kind):
    layer = module(kind, LARGE, torch.bfloat16, DEVICE, backend="triton")
    x = hidden(4, 80)
    exact, rough = whole(kind, layer, x, LARGE)
    owner = ac.nn.LayerOwner(layer, slots=6, pages=64, page=16)
    batch = owner.batch(3, 128)
    handles = [owner.add() for _ in range(4)]
    with owner.append(handles, 64) as kept:
        layer(x[:, :64], kept=kept)
    spare = [owner.fork(h) for h in handles[:2]]  # what the warm-up may spoil
    now = torch.zeros(3, 1, LARGE.width, dtype=torch.bfloat16, device=DEVICE)
    batch.set([spare[0], None, spare[1]])
    for _ in range(3):
        with batch.append(1) as kept:
            layer.decode(now, kept)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with batch.append(1) as kept, torch.cuda.graph(graph):
        y = layer.decode(now, kept)
    for h in spare:
        owner.release(h)
    for rows in ([handles[0], handles[1], None], [handles[3], None, handles[2]]):
        batch.set(rows)
        for i in range(64, 70):
            for row, h in enumerate(rows):
                if h is not None:
                    now[row, 0] = x[handles.index(h), i]
            with batch.append(1):
                graph.replay()
            for row, h in enumerate(rows):
                if h is not None:
                    of = handles.index(h)
                    assert_close(y[row, 0], exact[of, i], rough[of, i], torch.bfloat16)


def test_sparse_latent_attention():
    layer = module("sparse", LARGE, torch.bfloat16, DEVICE)
    x = hidden(6, SELECTED)
    exact, rough = whole("sparse", layer, x, LARGE)
    kept = layer.allocate(6, 64, page=16)
    y = torch.cat([layer(x[:, :4], kept=kept), layer.decode(x[:, 4:], kept)], 1)
    assert_close(y, exact, rough, torch.bfloat16)
    long = hidden(2, 200)
    kept = layer.allocate(2, 256)
    y = torch.cat([layer(long[:, :190], kept=kept), layer.decode(long[:, 190:], kept)], 1)
    whole_call = layer(long)
    near = (y - whole_call).abs().amax(-1) <= 0.05 * whole_call.abs().max()
    assert float(near.float().mean()) > 0.97, "selections differ in few rows, if any"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_come_from_the_torch_lowering(kind):
    s = Shape(64, 2, 2, 16)
    layer = module(kind, s, torch.float32, DEVICE)
    x = torch.randn(1, 20, 64, device=DEVICE, requires_grad=True)
    weights = dict(layer.named_parameters())
    found = torch.autograd.grad(layer(x).square().sum(), (x, *weights.values()))
    exact = gradients(kind, double(weights), x.double(), s)
    rough = gradients(kind, weights, x, s)
    for name, got, want, near in zip(("x", *weights), found, exact, rough, strict=True):
        assert_close(got, want, near, torch.float32, name)


# --- ops without a carry


def rows(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(2, 300, 8, 128), (1, 1, 3, 96), (3, 7, 1, 5120), (64, 1, 32, 64)]
)
def test_norms_gates_and_activations(shape, dtype):
    x, z, w = rows(*shape, dtype=dtype), rows(*shape, dtype=dtype), rows(shape[-1], dtype=dtype)
    check(ac.ops.gated_rms_norm, x, z, w)
    check(ac.ops.gated_rms_norm, x, z, gate_first=True)
    check(ac.ops.rms_norm, x, w)
    check(ac.ops.layer_norm, x, w, w)
    check(ac.ops.l2_norm, x)
    check(ac.ops.silu, x)


@pytest.mark.parametrize("op", [ac.ops.rope, ac.ops.rope_interleaved])
def test_rotations_of_views(op):
    both = rows(2, 70, 6, 192)
    at = torch.randint(4000, (2, 70), device=DEVICE, dtype=torch.int32)
    angle = torch.arange(4096, device=DEVICE)[:, None] * torch.rand(32, device=DEVICE)
    check(op, both[..., 128:], at, angle.cos(), angle.sin(), sizes={"R": 2})


def test_more_rows_than_one_grid_axis_of_blocks():
    check(ac.ops.l2_norm, rows(3, 70000, 8, 16))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_with_norms_and_gates(tokens):
    B, H, G, K, V = 5, 4, 2, 128, 128
    a = {n: rows(B, tokens, H * G) for n in "ab"}
    q, k = rows(B, tokens, H, K), rows(B, tokens, H, K)
    v, z = rows(B, tokens, H * G, V), rows(B, tokens, H * G, V)
    model = {"a_log": rows(H * G, dtype=torch.float32), "dt_bias": rows(H * G, dtype=torch.float32)}
    s = rows(B, H * G, K, V, dtype=torch.float32)
    check(ac.ops.gated_delta_net, q, k, v, **a, z=z, **model, w=rows(V), s=s, phase="decode")
    check(ac.ops.raw_gated_delta_rule, q, k, v, **a, **model, s=s, phase="decode")


@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [[1000], [0, 5, 700, 0, 2], [1] * 40])
def test_packed_short_convolutions(width, lengths):
    cu, total = offsets(lengths), sum(lengths)
    x, w = rows(total, 640), rows(640, width)
    win = rows(len(lengths), width - 1, 640)
    check(ac.ops.short_conv, x, w, win=win, silu=True, cu_seqlens=cu)
    check(ac.ops.short_conv, x, w, w[:, 0].contiguous(), cu_seqlens=cu, sizes={"W": width})


def test_windows_of_drafts():
    x, w = rows(3, 8, 512), rows(512, 4)
    windows = ac.ConvWindow.allocate(
        ac.ops.short_conv, sizes={"W": 4, "D": 512}, slots=16, device=DEVICE
    )
    handles = [windows.add() for _ in range(3)]
    call = {"silu": True, "backend": "triton"}
    ac.ops.short_conv(x[:, :4], w, **call, **windows.view(handles))
    ac.ops.short_conv.decode(x[:, 4:7], w, **call, **windows.speculate(handles, 3))
    windows.accept(handles, [3, 1, 0])
    after = [7, 5, 4]
    now = torch.stack([x[i, n] for i, n in enumerate(after)])[:, None]
    o = ac.ops.short_conv.decode(now, w, **call, **windows.view(handles))
    exact = ac.ops.short_conv.reference(x, w, silu=True).o
    rough = ac.ops.short_conv(x, w, silu=True, backend="torch").o
    for i, n in enumerate(after):
        assert_close(o[i, 0], exact[i, n], rough[i, n], torch.bfloat16)


def test_every_window_of_pieces_equals_the_whole():
    x, w = rows(2, 200, 256, dtype=torch.float32), rows(256, 4, dtype=torch.float32)
    win, o = ac.ops.short_conv(x, w, silu=True, backend="triton")
    kept, parts = None, []
    for a, b in itertools.pairwise([0, 1, 2, 9, 9, 130, 200]):
        kept, part = ac.ops.short_conv(x[:, a:b], w, silu=True, win=kept, backend="triton")
        parts.append(part)
    assert torch.equal(torch.cat(parts, 1), o) and torch.equal(kept, win)
