"""Kernels of scans in parts, and of element-wise scans, compiled without a GPU."""

import re

import pytest

import attncc as ac
from attncc.codegen.affine_plans import Part
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.runtime.backends import sources
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load
from tests.compile.test_gluon_affine import hold
from tests.rows_apart_ops import normed_rule

SIZES = {"Hk": 16, "G": 1, "K": 128, "V": 128, "B": 1, "T": 8192}


@pytest.mark.gluon
def test_a_state_pass_that_leaves_fp32_spills_nothing(tmp_path):
    found = [s.plan for s in sources(normed_rule.declaration, sizes=SIZES)]
    [state] = [p for p in found if isinstance(p, WarpStatePlan) and p.part is Part.WHOLE]
    assert state.tensor("readout0").dtype == "fp32"
    hold(state, tmp_path)


def test_rows_of_two_sums_move_16_bytes_a_thread():
    rows = sources(ac.ops.gated_delta_net.declaration, sizes=SIZES)[-1]
    assert rows.plan.phase == "pointwise"
    kernel = compile_source(rows, load(rows).function, 90)
    found = resources(kernel, "sm_90")
    assert found.spill_store_bytes == found.stack_bytes == 0 and found.registers <= 96
    assert re.search(r"st\.global\S*\.v4\.b32", kernel.asm["ptx"])


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_element_wise_scans_ask_for_rows_ahead_and_spill_nothing(target):
    for source in sources(ac.ops.hgrn.declaration, sizes={"D": 2048}, target=target):
        kernel = compile_source(source, load(source).function, int(target[3:]))
        found = resources(kernel, target)
        assert found.spill_store_bytes == found.stack_bytes == 0
        ahead = len(re.findall(r"cp\.async\.c[ag]\.shared\.global", kernel.asm["ptx"]))
        assert ahead >= 2 * source.plan.group * source.plan.stages, source.entry
