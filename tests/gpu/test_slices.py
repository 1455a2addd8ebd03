"""Prompts cut in time, whose state pass runs on a stream of its own: bits, streams, graphs."""

from threading import Thread

import pytest
import torch

import attncc as ac
from attncc.runtime import slices
from attncc.runtime.recording import KEPT
from tests.gpu.checking import DEVICE, unit

pytestmark = pytest.mark.gpu
GDR = ac.ops.gated_delta_rule
TOKENS = 16384 + 100


@pytest.fixture
def cuts(monkeypatch):
    """Numbers of slices of the calls so far."""
    found = []
    run = slices.run

    def noting(call, chosen, count):
        found.append(count)
        run(call, chosen, count)

    monkeypatch.setattr("attncc.runtime.affine.run_slices", noting)
    monkeypatch.setattr("attncc.runtime.affine.fits", lambda *_: False)  # kernels beside each other
    KEPT.choose_again()  # what other tests have recorded is not known here
    return found


def whole(monkeypatch, *args, **options):
    """The call in one piece; nothing of it is remembered."""
    with monkeypatch.context() as patch:
        patch.setattr(slices, "LEAST_TOKENS", 1 << 30)
        return GDR.ordinary("prefill", args, options)


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def drawn(heads=32):
    key_heads = 4 if heads == 32 else 6
    q, k = (unit(1, TOKENS, key_heads, 128, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(1, TOKENS, heads, 128, device=DEVICE, dtype=torch.bfloat16)
    g, beta = torch.rand(2, 1, TOKENS, heads, device=DEVICE)
    return q, k, v, -g, beta


# Triton cuts 17 to 19 heads here: fewer take segments, more fill the device.
@pytest.mark.parametrize(("backend", "heads"), [("gluon", 32), ("triton", 18)])
@pytest.mark.parametrize("fresh", [False, True])
def test_the_bits_of_one_piece(cuts, monkeypatch, backend, heads, fresh):
    args = drawn(heads)
    if not fresh:
        args = (*args, torch.randn(1, heads, 128, 128, device=DEVICE) / 8)
    found = [GDR.prefill(*args, backend=backend) for _ in range(4)]
    assert cuts == [2, 2]  # later calls are the second's recording, run again
    whole_s, whole_o = whole(monkeypatch, *args, backend=backend)
    assert cuts == [2, 2]
    for s, o in found:
        assert torch.equal(s, whole_s) and torch.equal(o, whole_o)


@pytest.mark.parametrize("recorded", [False, True])
def test_on_a_stream_and_in_a_graph_with_other_values(cuts, monkeypatch, recorded):
    args = drawn()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(1 + 2 * recorded):
            GDR.prefill(*args)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        s, o = GDR.prefill(*args)
    assert cuts == [2, 2]
    for old, new in zip(args, drawn(), strict=True):
        old.copy_(new)
    graph.replay()
    got = s.clone(), o.clone()
    assert same(got, whole(monkeypatch, *args))
    assert same(GDR.prefill(*args), got)  # as before the capture
    graph.replay()
    assert same((s, o), got)


def test_a_recording_takes_other_tensors_and_other_values(cuts, monkeypatch):
    args, others = drawn(), drawn()
    for _ in range(2):
        GDR.prefill(*args)
    assert same(GDR.prefill(*others), whole(monkeypatch, *others))
    args[2].mul_(0.5)
    assert same(GDR.prefill(*args), whole(monkeypatch, *args))
    joined = torch.cat(others[:2], -1).split(128, -1)  # one allocation, other strides
    wanted = whole(monkeypatch, *joined, *others[2:])
    assert all(same(GDR.prefill(*joined, *others[2:]), wanted) for _ in range(3))
    assert cuts == [2, 2, 2, 2]


def test_a_prepared_call_is_cut_once(cuts, monkeypatch):
    args, others = drawn(), drawn()
    prepared = GDR.prepare(*args)
    out = torch.empty_like(args[2])
    assert same(prepared(), whole(monkeypatch, *args))
    found = prepared(**dict(zip(("q", "k", "v", "g", "beta"), others, strict=True)), out=out)
    assert found.o is out and same(found, whole(monkeypatch, *others))
    assert cuts == [2]


def test_threads_on_streams_of_their_own(cuts, monkeypatch):
    args = drawn()
    wanted, found = whole(monkeypatch, *args), []
    for _ in range(2):
        GDR.prefill(*args)
    torch.cuda.synchronize()

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            mine = [GDR.prefill(*args) for _ in range(8)]
        stream.synchronize()
        found.append(all(same(r, wanted) for r in mine))

    threads = [Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3 and cuts == [2, 2]


def test_what_a_run_leaves_is_not_taken_while_the_state_pass_still_reads_it(monkeypatch):
    args = drawn()
    wanted = whole(monkeypatch, *args)
    for _ in range(2):
        GDR.prefill(*args)
    for _ in range(5):
        found = GDR.prefill(*args)
        torch.full((1 << 28,), torch.nan, device=DEVICE)  # what the run freed, and more
        assert same(found, wanted)
