"""Steps of one token in parts of their states, with a kernel of rows behind them, on the CPU."""

import pytest
import torch

import attncc as ac
from attncc.codegen import steps_apart
from attncc.codegen.passes.split_sums import cuttable
from attncc.runtime.bind import bind
from attncc.runtime.sources import call_sources
from tests.interpreter.test_states import check

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of the tests count as many and large."""
    monkeypatch.setattr(steps_apart, "SYSTEMS", 1)
    monkeypatch.setattr(steps_apart, "LARGE", 128)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def apart(op: ac.Op, **args: object) -> bool:
    """Whether a step's kernels are those of the parts and of the rows."""
    call, _ = bind(op.declaration, (), args)
    return "pointwise" in [s.plan.phase for s in call_sources(call, "decode")]


def oja(dtype: torch.dtype, K: int = 16, V: int = 32) -> dict[str, torch.Tensor]:
    q, k = (randn(i, 2, 1, 2, K, dtype=dtype) for i in (1, 2))
    v = torch.nn.functional.normalize(randn(3, 2, 1, 4, V), dim=-1).to(dtype)
    gates = {"g": -randn(4, 2, 1, 4, V).abs(), "beta": randn(5, 2, 1, 4).sigmoid()}
    return {"q": q, "k": k, "v": v, **gates, "s": randn(6, 2, 4, K, V)}


def net(K: int = 16, V: int = 32) -> dict[str, torch.Tensor]:
    head = (2, 1, 2)
    made = {n: randn(i, *head, K, dtype=BF16) for i, n in enumerate("qk")}
    made |= {n: randn(i + 5, *head, V, dtype=BF16) for i, n in enumerate("vz")}
    made |= {n: randn(i + 9, *head) for i, n in enumerate("ab")}
    made |= {"a_log": randn(11, 2), "dt_bias": randn(12, 2), "w": randn(13, V)}
    return {**made, "s": randn(14, 2, 2, K, V)}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_an_axis_that_only_the_output_sums_over(dtype: torch.dtype) -> None:
    args = oja(dtype)
    assert apart(ac.ops.gated_oja, **args)
    check(ac.ops.gated_oja, **args)
    check(ac.ops.gated_oja, **{**args, "s": args["s"].to(BF16)}, scale=0.5)


def test_a_norm_over_the_columns() -> None:
    args = net()
    assert apart(ac.ops.gated_delta_net, **args)
    check(ac.ops.gated_delta_net, **args)


def test_states_of_a_pool() -> None:
    args = oja(torch.float32)
    pool = randn(7, 5, 4, 16, 32)
    slots = torch.tensor([3, -1], dtype=torch.int32)
    before, given = pool.clone(), dict(args, s=ac.StatePool(pool, slots))
    o = ac.ops.gated_oja.decode(**given, backend="triton")
    plain = {**args, "s": torch.stack([before[3], torch.zeros_like(before[0])])}
    want = ac.ops.gated_oja.reference(**plain)
    assert (o - want.o).abs().max() < 1e-5 and (pool[3] - want.s[0]).abs().max() < 1e-5
    assert torch.equal(pool[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


def test_what_needs_whole_states_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    normed = oja(torch.float32)
    assert not apart(ac.ops.gated_oja, **normed, l2norm=True)  # a norm of q along K
    check(ac.ops.gated_oja, **normed, l2norm=True)
    monkeypatch.setattr(steps_apart, "SYSTEMS", 64)
    few = oja(torch.float32, K=8)
    assert not apart(ac.ops.gated_oja, **few)
    call, _ = bind(ac.ops.gated_oja.declaration, (), few)
    assert cuttable(call.program) == ("K",)
