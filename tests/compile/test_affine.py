"""The scan family compiled for GPUs that need not be there: resources and instructions."""

import re
from dataclasses import replace
from typing import Any

import pytest
import triton

from attncc.codegen.affine_memory import Shape, loads_of, state_bytes, system_bytes
from attncc.codegen.emit.scan_sources import sources_of, split_sources
from attncc.codegen.forms import AffineForm
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import KernelPlan, Spec
from attncc.codegen.plan_affine import ChunkedPlans, StatePlan, SystemPlan, plan_chunked
from attncc.codegen.plan_scan import StepPlan, plan_step
from attncc.codegen.target import SHARED, shared_limit
from attncc.dsl.ir import Program
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from attncc.runtime.inspect import Resources, resources
from attncc.runtime.kernels import compile_source, load

PROGRAM = gated_delta_rule.trace()


def spec(dtype: str, size: int = 128, capability: int = 90) -> Spec:
    names = dict.fromkeys("qkvo", dtype) | {"g": "fp32", "beta": "fp32", "s": "fp32"}
    return Spec(
        dtypes=tuple(names.items()),
        static=(("G", 2), ("K", size), ("V", size)),
        packed=True,
        aligned=frozenset([*names, "s_initial", "s_final"]) - {"g", "beta"},
        given_states=frozenset({"s"}),
        target=f"sm_{capability}",
    )


def bound(plan: KernelPlan, program: Program, form: AffineForm, given: Spec) -> int:
    """The shared memory that a plan allows for, in bytes."""
    if isinstance(plan, StatePlan):
        key, value = plan.tile
        shape = Shape((key.axis, key.block), (value.axis, value.block), plan.storage)
        return state_bytes(loads_of(program, form, given, shape), shape, plan.num_stages)
    if isinstance(plan, SystemPlan):
        return system_bytes(form, plan.tile[0].block, plan.storage)
    return shared_limit(given.target)


def assert_bounded(
    kernel: Any, plan: KernelPlan, program: Program, form: AffineForm, given: Spec
) -> None:
    """A kernel for sm_90 takes what its plan allows for, and that is there."""
    taken, most = kernel.metadata.shared, bound(plan, program, form, given)
    assert taken <= most <= SHARED["sm_90"], plan.phase


def compiled(dtype: str, capability: int, size: int = 128) -> dict[str, Resources]:
    """What each kernel of a kind needs; a kernel that is only a trap is an error of its own."""
    form = analyse(PROGRAM).affine
    assert form is not None
    given = spec(dtype, size, capability)
    chunked, step = plan_chunked(PROGRAM, form, given), plan_step(PROGRAM, given)
    assert isinstance(chunked, ChunkedPlans)
    assert isinstance(step, StepPlan)
    found = {}
    parts = split_sources(chunked)[len(sources_of(chunked)) - 1 :]
    for source in [*sources_of(chunked), *parts, *sources_of(step)]:
        kernel = compile_source(source, load(source).function, capability)
        assert "trap;" not in kernel.asm["ptx"], source.plan.phase
        if capability == 90:
            assert_bounded(kernel, source.plan, PROGRAM, form, given)
        found[source.plan.phase] = resources(kernel, f"sm_{capability}")
    return found


def test_hopper_runs_bf16_on_wgmma_without_spills_in_the_loops() -> None:
    found = compiled("bf16", 90)
    assert {k: r.tensor_core for k, r in found.items()} == {
        "chunks": None, "prepare": "mma", "mix": "mma", "state": "wgmma", "summary": "wgmma",
        "start": "wgmma", "local": "wgmma", "step": None,
    }  # fmt: skip
    spills = {k: r.spill_store_bytes for k, r in found.items() if k != "prepare"}
    assert spills.pop("start") <= 4  # A in parts takes the registers of eight warps
    assert not any(spills.values()), spills
    assert found["start"].shared_bytes > 2 * 128 * 128 * 4  # two segments' A are on their way
    assert found["step"].registers <= 96
    # One warp solves four blocks at once; what does not fit is spilled (264 and 152 bytes).
    most = 288 if triton.__version__.startswith("3.6.") else 192
    assert found["prepare"].spill_store_bytes <= most
    assert found["state"].shared_bytes <= 227 * 1024


def test_blackwell_runs_bf16_on_tcgen05() -> None:
    found = compiled("bf16", 100)
    assert found["prepare"].tensor_core == "mma"
    assert found["state"].tensor_core == "tcgen05"
    assert found["step"].spill_store_bytes == 0


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("size", [128, 256])
def test_fp32_operands_compile_to_more_than_a_trap(size: int, capability: int) -> None:
    found = compiled("fp32", capability, size)
    assert found["state"].tensor_core is not None


@pytest.mark.parametrize(("systems", "columns"), [(2048, 32), (4096, 64)])
def test_many_states_are_stepped_in_wider_tiles_without_spills(systems: int, columns: int) -> None:
    plan = plan_step(PROGRAM, replace(spec("bf16"), buckets=(("systems", systems),)))
    assert isinstance(plan, StepPlan)
    assert (plan.axis("V").block, plan.num_warps) == (columns, 4)
    (source,) = sources_of(plan)
    found = resources(compile_source(source, load(source).function, 90), "sm_90")
    assert found.spill_store_bytes == 0 and found.registers <= 2 * columns + 16


@pytest.mark.parametrize(("systems", "barriers"), [(32, 14), (1024, 5)])
def test_one_token_is_asked_for_before_any_of_it_is_waited_for(systems: int, barriers: int) -> None:
    """A thread's own loads are assembly that says nothing of memory: they stay where they are."""
    states = frozenset({"s_initial", "s_final"})
    given = replace(spec("bf16"), packed=False, chained=True, dense=states)
    plan = plan_step(PROGRAM, replace(given, buckets=(("systems", systems), ("tokens", 1))))
    assert isinstance(plan, StepPlan) and plan.chosen != "rule"
    assert (plan.own_loads, plan.joint) == (systems > 32, systems > 32)
    (source,) = sources_of(plan)
    kernel = compile_source(source, load(source).function, 90)
    ptx = kernel.asm["ptx"]
    loads = [m.start() for m in re.finditer(r"ld\.global", ptx)]
    assert ptx.index("griddepcontrol.wait") < loads[0] and loads[-1] < ptx.index("bar.sync")
    found = resources(kernel, "sm_90")
    assert found.spill_store_bytes == 0 and found.registers <= (72 if systems == 32 else 128)
    assert len(re.findall(r"bar\.sync", ptx)) <= barriers
