"""CuTe-DSL prefill on the GPU, against the fp64 interpreter.

The kernels come from a bundle (``python -m tests.cutedsl_bundle``), or are compiled here where the
wheel is installed. Each call is one whose kernel the bundle has.
"""

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_cutedsl import CutePlan
from attncc.dsl.errors import BackendError
from attncc.runtime.bind import bind
from attncc.runtime.compile_cutedsl import cutedsl_problem
from attncc.runtime.key import key_of
from attncc.runtime.sources import call_sources
from attncc.runtime.store import current
from tests.cutedsl_calls import CALLS, LONG, NO_LSE, attention_of, offsets, qkv
from tests.gpu.checking import DEVICE, check

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def kernels_are_there():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")
    if cutedsl_problem() is None:
        return
    op, args, kwargs = NO_LSE("cpu")
    call, _ = bind(op.declaration, args, kwargs)
    [wanted] = call_sources(call, "prefill", "sm_90", dialect=Dialect.CUTEDSL)
    if current().find(key_of(wanted, "sm_90")) is None:
        pytest.skip("neither a bundle of these kernels nor nvidia-cutlass-dsl is here")


def test_the_plan_is_the_one_in_cutedsl():
    op, args, kwargs = NO_LSE(DEVICE)
    call, _ = bind(op.declaration, args, kwargs)
    [found] = call_sources(call, "prefill", dialect=Dialect.CUTEDSL)
    assert analyse(call.program).softmax is not None and isinstance(found.plan, CutePlan)


@pytest.mark.parametrize("name", list(CALLS))
def test_calls(name):
    op, args, kwargs = CALLS[name](DEVICE)
    check(op, *args, **kwargs, backend="cutedsl")


def test_a_bad_sequence_stays_alone():
    op, (q, k, v), kwargs = CALLS["packed without lse"](DEVICE)
    assert op is ac.ops.attention
    good = attention_of(q, k, v, **kwargs)
    for x in (q, k, v):
        x[100:170] = torch.nan
    bad = attention_of(q, k, v, **kwargs)
    assert bad[100:170].isnan().all()
    assert torch.equal(bad[:100], good[:100]) and torch.equal(bad[170:], good[170:])


@pytest.mark.parametrize("name", list(LONG))
def test_repeated_runs_are_bitwise_equal(name):
    op, args, kwargs = LONG[name](DEVICE)
    first = op.prefill(*args, **kwargs, backend="cutedsl")
    for _ in range(20):
        again = op.prefill(*args, **kwargs, backend="cutedsl")
        assert torch.equal(again.o, first.o) and torch.equal(again.lse, first.lse)


def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity():
    q, k, v = qkv(DEVICE, 1, 300, 100, 1, 1, 128, BF16)
    o, lse = attention_of(q, k, v, return_lse=True)
    assert not o[0, :200].any() and torch.isneginf(lse[0, :200]).all()
    assert torch.isfinite(lse[0, 200:]).all()
    o, lse = attention_of(q, k[:, :0], v[:, :0], return_lse=True)
    assert not o.any() and torch.isneginf(lse).all()


def test_huge_negative_scores_have_an_exact_softmax():
    q = torch.full((1, 128, 1, 128), 64.0, device=DEVICE, dtype=BF16)
    k, v = torch.full_like(q, -64.0), torch.ones_like(q)
    o, lse = attention_of(q, k, v, return_lse=True)
    assert (o == 1).all()
    counts = torch.arange(1, 129, device=DEVICE, dtype=torch.float32)
    exact = -524288 / 128**0.5 + counts.log()
    assert torch.allclose(lse.flatten(), exact, rtol=1e-6)


def test_strides_and_expanded_batches():
    _, (q, k, v), _ = NO_LSE(DEVICE)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    check(ac.ops.attention, *turned, backend="cutedsl")
    shared = [x[:1].expand(2, -1, -1, -1) for x in (k, v)]
    check(ac.ops.attention, q, *shared, backend="cutedsl")
    wide = torch.randn(2, 260, 16, 128, device=DEVICE, dtype=BF16)
    check(ac.ops.attention, wide[:, :, :8], wide[:, :, 8:10], wide[:, :, 10:12], backend="cutedsl")


def test_a_captured_graph_replays():
    _, (q, k, v), _ = NO_LSE(DEVICE)
    out = torch.empty_like(q)
    attention_of(q, k, v, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_of(q, k, v, out=out)
    for x in (q, k, v):
        x.normal_()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, attention_of(q, k, v))


def test_a_prepared_call_repeats():
    _, (q, k, v), _ = NO_LSE(DEVICE)
    prepared = ac.ops.attention.prepare(q, k, v, phase="prefill", backend="cutedsl")
    other = [torch.randn_like(x) for x in (q, k, v)]
    again = prepared(**dict(zip("qkv", other, strict=True)))
    assert torch.equal(again, attention_of(*other))


def test_streams_do_not_share_tensor_maps():
    """Programs of two launches at once each write maps of their own."""
    _, args, _ = NO_LSE(DEVICE)
    others = [torch.randn_like(x) for x in args]
    wanted = attention_of(*args), attention_of(*others)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, own in zip(streams, (args, others), strict=True):
            with torch.cuda.stream(stream):
                found.append(attention_of(*own))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, wanted))


def test_packed_offsets_may_be_of_either_width():
    op, args, kwargs = CALLS["packed without lse"](DEVICE)
    wide = op.prefill(*args, **kwargs, backend="cutedsl")
    kwargs["cu_seqlens"] = offsets(DEVICE, [100, 70, 200]).int()
    assert torch.equal(op.prefill(*args, **kwargs, backend="cutedsl"), wide)


def test_a_decode_is_refused_with_the_reason():
    q, k, v = qkv(DEVICE, 2, 1, 300, 2, 4, 128, BF16)
    with pytest.raises(BackendError, match="bound by bandwidth"):
        ac.ops.attention.decode(q, k, v, backend="cutedsl")
