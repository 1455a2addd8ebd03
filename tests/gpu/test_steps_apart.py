"""Steps of one token in parts of their states, and rows written out by pairs, on the GPU."""

import pytest
import torch

import attncc as ac
from attncc.codegen import steps_apart
from attncc.runtime.bind import bind
from attncc.runtime.sources import call_sources
from tests.gpu.checking import DEVICE, check
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    monkeypatch.setattr(steps_apart, "SYSTEMS", 1)


def randn(seed, *shape, dtype=BF16):
    rng = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=rng, device=DEVICE).to(dtype)


def rows(op, **args):
    """Whether a kernel of rows follows."""
    call, _ = bind(op.declaration, (), args)
    return "pointwise" in [s.plan.phase for s in call_sources(call, "decode")]


def oja(B=3, H=2):
    q, k, v = (torch.nn.functional.normalize(randn(i, B, 1, H, 128), dim=-1) for i in range(3))
    g = -randn(3, B, 1, H, 128, dtype=torch.float32).abs()
    beta = randn(4, B, 1, H, dtype=torch.float32).sigmoid()
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta,
            "s": randn(5, B, H, 128, 128, dtype=torch.float32)}  # fmt: skip


def test_an_axis_that_only_the_output_sums_over():
    args = oja()
    assert rows(ac.ops.gated_oja, **args)
    rough_s, rough_o = check(ac.ops.gated_oja, **args, phase="decode").values()
    exact_s, exact_o = ac.ops.gated_oja.reference(**args)
    pool = torch.full((4, *args["s"].shape[1:]), 7.5, device=DEVICE)
    slots = torch.tensor([3, 0, 2], device=DEVICE, dtype=torch.int32)
    pool[slots.long()] = args.pop("s")
    o = ac.ops.gated_oja.decode(**args, s=ac.StatePool(pool, slots), backend="triton")
    assert_close(o, exact_o, rough_o, o.dtype, "o")
    assert_close(pool[slots.long()], exact_s, rough_s, torch.float32, "s")
    assert bool((pool[1] == 7.5).all())


def test_a_norm_over_the_columns_in_a_captured_call():
    head = (3, 1, 2)
    args = {n: randn(i, *head, 128) for i, n in enumerate("qkvz")}
    args |= {n: randn(i + 4, *head) for i, n in enumerate("ab")}
    args |= {n: randn(i + 6, 2, dtype=torch.float32) for i, n in enumerate(("a_log", "dt_bias"))}
    args |= {"w": randn(8, 128), "s": randn(9, 3, 2, 128, 128, dtype=torch.float32)}
    assert rows(ac.ops.gated_delta_net, **args)
    want = check(ac.ops.gated_delta_net, **args, phase="decode")
    out = {n: torch.full_like(x, torch.nan) for n, x in want.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ac.ops.gated_delta_net.decode(**args, out=out, backend="triton")
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out[n], want[n]) for n in want)


@pytest.mark.parametrize("op", [ac.ops.rope, ac.ops.rope_interleaved])
def test_rotations_of_whole_heads(op):
    angle = torch.arange(64, device=DEVICE)[:, None] * torch.rand(64, device=DEVICE)
    at = torch.arange(37, device=DEVICE, dtype=torch.int32)[None].expand(2, 37).contiguous()
    x = randn(1, 2, 37, 3, 128)
    check(op, x=x, position=at, cos=angle.cos(), sin=angle.sin(), sizes={"R": 2})


def test_a_prompt_of_two_passes_is_merged_by_many_rows():
    q, pk, pv = randn(1, 2, 70, 4, 64), randn(2, 40, 2, 64), randn(3, 40, 2, 64)
    k, v = randn(4, 2, 70, 2, 64), randn(5, 2, 70, 2, 64)
    call, _ = bind(ac.ops.cascade.declaration, (q, pk, pv, k, v), {})
    assert "merge_2" in [s.plan.phase for s in call_sources(call, "prefill")]
    check(ac.ops.cascade, q, pk, pv, k, v)
