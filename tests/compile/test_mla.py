"""Latent attention compiled for GPUs that are not here, with the dims that models have."""

import re
from types import SimpleNamespace

import pytest

import attncc as ac
from attncc.codegen.passes.associate import associate
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_shared import SharedChoice, SharedPlan, shared_plan
from attncc.codegen.plan_softmax import SoftmaxPlans, TiledPlan, plan_softmax
from attncc.codegen.printers import source
from attncc.codegen.specialise import static_sizes
from attncc.dsl.axes import PAGE, paged
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load
from tests.compile import sass
from tests.compile.test_gluon import built as assembled
from tests.compile.test_gluon import without_switch

REAL = {"D": 128, "P": 64, "R": 512, "V": 128}
SHARED = 227 << 10


def plans_of(
    heads, phase, target, *, page=0, tokens=None, dialect=Dialect.TRITON, lse=True, **options
):
    """The plans of one fold; page 0 is a whole history."""
    tokens = tokens or (1 if phase == "decode" else 4096)
    sizes = {**REAL, "B": 32, "T": tokens, "S": 8192, "H": heads}
    found = associate(ac.ops.mla.declaration.trace(), sizes, phase)
    program = found.program
    names = {t.name for t in program.tensors if not t.scalar} | {"o", "new_c", "new_r"}
    pages = tuple((n, paged(program.tensor(n).pattern)) for n in ("c", "r")) if page else ()
    spec = Spec(
        dtypes=tuple((n, "bf16") for n in sorted(names)),
        static=(*static_sizes(program, sizes), *([(PAGE, page)] if page else [])),
        aligned=frozenset(names), return_lse=lse, target=f"sm_{target}",
        buckets=(("B", 32), ("T", tokens), ("S", 8192)), dialect=dialect,
        lengths=bool(page), pages=pages, **options,
    )  # fmt: skip
    plans = plan_softmax(program, analyse(program).softmax, spec, phase)
    assert isinstance(plans, SoftmaxPlans), plans
    return plans


def built(plan, target):
    """What a kernel needs, and its machine code on Hopper."""
    generated = source(plan)
    compiled = compile_source(generated, load(generated).function, target)
    code = sass.disassemble(compiled.asm["cubin"]) if target == 90 else ""
    return resources(compiled, f"sm_{target}"), code, compiled.asm["ptx"]


@pytest.mark.parametrize("page", [0, 64])
def test_128_heads_on_one_latent_do_each_product_once_on_two_warpgroups(page):
    plan = plans_of(128, "decode", 90, page=page).split
    assert isinstance(plan, TiledPlan) and plan.turned
    found, code, ptx = built(plan, 90)
    assert found.tensor_core == "wgmma" and found.shared_bytes <= SHARED
    # Two blocks of 64 keys lie in shared memory beside the queries: one is copied, one multiplied.
    assert found.shared_bytes >= 2 * 64 * (REAL["R"] + REAL["P"]) * 3
    # Each warpgroup has half the columns of the scores (32 keys) and half the value's columns:
    # 36 steps of 16 over R and P; 4 x 4 over 256 columns and 64 keys. Two loops have them, and
    # what is never entered repeats the 4 steps over P.
    assert 2 * 36 <= ptx.count("m64n32k16") <= 2 * 40 and ptx.count("m64n64k16") == 2 * 16
    assert sass.faults(code) == []
    # What is spilled lies outside the loop over keys that every row sees.
    assert found.spill_store_bytes <= 512


def test_16_heads_have_three_blocks_in_flight_and_no_spills():
    plan = plans_of(16, "decode", 90, page=64).split
    found, _, _ = built(plan, 90)
    assert not plan.turned and found.spill_store_bytes == 0
    blocks = 3 * plan.block_n * (REAL["R"] + REAL["P"]) * 2
    assert blocks < found.shared_bytes <= SHARED


def test_an_expanded_prompt_takes_wgmma_without_spills():
    found, code, _ = built(plans_of(128, "prefill", 90).whole, 90)
    assert found.tensor_core == "wgmma" and found.spill_store_bytes == 0
    assert found.shared_bytes <= SHARED and sass.faults(code) == []


def test_blackwell_decodes_too():
    plan = plans_of(128, "decode", 100).whole
    assert not plan.turned
    found, _, _ = built(plan, 100)
    assert found.tensor_core == "tcgen05" and found.shared_bytes <= SHARED
    assert found.spill_store_bytes <= 256


@pytest.mark.gluon
@pytest.mark.parametrize(("page", "phase"), [(0, "split"), (64, "whole"), (16, "split")])
def test_two_warpgroups_share_a_tile_whose_keys_are_its_values(page, phase, tmp_path):
    plans = plans_of(128, "decode", 90, page=page, dialect=Dialect.GLUON, lse=False)
    plan = plans.split if phase == "split" else plans.whole
    assert isinstance(plan, SharedPlan) and plans.merge.dialect is Dialect.TRITON
    assert (plan.block_n, plan.num_stages, plan.copied) == (64, 2, min(page, 64) or 64)
    held_to_the_machine(plan, tmp_path)
    compiled, _ = assembled(plan, tmp_path)
    # Two tensor maps, and with pages two more that end with the sequence.
    assert compiled.metadata.global_scratch_size == (4 if page else 2) * 128
    steps = (REAL["R"] + REAL["P"]) // 16
    # The first block's scores and each further one's; what the values take, in both warpgroups.
    assert compiled.asm["ptx"].count(f"m64n{plan.block_n}k16") == 2 * steps
    assert compiled.asm["ptx"].count("m64n256k16") == 3 * plan.block_n // 16


@pytest.mark.gluon
@pytest.mark.parametrize("choice", [
    SharedChoice(late=True), SharedChoice(ahead=True),
    SharedChoice(block_n=32, stages=4, ahead=True),
])  # fmt: skip
def test_other_forms_of_a_shared_tile(choice, tmp_path):
    plain = plans_of(40, "decode", 90, tokens=3, lse=False).whole
    spec = SimpleNamespace(target="sm_90", return_lse=False)
    held_to_the_machine(shared_plan(plain, spec, choice=choice), tmp_path)


def held_to_the_machine(plan, tmp_path):
    """Specialised warps, wgmma and bulk copies; nothing serialised, spilled or out of order."""
    compiled, said = assembled(plan, tmp_path)
    text = compiled.asm["ptx"]
    for used in ("wgmma.mma_async", "setmaxnreg", "cp.async.bulk.tensor", "mbarrier.try_wait"):
        assert used in text, used
    assert not re.search(r"C75\d\d", said), said  # serialised wgmma, or an injected wait
    found = resources(compiled, "sm_90")
    assert found.spill_store_bytes == 0 and found.num_warps == 12
    assert found.shared_bytes <= SHARED
    faults = sass.faults(without_switch(sass.disassemble(compiled.asm["cubin"])))
    assert not faults, sass.report(faults)
