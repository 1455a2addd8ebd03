"""Scans whose read-outs go to a kernel of rows, and element-wise scans over many tokens."""

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.runtime import running
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.sources import call_sources
from tests.gpu.checking import DEVICE, as_dict, check, eager, offsets
from tests.rows_apart_ops import arguments, normed_rule, several_reads
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def drawn(*sizes):
    return {n: x.to(DEVICE) for n, x in arguments(*sizes, BF16).items()}


@pytest.mark.parametrize("backend", ["triton", pytest.param("gluon", marks=pytest.mark.gluon)])
def test_a_norm_behind_a_read_out(backend):
    args = drawn(2, 150, 1, 2, 64, 64)
    call, _ = bind(normed_rule.declaration, (), args)
    assert [s.plan.phase for s in call_sources(call, "prefill")][-1] == "pointwise"
    check(normed_rule, **args, backend=backend)


@pytest.mark.gluon
def test_packed_sequences_of_the_default_dialect():
    args = drawn(1, 270, 1, 2, 128, 128)
    own = {n: x if n == "w" else x[0] for n, x in args.items() if n != "s"}
    own["s"] = torch.randn(4, 2, 128, 128, device=DEVICE)
    check(normed_rule, **own, cu_seqlens=offsets([0, 130, 70, 70]), backend="auto")


def test_several_read_outs():
    args = {n: x for n, x in drawn(1, 100, 2, 1, 64, 64).items() if n in ("q", "k", "v", "w", "s")}
    check(several_reads, **args, p=args["q"].flip(1).contiguous())


def test_a_prepared_call_and_its_graph():
    args = drawn(1, 100, 1, 2, 64, 64)
    s, o = normed_rule(**args)
    out = {"s": torch.empty_like(s), "o": torch.empty_like(o)}
    prepared = normed_rule.prepare(**args, out=out)
    prepared()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared()
    for x in out.values():
        x.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out["o"], o) and torch.equal(out["s"], s)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("columns", [64, 100])
def test_element_wise_scans(segments, columns):
    x, g = (torch.randn(2, 300, columns, device=DEVICE) for _ in range(2))
    args = {"x": x.to(BF16), "g": torch.nn.functional.logsigmoid(g)}
    args["s"] = torch.randn(2, columns, device=DEVICE)
    exact, rough = as_dict(ac.ops.hgrn.reference(**args)), eager(ac.ops.hgrn, (), args)
    call, _ = bind(ac.ops.hgrn.declaration, (), args)
    named = {**call.final_states, **call.outputs}
    for tensor in named.values():
        tensor.fill_(torch.nan)
    assert running.run(call, analyse(call.program), spec_of(call), "prefill", segments)
    for name, tensor in named.items():
        assert_close(tensor, exact[name], rough[name], tensor.dtype, name)


def test_element_wise_scans_of_packed_sequences_in_a_pool():
    x, g = (torch.randn(300, 64, device=DEVICE) for _ in range(2))
    args = {"x": x, "g": -0.3 * g.abs(), "cu_seqlens": offsets([0, 170, 130])}
    start = torch.randn(3, 64, device=DEVICE)
    pool, slots = torch.full((5, 64), 7.5, device=DEVICE), torch.tensor([4, 0, 2], device=DEVICE)
    pool[slots] = start
    exact_s, exact_o = ac.ops.hgrn.reference(**args, s=start)
    rough = eager(ac.ops.hgrn, (), {**args, "s": start})
    o = ac.ops.hgrn(**args, s=ac.StatePool(pool, slots.int()), backend="triton")
    assert_close(o, exact_o, rough["o"], o.dtype, "o")
    assert_close(pool[slots], exact_s, rough["s"], torch.float32, "s")
    assert torch.equal(pool[4], start[0]) and bool((pool[[1, 3]] == 7.5).all())
