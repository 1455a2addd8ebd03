"""Scans in chunks that leave their read-outs to a kernel of rows, on the CPU."""

from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.runtime import affine, pointwise
from attncc.runtime.backends import run_kernels, spec_of
from attncc.runtime.bind import bind
from attncc.runtime.eager.run import run as run_eager
from attncc.runtime.sources import call_sources
from tests.codegen import gluon_machine
from tests.interpreter.test_gluon_affine import flat
from tests.interpreter.test_states import check
from tests.rows_apart_ops import arguments, normed_rule, several_reads
from tests.runtime.eager_ops import as_kernels
from tests.tolerance import assert_close

BF16 = torch.bfloat16
CU = torch.tensor([0, 20, 20, 53], dtype=torch.int32)


def phases(op: ac.Op, *, phase: str = "prefill", **args: object) -> list[str]:
    """What the kernels of a call do, in launch order."""
    call, _ = bind(op.declaration, (), args)
    return [s.plan.phase for s in call_sources(call, phase)]


def packed(args: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: x if n in ("w", "s") else x[0] for n, x in args.items()}


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_norm_behind_a_read_out(dtype: torch.dtype) -> None:
    args = arguments(2, 21, 1, 2, 16, 24, dtype)
    assert phases(normed_rule, **args)[:3] == ["prepare", "mix", "state"]
    assert "pointwise" in phases(normed_rule, **args)
    check(normed_rule, **args)


def test_packed_sequences_with_an_empty_one() -> None:
    args = packed(arguments(1, 53, 1, 2, 16, 16, BF16))
    args["s"] = torch.randn(3, 2, 16, 16, generator=torch.Generator().manual_seed(1))
    assert phases(normed_rule, **args, cu_seqlens=CU)[-1] == "pointwise"
    check(normed_rule, **args, cu_seqlens=CU)


def test_several_read_outs_beside_an_output_that_chunks_hold() -> None:
    args = {n: arguments(1, 19, 2, 1, 16, 16, BF16)[n] for n in ("q", "k", "v", "w", "s")}
    args["p"] = args["q"].flip(1)
    found = phases(several_reads, **args)
    assert found[:2] == ["mix", "state"] and found[-1] == "pointwise"
    check(several_reads, **args, scale=0.7)


def test_two_calls_through_the_state_equal_one() -> None:
    args = arguments(1, 75, 1, 1, 16, 16, torch.float32)
    cut = {n: x for n, x in args.items() if n not in ("w", "s")}

    def part(low: int, high: int, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = {n: x[:, low:high] for n, x in cut.items()}
        return normed_rule(**own, w=args["w"], s=s, backend="triton")

    s, o = normed_rule(**args, backend="triton")
    first, start = part(0, 41, args["s"])[::-1]
    last, final = part(41, 75, start)[::-1]
    assert (torch.cat([first, last], 1) - o).abs().max() < 2e-5 * o.abs().max()
    assert (final - s).abs().max() < 2e-5 * s.abs().max()


def test_decode_keeps_all_of_it_in_one_kernel() -> None:
    args = arguments(2, 1, 1, 2, 16, 16, BF16)
    assert set(phases(normed_rule, phase="decode", **args)) == {"step"}


def test_slots_of_a_pool_and_a_prepared_call() -> None:
    args = arguments(2, 20, 1, 1, 16, 16, BF16)
    start = args.pop("s")
    pool = torch.full((4, *start.shape[1:]), 7.5)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    pool[slots.long()] = start
    s, o = normed_rule(**args, s=start, backend="triton")
    prepared = normed_rule.prepare(**args, s=ac.StatePool(pool, slots), backend="triton")
    pool[slots.long()] = start
    assert torch.equal(prepared(), o) and torch.equal(pool[slots.long()], s)
    assert bool((pool[[0, 2]] == 7.5).all())


def in_gluon(op: ac.Op, monkeypatch: pytest.MonkeyPatch, **args) -> list:
    """A call whose Gluon kernels run on a machine that plays the warps; plans in launch order."""
    launch, launch_rows, seen = affine.launch, pointwise.launch, []

    def played(kernel, programs, values):
        seen.append(kernel.plan)
        if kernel.plan.dialect is Dialect.GLUON:
            text, entry = kernel.source.text, kernel.source.entry
            gluon_machine.run(text, entry, programs, flat(kernel.plan, values), 0)
        else:
            launch(kernel, programs, values)

    def rows(call, kernel):
        seen.append(kernel.plan)
        launch_rows(call, kernel)

    monkeypatch.setattr(affine, "launch", played)
    monkeypatch.setattr(pointwise, "launch", rows)
    exact = op.reference(**args)._asdict()
    rough, _ = bind(op.declaration, (), args)
    run_eager(rough, as_kernels(analyse(rough.program)), round_operands=True)
    call, _ = bind(op.declaration, (), args)
    spec = replace(spec_of(call), dialect=Dialect.GLUON, target="sm_90")
    run_kernels(call, analyse(call.program), spec, "prefill")
    held = {**rough.outputs, **rough.final_states}
    for name, tensor in {**call.outputs, **call.final_states}.items():
        assert_close(tensor, exact[name], held[name], tensor.dtype, f"{op.declaration.name}.{name}")
    return seen


def test_a_state_pass_that_leaves_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(1, 70, 1, 1, 64, 64, BF16)
    seen = in_gluon(normed_rule, monkeypatch, **args)
    [state] = [p for p in seen if isinstance(p, WarpStatePlan)]
    assert state.tensor("readout0").dtype == "fp32"


def test_norms_ahead_and_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(1, 40, 1, 1, 64, 64, BF16)
    args |= {"a": args.pop("g"), "b": args.pop("beta"), "a_log": torch.zeros(1)}
    seen = in_gluon(ac.ops.gated_delta_net, monkeypatch, **args, dt_bias=torch.zeros(1))
    assert [p.phase for p in seen] == ["pointwise", "systems", "state", "pointwise"]


def test_norms_of_several_rows_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    args = packed(arguments(1, 53, 1, 1, 64, 64, BF16))
    args = {n: x for n, x in args.items() if n not in ("z", "w", "s")}
    args |= {n: torch.cat([args[n], args[n].flip(0)]) for n in ("k", "v", "beta")}
    op = ac.ops.gated_delta_product
    seen = in_gluon(op, monkeypatch, **args, l2norm=True, cu_seqlens=CU)
    assert [p.phase for p in seen] == ["pointwise", "chunks", "systems", "state"]
