"""The first part of a sequence ahead of its segments: right, and the same however it is called."""

from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.runtime import affine, lead
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.recording import KEPT
from tests.gpu.checking import DEVICE, as_dict, eager, offsets, unit
from tests.state_pass_ops import OPS, arguments
from tests.tolerance import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.gluon]
GDR = ac.ops.gated_delta_rule


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")


@pytest.mark.parametrize(("name", "lengths", "segments", "ahead"), [
    ("delta", [1500], 4, 200), ("delta", [0, 700, 64, 1, 400], 3, 300), ("two_rows", [600], 3, 200),
])  # fmt: skip
def test_the_contract_holds(name, lengths, segments, ahead):
    value = 128 if name == "delta" else 64
    args, state = arguments(name, 1, sum(lengths), 2, 128, value, torch.bfloat16, DEVICE)
    q, k, v, g, beta = (x[0] for x in args)
    args = (q, k, v, g / 64, beta)  # states outlive a segment
    state = torch.randn(len(lengths), *state.shape[1:], device=DEVICE)
    named = {"s": state, "cu_seqlens": offsets(lengths)}
    exact, rough = as_dict(OPS[name].reference(*args, **named)), eager(OPS[name], args, named)
    call, _ = bind(OPS[name].declaration, args, named)
    results = {**call.outputs, **call.final_states}
    for tensor in results.values():
        tensor.fill_(torch.nan)
    spec = replace(spec_of(call), dialect=Dialect.GLUON)
    affine.run(call, analyse(call.program), spec, "prefill", segments=segments, ahead=ahead)
    for label, tensor in results.items():
        assert_close(tensor, exact[label], rough[label], tensor.dtype, label)


@pytest.fixture
def ran(monkeypatch):
    """Calls that had a part ahead so far."""
    found, run = [], lead.run

    def noting(device, kernels, launch):
        found.append(kernels)
        run(device, kernels, launch)

    monkeypatch.setattr(affine, "run_lead", noting)
    KEPT.choose_again()
    return found


def drawn(tokens=16384 + 70):
    q, k = (unit(1, tokens, 4, 128, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, tokens, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    g, beta = torch.rand(2, 1, tokens, 8, device=DEVICE)
    return q, k, v, -g / 1024, beta, torch.randn(1, 8, 128, 128, device=DEVICE)


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_repeated_packed_and_prepared_calls_give_the_same_bits(ran):
    args, others = drawn(), drawn()
    wanted, other = (GDR.ordinary("prefill", x, {}) for x in (args, others))
    assert len(ran) == 2
    assert all(same(GDR.prefill(*args), wanted) for _ in range(20))
    prepared = GDR.prepare(*args)
    named = dict(zip(("q", "k", "v", "g", "beta", "s"), others, strict=True))
    assert same(prepared(), wanted) and same(prepared(**named), other)
    cu = offsets([args[0].shape[1]])
    s, o = GDR.prefill(*(x[0] for x in args[:5]), args[5], cu_seqlens=cu)
    assert same((s, o[None]), wanted)


@pytest.mark.parametrize("recorded", [False, True])
def test_in_a_graph_with_other_values(ran, recorded):
    args = drawn()
    for _ in range(1 + 2 * recorded):
        GDR.prefill(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = GDR.prefill(*args)
    for old, new in zip(args, drawn(), strict=True):
        old.copy_(new)
    graph.replay()
    assert ran and same(found, GDR.ordinary("prefill", args, {}))


def test_on_a_stream_whose_memory_is_used_again(ran):
    args, stream = drawn(), torch.cuda.Stream()
    wanted = GDR.ordinary("prefill", args, {})
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(10):
            found = GDR.prefill(*args)
            torch.empty(1 << 26, device=DEVICE).fill_(torch.nan)  # where workspaces have been
    stream.synchronize()
    assert ran and same(found, wanted)
