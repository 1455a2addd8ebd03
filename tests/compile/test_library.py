"""The library's recurrences compiled for GPUs that need not be there: tensor cores and spills."""

import pytest

import attncc as ac
from attncc.runtime.backends import sources
from attncc.runtime.inspect import Resources, resources
from attncc.runtime.kernels import compile_source, load

WIDE = {"K": 128, "V": 128}
CASES = {
    "kda": (ac.ops.kda, {"G": 1}),
    "gla": (ac.ops.gla, {}),
    "delta_rule": (ac.ops.delta_rule, {}),
    "gdp of 2": (ac.ops.gated_delta_product, {"Gq": 1, "Gv": 1, "N": 2}),
    "gdp of 3": (ac.ops.gated_delta_product, {"Gq": 1, "Gv": 1, "N": 3}),
}
SPILLED = {"prepare": 320, "mix": 160}
"""Most bytes that a kernel which solves or weighs whole chunks may spill; others none."""


def compiled(name: str, target: str) -> dict[str, Resources]:
    """What each kernel of a prefill and of a decode step needs."""
    op, sizes = CASES[name]
    found = {}
    for phase in ("prefill", "decode"):
        usual = {"target": target, "phase": phase, "sizes": {**WIDE, **sizes}}
        for source in sources(op.declaration, **usual, backend="triton"):
            kernel = compile_source(source, load(source).function, int(target[3:]))
            assert "trap;" not in kernel.asm["ptx"], source.plan.phase
            found[source.plan.phase] = resources(kernel, target)
    return found


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("name", CASES)
def test_a_recurrence_of_128_by_128(name: str, target: str) -> None:
    found = compiled(name, target)
    solved = {"prepare"} if name != "gla" else set()
    assert found.keys() == {"mix", "state", "step", *solved}
    assert found["state"].tensor_core == ("wgmma" if target == "sm_90" else "tcgen05")
    assert found["mix"].tensor_core == "mma"
    for kind, r in found.items():
        assert r.spill_store_bytes <= SPILLED.get(kind, 0), f"{kind}: {r.spill_store_bytes}"
        assert r.shared_bytes <= 227 * 1024
