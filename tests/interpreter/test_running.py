"""Element-wise scans over many tokens in generated kernels, on the CPU."""

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.runtime import running
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.eager.run import run as run_eager
from attncc.runtime.sources import call_sources
from tests.runtime.eager_ops import as_kernels
from tests.tolerance import assert_close

HGRN = ac.ops.hgrn


@ac.op(scan="T", out="B T H D")
def gated(
    x=ac.Activation("B T H D"), g=ac.Activation("B T H"), lower=ac.Param("H D"),
    s=ac.State("B H D"),
):  # fmt: skip
    """Gates of heads above a bound of each element; the output is a function of the state."""
    a = lower + (1 - lower) * ac.sigmoid(g)
    s = a * s - (1 - a) * x
    return s, ac.tanh(s) * x


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def check(op: ac.Op, segments: int | None, **args: object) -> None:
    """A call in so many segments, held to the contract."""
    exact = op.reference(**args)._asdict()
    rough, _ = bind(op.declaration, (), args)
    run_eager(rough, as_kernels(analyse(rough.program)))
    call, _ = bind(op.declaration, (), args)
    named = {**call.final_states, **call.outputs}
    for tensor in named.values():
        tensor.fill_(torch.nan)
    assert running.run(call, analyse(call.program), spec_of(call), "prefill", segments)
    held = {**rough.final_states, **rough.outputs}
    for name, tensor in named.items():
        assert_close(tensor, exact[name], held[name], tensor.dtype, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("segments", [None, 3])
def test_whole_sequences_and_segments(segments: int | None, dtype: torch.dtype) -> None:
    x, g = randn(2, 53, 70).to(dtype), -0.3 * randn(2, 53, 70, seed=1).abs()
    check(HGRN, segments, x=x, g=g, s=randn(2, 70))
    check(HGRN, segments, x=x, g=g)


@pytest.mark.parametrize("segments", [None, 2])
def test_heads_parameters_and_functions_of_the_state(segments: int | None) -> None:
    lower = torch.sigmoid(randn(2, 16, seed=2))
    check(gated, segments, x=randn(2, 37, 2, 16), g=randn(2, 37, 2), lower=lower)


@pytest.mark.parametrize("segments", [None, 4])
def test_packed_sequences_keep_an_empty_one_bit_for_bit(segments: int | None) -> None:
    x, g, s = randn(50, 32), -randn(50, 32, seed=1).abs(), randn(3, 32)
    s[1, 0] = -0.0
    cu = torch.tensor([0, 33, 33, 50], dtype=torch.int32)
    check(HGRN, segments, x=x, g=g, s=s, cu_seqlens=cu)
    call, _ = bind(HGRN.declaration, (), {"x": x, "g": g, "s": s, "cu_seqlens": cu})
    running.run(call, analyse(call.program), spec_of(call), "prefill", segments)
    assert torch.equal(call.final_states["s"][1].view(torch.int32), s[1].view(torch.int32))


def test_a_gate_that_forgets_and_one_that_grows_past_fp32() -> None:
    g = torch.full((1, 80, 32), 3.0)
    g[:, 40] = -torch.inf
    x = randn(1, 80, 32)
    x[:, :40] = 0
    x[:, 41:] = 0
    g[:, 60:] = -3.0
    check(HGRN, 5, x=x, g=g)


def test_segments_in_the_slots_of_a_pool() -> None:
    x, g, start = randn(2, 40, 16), -randn(2, 40, 16, seed=1).abs(), randn(2, 16)
    pool, slots = torch.full((4, 16), 7.5), torch.tensor([3, 1], dtype=torch.int32)
    pool[slots.long()] = start
    s, o = HGRN.reference(x=x, g=g, s=start)
    call, _ = bind(HGRN.declaration, (), {"x": x, "g": g, "s": ac.StatePool(pool, slots)})
    assert running.run(call, analyse(call.program), spec_of(call), "prefill", 2)
    assert (call.outputs["o"] - o).abs().max() < 1e-5
    assert (pool[slots.long()] - s).abs().max() < 1e-5 and bool((pool[[0, 2]] == 7.5).all())


def kinds(phase: str, **args: object) -> set[str]:
    """Kernels of a call of the element-wise recurrence."""
    return {s.plan.phase for s in call_sources(bind(HGRN.declaration, (), args)[0], phase)}


def test_prompts_run_and_steps_do_not() -> None:
    x, g = randn(1, 20, 16), -randn(1, 20, 16).abs()
    whole = {"running", "running_summary", "running_local"}
    assert kinds("prefill", x=x, g=g) == whole
    packed = {"x": x[0], "g": g[0], "cu_seqlens": torch.tensor([0, 20])}
    assert kinds("prefill", **packed) == whole and kinds("decode", x=x, g=g) == {"step"}
    few = {"x": x[:, :4], "g": g[:, :4]}
    assert kinds("prefill", **few) == {"step"}
    call, _ = bind(HGRN.declaration, (), few)
    assert not running.run(call, analyse(call.program), spec_of(call), "prefill")


def test_calls_take_it_by_themselves() -> None:
    x, g, s = randn(1, 40, 32), -randn(1, 40, 32, seed=1).abs(), randn(1, 32)
    last, o = HGRN(x=x, g=g, s=s, backend="triton")
    exact_s, exact_o = HGRN.reference(x=x, g=g, s=s)
    assert (last - exact_s).abs().max() < 1e-5 and (o - exact_o).abs().max() < 1e-5
