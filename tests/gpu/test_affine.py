"""Generated scan kernels on the GPU, against the fp64 interpreter."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attncc as ac
from tests.gpu.checking import DEVICE, check, eager, offsets, on_cpu, unit
from tests.one_key import answer, weak_gate
from tests.tolerance import assert_close, max_error

pytestmark = pytest.mark.gpu
GDR = ac.ops.gated_delta_rule
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PROPERTY = settings(
    max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
LENGTHS = st.sampled_from([0, 1, 2, 33, 63, 64, 65, 128, 200, 500])


@ac.op(scan="T", out="B T H V")
def two_rows(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B (T N) H K"),
    v=ac.Activation("B (T N) H V"),
    g=ac.Activation("B T H", default=0),
    beta=ac.Activation("B (T N) H", default=1),
    s=ac.State("B H K V"),
):
    s = ac.exp(g) * s
    for kj, vj, bj in ac.unroll("N", k, v, beta):
        s = s + kj * (bj * (vj - ac.dot(s, kj, "K")))
    return s, ac.dot(s, q, "K") * ac.rsqrt("K")


@ac.op(scan="T", out="B T H V")
def read_first(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    g=ac.Activation("B T H"),
    beta=ac.Activation("B T H"),
    s=ac.State("B H K V"),
):
    e = beta * (v - ac.dot(s, k, "K"))
    s = ac.exp(g) * s + k * e
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def kimi_delta(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    g=ac.Activation("B T H K"),
    beta=ac.Activation("B T H"),
    s=ac.State("B H K V"),
):
    s = ac.exp(g) * s
    s = s + k * (beta * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def gated_linear(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    g=ac.Activation("B T H K"),
    s=ac.State("B H K V"),
):
    s = ac.exp(g) * s + k * v
    return s, ac.dot(s, q, "K")


@ac.op(scan="T", out="B T H V")
def squashed(
    q=ac.Activation("B T H K"),
    k=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"),
    s=ac.State("B H K V"),
):
    s = ac.tanh(s + k * v)
    return s, ac.dot(s, q, "K")


def delta(batch, tokens, heads, group, k_dim, v_dim, dtype, rows=1):
    """Random arguments of a gated delta rule (``rows`` updates a token)."""
    wide = heads * group
    return (
        unit(batch, tokens, heads, k_dim, dtype=dtype),
        unit(batch, tokens * rows, heads, k_dim, dtype=dtype),
        torch.randn(batch, tokens * rows, wide, v_dim, device=DEVICE, dtype=dtype),
        torch.nn.functional.logsigmoid(torch.randn(batch, tokens, wide, device=DEVICE) + 2),
        torch.rand(batch, tokens * rows, wide, device=DEVICE),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
@PROPERTY
def test_prefill_of_any_length_with_or_without_a_state(dtype, data):
    tokens, batch = data.draw(LENGTHS), data.draw(st.sampled_from([1, 3]))
    args = delta(batch, tokens, 2, 2, 128, 128, dtype)
    state = None
    if data.draw(st.booleans()):
        state = torch.randn(batch, 4, 128, 128, device=DEVICE)
    check(GDR, *args, s=state)


DIMS = [(16, 16), (64, 64), (96, 80), (128, 64), (64, 128), (256, 256)]


@pytest.mark.parametrize(("k_dim", "v_dim"), DIMS)
def test_head_dims(k_dim, v_dim):
    check(GDR, *delta(1, 200, 2, 1, k_dim, v_dim, torch.bfloat16))


@pytest.mark.parametrize("group", [1, 4, 6, 7])
def test_value_heads_share_keys(group):
    check(GDR, *delta(2, 100, 2, group, 64, 64, torch.bfloat16))


def test_without_a_gate_and_without_beta():
    q, k, v, _, beta = delta(1, 200, 2, 2, 64, 64, torch.bfloat16)
    check(GDR, q, k, v, beta=beta)
    check(GDR, q, k, v)


@given(st.lists(LENGTHS, min_size=1, max_size=6))
@PROPERTY
def test_packed_sequences_keep_empty_states_bit_for_bit(lengths):
    args = [x[0] for x in delta(1, sum(lengths), 2, 2, 128, 128, torch.bfloat16)]
    state = torch.randn(len(lengths), 4, 128, 128, device=DEVICE)
    result = check(GDR, *args, s=state, cu_seqlens=offsets(lengths))
    for b, n in enumerate(lengths):
        if n == 0:
            assert torch.equal(result["s"][b], state[b])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_decode_steps(dtype, tokens, stored):
    state = torch.randn(5, 8, 128, 128, device=DEVICE).to(stored)
    check(GDR, *delta(5, tokens, 4, 2, 128, 128, dtype), s=state, phase="decode")


@pytest.mark.parametrize("op", [two_rows, read_first])
@pytest.mark.parametrize("tokens", [1, 33, 200])
def test_other_tables_run_through_the_same_kernels(op, tokens):
    rows = 2 if op is two_rows else 1
    check(op, *delta(2, tokens, 3, 1, 64, 64, torch.bfloat16, rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [kimi_delta, gated_linear])
@pytest.mark.parametrize("tokens", [33, 200, 2200])
def test_decays_per_key(op, dtype, tokens):
    q, k, v, _, beta = delta(1, tokens, 2, 1, 128, 64, dtype)
    g = torch.nn.functional.logsigmoid(torch.randn(1, tokens, 2, 128, device=DEVICE) + 3)
    g[:, 20:22] = -torch.inf
    args = (q, k, v, g, beta) if op is kimi_delta else (q, k, v, g)
    check(op, *args, s=torch.randn(1, 2, 128, 64, device=DEVICE))


def test_a_body_that_is_not_affine_runs_step_by_step():
    q, k, v, _, _ = delta(2, 70, 3, 1, 64, 64, torch.float32)
    check(squashed, q, k, v)


def test_pieces_equal_the_whole():
    args = delta(1, 300, 2, 2, 128, 128, torch.float32)
    state, whole = GDR(*args, backend="triton")
    carried, outs = None, []
    for cut in (slice(0, 100), slice(100, 101), slice(101, 260), slice(260, 300)):
        carried, o = GDR(*(x[:, cut] for x in args), s=carried, backend="triton")
        outs.append(o)
    assert (torch.cat(outs, 1) - whole).abs().max() < 2e-5 * whole.abs().max()
    assert (carried - state).abs().max() < 2e-5 * state.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences_of_few_heads_are_cut_into_segments(dtype):
    args = delta(1, 2500, 2, 2, 128, 128, dtype)
    check(GDR, *args, s=torch.randn(1, 4, 128, 128, device=DEVICE))
    packed = [x[0] for x in args]
    state = torch.randn(3, 4, 128, 128, device=DEVICE)
    result = check(GDR, *packed, s=state, cu_seqlens=offsets([0, 2400, 100]))
    assert torch.equal(result["s"][0], state[0])


def test_a_gate_of_minus_infinity_forgets_everything():
    q, k, v, g, beta = delta(1, 130, 1, 1, 128, 128, torch.bfloat16)
    g[:, 70] = -torch.inf
    result = check(GDR, q, k, v, g, beta)
    assert all(t.isfinite().all() for t in result.values())
    g[:, -1] = -torch.inf
    state, _ = GDR(q, k, v, g, beta, backend="triton")
    exact = beta[:, -1, :, None, None] * k[:, -1, :, :, None].double() * v[:, -1, :, None].double()
    assert (state - exact).abs().max() < 2e-2


def test_strong_decay_stays_finite():
    q, k, v, _, beta = delta(1, 64, 1, 1, 128, 128, torch.bfloat16)
    check(GDR, q, k, v, torch.full((1, 64, 1), -27.6, device=DEVICE), beta)


def test_one_key_repeated_returns_the_latest_value():
    k = unit(1, 1, 1, 128, dtype=torch.float32).expand(1, 256, 1, 128).contiguous()
    v = torch.randn(1, 256, 1, 128, device=DEVICE)
    state, o = GDR(k, k, v, backend="triton")
    assert (o * 128**0.5 - v).abs().max() < 1e-4
    assert (state[0, 0] - k[0, -1, 0][:, None] * v[0, -1, 0]).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_key_for_16384_tokens_under_a_weak_gate(dtype):  # a14
    args = weak_gate(16384, dtype, device=DEVICE)
    found, rough, exact = GDR(*args), eager(GDR, on_cpu(args), {}), answer(args)
    for name, got, want in zip(("s", "o"), found, exact, strict=True):
        got, near = (x[0, 0] if name == "s" else x[0, :, 0] for x in (got.cpu(), rough[name]))
        if dtype == torch.float32:
            assert max_error(got, want) < 1e-4 * (1 if name == "s" else 128**-0.5)
        else:
            assert_close(got, want, near, got.dtype, name)


def test_beta_of_two_flips_and_is_not_clamped():
    k = torch.zeros(1, 65, 1, 64, device=DEVICE)
    k[..., 3] = 1
    state = torch.ones(1, 1, 64, 64, device=DEVICE)
    beta = torch.full((1, 65, 1), 2.0, device=DEVICE)
    final, o = GDR(k, k, torch.zeros_like(k), beta=beta, s=state, backend="triton")
    sign = torch.tensor([(-1.0) ** (t + 1) for t in range(65)], device=DEVICE)
    assert torch.allclose(o[0, :, 0, 0] * 8, sign, atol=1e-5)
    assert torch.equal(final[0, 0, 0], state[0, 0, 0]) and (final[0, 0, 3] + 1).abs().max() < 1e-5


def test_the_same_call_gives_the_same_bits():
    args = delta(2, 300, 2, 2, 128, 128, torch.bfloat16)
    first = GDR(*args, backend="triton")
    for _ in range(3):
        again = GDR(*args, backend="triton")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_captured_prefill_replays_with_other_cuts():
    args = [x[0] for x in delta(1, 300, 2, 2, 128, 128, torch.bfloat16)]
    cu = offsets([100, 200])
    out = {"o": torch.empty_like(args[2]), "s": torch.empty(2, 4, 128, 128, device=DEVICE)}

    def step():
        GDR(*args, cu_seqlens=cu, out=out, backend="triton")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([100, 200], [0, 300], [299, 1]):
        cu.copy_(offsets(lengths))
        graph.replay()
        exact = GDR.reference(*args, cu_seqlens=cu)
        assert (out["o"].double() - exact.o).abs().max() < 2e-2 * exact.o.abs().max() + 1e-3
        assert (out["s"].double() - exact.s).abs().max() < 2e-2 * exact.s.abs().max()
