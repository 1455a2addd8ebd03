"""A state pass beside the kernel that it waits for: the bits of one behind the other, always."""

from threading import Thread

import pytest
import torch

import attncc as ac
from attncc.codegen.plan_gluon_together import FLAGS
from attncc.runtime import affine, together
from attncc.runtime.recording import KEPT
from tests.gpu.checking import DEVICE, offsets, unit

pytestmark = [pytest.mark.gpu, pytest.mark.gluon]
GDR = ac.ops.gated_delta_rule


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")


@pytest.fixture
def ran(monkeypatch):
    """Calls that have run this way so far."""
    found = []
    run = together.run

    def noting(call, chosen):
        found.append(call)
        run(call, chosen)

    monkeypatch.setattr(affine, "run_together", noting)
    KEPT.choose_again()
    return found


def drawn(tokens, heads=16, wide=32, batch=1):
    q, k = (unit(batch, tokens, heads, 128, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(batch, tokens, wide, 128, device=DEVICE, dtype=torch.bfloat16)
    g, beta = torch.rand(2, batch, tokens, wide, device=DEVICE)
    return q, k, v, -g, beta


def behind(monkeypatch, *args, **options):
    """The call with one kernel behind the other, in one piece; nothing of it is remembered."""
    with monkeypatch.context() as patch:
        patch.setattr(affine, "fits", lambda *_: False)
        patch.setattr(affine, "slices_of", lambda *_: 1)
        return GDR.ordinary("prefill", args, options)


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("tokens", "heads", "wide", "batch"), [
    (4096, 16, 32, 1), (8191, 16, 32, 1), (5003, 9, 18, 2), (16384 + 7, 17, 17, 1),
])  # fmt: skip
@pytest.mark.parametrize("fresh", [False, True])
def test_the_bits_of_one_behind_the_other(ran, monkeypatch, tokens, heads, wide, batch, fresh):
    args = drawn(tokens, heads, wide, batch)
    if not fresh:
        args = (*args, torch.randn(batch, wide, 128, 128, device=DEVICE) / 8)
    found = [GDR.prefill(*args) for _ in range(4)]
    assert len(ran) == 2  # later calls are the second's recording
    wanted = behind(monkeypatch, *args)
    assert all(same(r, wanted) for r in found)


def test_packed_sequences(ran, monkeypatch):
    args = [x[0] for x in drawn(8000, 4, 8)]
    cu = offsets([4001, 0, 3999])
    found = [GDR.prefill(*args, cu_seqlens=cu) for _ in range(3)]
    wanted = behind(monkeypatch, *args, cu_seqlens=cu)
    assert ran and all(same(r, wanted) for r in found)


def test_what_is_left_over_in_memory_is_nobodys_result(ran, monkeypatch):
    args = drawn(4160)
    wanted, make = behind(monkeypatch, *args), affine.workspace

    def poisoned(size, dtype, device):
        return make(size, dtype, device).fill_(torch.nan if dtype.is_floating_point else 1)

    monkeypatch.setattr(affine, "workspace", poisoned)
    assert all(same(GDR.ordinary("prefill", args, {}), wanted) for _ in range(100))
    assert len(ran) == 100


def test_callers_on_streams_of_their_own(ran, monkeypatch):
    calls = [drawn(4096 + 64 * i) for i in range(3)]
    wanted, found = [behind(monkeypatch, *args) for args in calls], []

    def work(args, right):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            mine = [GDR.prefill(*args) for _ in range(24)]
        stream.synchronize()
        found.append(all(same(r, right) for r in mine))

    threads = [Thread(target=work, args=pair) for pair in zip(calls, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ran and found == [True] * 3


@pytest.mark.parametrize("recorded", [False, True])
def test_in_a_graph_one_comes_behind_the_other(ran, monkeypatch, recorded):
    args = drawn(4608)
    for _ in range(1 + 2 * recorded):
        GDR.prefill(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        s, o = GDR.prefill(*args)
    for old, new in zip(args, drawn(4608), strict=True):
        old.copy_(new)
    graph.replay()
    assert same((s, o), behind(monkeypatch, *args)) and same(GDR.prefill(*args), (s, o))


def test_a_prepared_call(ran, monkeypatch):
    args, others = drawn(4608), drawn(4608)
    prepared = GDR.prepare(*args)
    assert same(prepared(), behind(monkeypatch, *args))
    named = dict(zip(("q", "k", "v", "g", "beta"), others, strict=True))
    assert same(prepared(**named), behind(monkeypatch, *others)) and len(ran) == 1


def test_a_state_of_16_bits_has_one_behind_the_other(ran, monkeypatch):
    args = (*drawn(4096), torch.randn(1, 32, 128, 128, device=DEVICE).bfloat16())
    found = [GDR.prefill(*args) for _ in range(3)]
    assert not ran and all(same(r, behind(monkeypatch, *args)) for r in found)


def test_what_waits_says_so(ran):
    GDR.prefill(*drawn(4096))
    [call] = ran
    kinds = [k for k in affine._FOUND.values() if isinstance(k, affine.Chunked)]
    plans = [k.plans.state for k in kinds if any(a.name == FLAGS for a in k.plans.state.args)]
    assert call.sizes["T"] == 4096 and plans and all(p.awaited for p in plans)
