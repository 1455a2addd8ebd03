"""Kernels of outputs that read a state across, compiled without a GPU."""

import pytest

from attncc.runtime.backends import sources
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load
from tests.across_ops import OJA
from tests.compile import sass

SIZES = {"Hk": 16, "G": 1, "K": 128, "V": 128, "B": 1, "T": 8192}


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_outputs_and_what_is_left_for_them_spill_nothing(target):
    found = {s.plan.phase: s for s in sources(OJA.declaration, sizes=SIZES, target=target)}
    for phase in ("state", "across_bases", "across"):
        source = found[phase]
        kernel = compile_source(source, load(source).function, int(target[3:]))
        cost = resources(kernel, target)
        assert cost.spill_store_bytes == cost.stack_bytes == 0, (phase, cost)
        if phase == "across":  # in registers, by warps that wait for no others
            assert cost.shared_bytes == 0 and source.plan.num_warps == 1
        elif target == "sm_90":
            text = sass.disassemble(kernel.asm["cubin"])
            assert sass.wgmmas(text) and not sass.faults(text), sass.report(sass.faults(text))
