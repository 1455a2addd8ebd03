"""Prompts cut in time, whose state pass runs on a stream of its own: bits, streams, graphs."""

import pytest
import torch

import attncc as ac
from attncc.runtime import slices
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
    return found


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
    for _ in range(3):  # a repeated call too
        s, o = GDR.prefill(*args, backend=backend)
    assert cuts == [2, 2, 2]
    monkeypatch.setattr(slices, "LEAST_TOKENS", 1 << 30)
    whole_s, whole_o = GDR.prefill(*args, backend=backend)
    assert cuts == [2, 2, 2]
    assert torch.equal(s, whole_s) and torch.equal(o, whole_o)


def test_on_a_stream_and_in_a_graph_with_other_values(cuts, monkeypatch):
    args = drawn()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
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
    monkeypatch.setattr(slices, "LEAST_TOKENS", 1 << 30)
    whole = GDR.prefill(*args)
    assert all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))
