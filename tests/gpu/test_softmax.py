"""Generated softmax kernels on the GPU, against the fp64 interpreter."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attncc as ac
from tests.gpu.checking import DEVICE, check, offsets

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PROPERTY = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
LENGTHS = st.sampled_from([0, 1, 2, 33, 63, 64, 65, 127, 200, 500])


@ac.op(out="B T (Hkv G) E")
def windowed(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    width=ac.param(integer=True),
):
    seen = ac.causal & (ac.index("T") - ac.index("S") < width)
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=seen), v, "S")


@ac.op(out="B T (Hkv G) E")
def capped(q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"), v=ac.Cache("B S Hkv E")):
    score = 30 * ac.tanh(ac.dot(q, k, "D") * ac.rsqrt("D") / 30)
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


@ac.op(out="B T (Hkv G) E")
def alibi(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    slope=ac.Param("(Hkv G)"),
):
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + slope * (ac.index("S") - ac.index("T"))
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


def qkv(batch, tokens, history, heads, group, dim, dtype, value_dim=None):
    """Random operands."""
    q = torch.randn(batch, tokens, heads * group, dim, device=DEVICE, dtype=dtype)
    k = torch.randn(batch, history, heads, dim, device=DEVICE, dtype=dtype)
    v = torch.randn(batch, history, heads, value_dim or dim, device=DEVICE, dtype=dtype)
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
@PROPERTY
def test_prefill_of_any_lengths(dtype, data):
    tokens, past = data.draw(LENGTHS), data.draw(LENGTHS)
    batch = data.draw(st.sampled_from([1, 3]))
    check(ac.ops.attention, *qkv(batch, tokens, tokens + past, 2, 4, 128, dtype), return_lse=True)


@pytest.mark.parametrize("group", [1, 4, 6, 7])
@pytest.mark.parametrize("tokens", [1, 100])
def test_group_sizes(group, tokens):
    check(ac.ops.attention, *qkv(2, tokens, 300, 2, group, 64, torch.bfloat16), return_lse=True)


@pytest.mark.parametrize("dim", [16, 32, 80, 96, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_dims(dim, dtype):
    check(ac.ops.attention, *qkv(1, 130, 130, 2, 2, dim, dtype))
    check(ac.ops.attention, *qkv(2, 1, 300, 2, 2, dim, dtype), phase="decode")


def test_values_of_another_width():
    check(ac.ops.attention, *qkv(1, 130, 150, 2, 2, 192, torch.bfloat16, value_dim=128))


@pytest.mark.parametrize("op", [windowed, capped, alibi])
@pytest.mark.parametrize("tokens", [1, 257])
def test_score_and_mask_expressions(op, tokens):
    args = qkv(2, tokens, 400, 2, 4, 128, torch.bfloat16)
    extra = {"width": 70} if op is windowed else {}
    if op is alibi:
        extra = {"slope": 2.0 ** -torch.arange(1, 9, device=DEVICE)}
    check(op, *args, **extra)


@given(st.lists(LENGTHS, min_size=1, max_size=6))
@PROPERTY
def test_packed_sequences_with_empty_ones(lengths):
    total = sum(lengths)
    q, k, v = (x[0] for x in qkv(1, total, total, 2, 4, 128, torch.bfloat16))
    check(ac.ops.attention, q, k, v, cu_seqlens=offsets(lengths), return_lse=True)


def test_packed_sequences_of_head_dim_256():  # a5
    q, k, v = (x[0] for x in qkv(1, 1500, 1500, 1, 2, 256, torch.bfloat16))
    lengths = [100, 156, 0, 256, 988, 0]
    check(ac.ops.attention, q, k, v, cu_seqlens=offsets(lengths), return_lse=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "history"), [(1, 5000), (3, 1000), (40, 70)])
def test_decode_over_split_histories(dtype, batch, history):
    args = qkv(batch, 1, history, 2, 4, 128, dtype)
    check(ac.ops.attention, *args, phase="decode", return_lse=True)


def test_decode_through_a_cache_equals_one_pass():
    q, k, v = qkv(3, 40, 40, 2, 4, 128, torch.bfloat16)
    whole = ac.ops.attention(q, k, v, backend="triton").float()
    cache = ac.DenseCache.allocate(
        ac.ops.attention, sizes={"B": 3, "Hkv": 2, "D": 128, "E": 128}, capacity=64, device=DEVICE
    )
    for t in cache.tensors.values():
        t.fill_(torch.nan)  # what is not appended must not be read
    outs = []
    for cut in (slice(0, 33), slice(33, 36), slice(36, 37), slice(37, 40)):
        new = (x[:, cut] for x in (q, k, v))
        outs.append(ac.ops.attention.decode(*new, cache, backend="triton"))
    assert cache.lengths.tolist() == [40] * 3
    assert torch.equal(cache.tensors["k"][:, :40], k)
    assert (torch.cat(outs, 1).float() - whole).abs().max() < 2e-2


def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity():
    q, k, v = qkv(1, 4, 2, 1, 1, 128, torch.bfloat16)
    o, lse = ac.ops.attention(q, k, v, return_lse=True, backend="triton")
    assert not o[0, :2].any() and torch.isneginf(lse[0, :2]).all()
    o, lse = ac.ops.attention(q, k[:, :0], v[:, :0], return_lse=True, backend="triton")
    assert not o.any() and torch.isneginf(lse).all()


def test_huge_negative_scores_have_an_exact_softmax():
    q = torch.full((1, 1, 1, 128), 64.0, device=DEVICE, dtype=torch.bfloat16)
    k = torch.full((1, 2, 1, 128), -64.0, device=DEVICE, dtype=torch.bfloat16)
    v = torch.ones_like(k)
    o, lse = ac.ops.attention(q, k, v, return_lse=True, backend="triton")
    assert (o == 1).all()
    exact = torch.tensor(-524288 / 128**0.5 + 0.6931472, device=DEVICE)
    assert torch.allclose(lse, exact, rtol=1e-6)


@pytest.mark.parametrize("layout", ["BHSD", "interleaved"])
def test_strided_operands_equal_contiguous_copies(layout):
    if layout == "BHSD":
        args = qkv(2, 65, 130, 2, 4, 128, torch.bfloat16)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in args)
    else:
        kv = torch.randn(2, 130, 2, 2, 128, device=DEVICE, dtype=torch.bfloat16)
        k, v = kv[:, :, 0], kv[:, :, 1]
        q = torch.randn(2, 65, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    strided = ac.ops.attention(q, k, v, backend="triton")
    dense = ac.ops.attention(q.contiguous(), k.contiguous(), v.contiguous(), backend="triton")
    assert torch.equal(strided, dense)


def test_offsets_past_two_to_the_31():
    history = 2**31 // (8 * 128) + 1000  # the last keys lie beyond 2**31 elements
    k = torch.zeros(1, history, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    v = torch.zeros_like(k)
    q = torch.ones(1, 1, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k[:, -1], v[:, -1] = 40.0, 1.0
    o = ac.ops.attention.decode(q, k, v, backend="triton")
    assert (o == 1).all()


def test_the_same_call_gives_the_same_bits():
    args = qkv(2, 300, 700, 2, 4, 128, torch.bfloat16)
    first = ac.ops.attention(*args, backend="triton")
    assert all(torch.equal(first, ac.ops.attention(*args, backend="triton")) for _ in range(3))


def test_a_captured_decode_replays_with_other_lengths():
    q, k, v = qkv(2, 1, 1, 2, 4, 128, torch.bfloat16)
    cache = ac.DenseCache.allocate(
        ac.ops.attention, sizes={"B": 2, "Hkv": 2, "D": 128, "E": 128}, capacity=600, device=DEVICE
    )
    for t in cache.tensors.values():
        t.normal_()
    out = torch.empty_like(q)

    def step():
        ac.ops.attention.decode(q, k, v, cache, out=out, backend="triton")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([3, 500], [0, 64], [599, 1]):
        cache.lengths.copy_(torch.tensor(lengths))
        exact = ac.ops.attention.reference(q, k, v, cache=cache)
        graph.replay()
        assert cache.lengths.tolist() == [n + 1 for n in lengths]
        assert (out.double() - exact).abs().max() < 2e-2
