"""The warp-specialised tile over picked rows, compiled for a GPU that is not here."""

import re

import pytest

from attncc.codegen.plan import Dialect
from attncc.codegen.plan_picked import LOADERS, PickedPlan, picked_plan, shared_out
from attncc.codegen.plan_shared import SharedChoice
from attncc.runtime.inspect import resources
from tests.compile import sass
from tests.compile.test_gluon import built, without_switch
from tests.compile.test_selected import SIZES, plans_of, spec_of

pytestmark = pytest.mark.gluon


def picked(page=0, phase="part", **choice):
    """The tile of 128 heads over 2048 rows of 512 + 64."""
    call = {"page": page, "heads": 128, "lse": False, "dialect": Dialect.TRITON}
    whole = getattr(plans_of("decode", 90, **call), phase)
    found = picked_plan(whole, spec_of("decode", 90, **call), choice=SharedChoice(**choice))
    assert isinstance(found, PickedPlan), found
    return shared_out(found) or found


@pytest.mark.parametrize(
    ("page", "phase", "choice"),
    [
        (0, "part", {}),
        (64, "whole", {}),
        (16, "part", {"late": False}),
        (0, "part", {"shares": 2}),
    ],
)
def test_picked_rows_are_copied_16_bytes_a_thread(page, phase, choice, tmp_path):
    plan = picked(page, phase, **choice)
    compiled, said = built(plan, tmp_path)
    text = compiled.asm["ptx"]
    sizes = dict(SIZES)
    block = plan.block_n * (sizes["R"] + sizes["P"]) * 2
    copies = re.findall(r"cp\.async\.cg\.shared\.global\b.*0x10,", text)
    assert len(copies) == block // (16 * 32 * LOADERS)
    pieces = 1 + sizes["R"] // plan.part_e
    assert text.count("cp.async.mbarrier.arrive.noinc") == pieces
    for used in ("wgmma.mma_async", "setmaxnreg", "mbarrier.try_wait", "fence.proxy.async"):
        assert used in text, used
    assert not re.search(r"C75\d\d", said), said  # serialised wgmma, or an injected wait
    found = resources(compiled, "sm_90")
    assert found.spill_store_bytes <= 8 and found.num_warps == 12  # a number, ahead of all loops
    assert found.shared_bytes <= 227 << 10
    faults = sass.faults(without_switch(sass.disassemble(compiled.asm["cubin"])))
    assert not faults, sass.report(faults)
