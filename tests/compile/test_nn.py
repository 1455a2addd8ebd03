"""What a complete layer's decode step launches, compiled for GPUs that need not be there."""

import pytest

import attncc as ac
from attncc.runtime.backends import sources
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("size", "states"), [(64, 8), (128, 2), (128, 8)])
def test_a_step_with_norms_and_gates(size: int, states: int, capability: int) -> None:
    target, op = f"sm_{capability}", ac.ops.gated_delta_net
    found = sources(
        op.declaration, sizes={"K": size, "V": size, "G": 2, "B": states, "Hk": 4}, target=target,
        phase="decode",
    )  # fmt: skip
    apart = size == 128 and states == 8  # whole states of 64 KB leave no room for other programs
    assert [s.plan.phase for s in found] == ["step", "pointwise"][: 1 + apart]
    for source in found:
        kernel = compile_source(source, load(source).function, capability)
        own = resources(kernel, target)
        assert own.spill_store_bytes == own.stack_bytes == 0
        assert not apart or own.registers * 32 * own.num_warps <= 65536 / 4


@pytest.mark.parametrize("capability", [90, 100])
def test_a_step_of_many_sequences_leaves_room_for_other_programs(capability: int) -> None:
    target, op = f"sm_{capability}", ac.ops.raw_gated_delta_rule
    (source,) = sources(
        op.declaration, sizes={"K": 128, "V": 128, "G": 2}, target=target, phase="decode"
    )
    kernel = compile_source(source, load(source).function, capability)
    found = resources(kernel, target)
    assert found.spill_store_bytes == found.stack_bytes == 0
    assert found.registers * 32 * found.num_warps <= 65536 / 4
