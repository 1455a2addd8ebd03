"""Selections compiled for GPUs that are not here: tensor cores, registers, spills, memory."""

import re

import pytest
import triton

import attncc as ac
from attncc.codegen.forms import Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.plan_gathered import plan_selected
from attncc.codegen.printers import source
from attncc.codegen.quantised import E4M3, Scaled
from attncc.dsl.axes import paged, scales_of
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load
from tests.compile import sass

SIZES = (("Di", 128), ("Hi", 64), ("P", 64), ("R", 512))
CORES = {90: "wgmma", 100: "tcgen05"}


def plans_of(phase, target, **options):
    """The plans of 64 index heads of 128, 2048 picked rows of 512 + 64."""
    spec = spec_of(phase, target, **options)
    plans = plan_selected(analyse(ac.ops.sparse_mla.declaration.trace()).selected, spec, phase)
    assert not isinstance(plans, Refusal), plans
    return plans


def spec_of(phase, target, *, stored="bf16", page=0, rows="bf16", heads=0, lse=True, **options):
    """What such a call fixes; heads are a number of the call where there are 0."""
    program = ac.ops.sparse_mla.declaration.trace()
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    names |= {f"new_{n}" for n in names}
    pattern = program.tensor("ki").pattern
    if page:
        options["pages"] = tuple((n, paged(program.tensor(n).pattern)) for n in ("ki", "c", "r"))
        options["lengths"] = True
        pattern = paged(pattern)
    dtypes = dict.fromkeys(names, "bf16") | {"c": rows}
    if stored != "bf16":
        dtypes |= {"ki": E4M3, "qi": E4M3}
        scales = scales_of(pattern, "Di")
        options["quantised"] = (Scaled("ki", "Di", 128, scales, "u8", "fp16", "bf16", True),)
    return Spec(
        dtypes=tuple(sorted(dtypes.items())),
        static=(*SIZES, *([("H", heads)] if heads else []), *([("page", page)] if page else [])),
        aligned=frozenset(names),
        return_lse=lse,
        target=f"sm_{target}",
        buckets=(("B", 8), ("T", 1 if phase == "decode" else 4096), ("S", 32768)),
        **options,
    )


def built(plan, target):
    """What one plan's kernel needs."""
    generated = source(plan)
    compiled = compile_source(generated, load(generated).function, target)
    return resources(compiled, f"sm_{target}")


@pytest.mark.parametrize(
    ("phase", "stored", "page"),
    [("decode", "bf16", 0), ("prefill", "bf16", 0), ("decode", "e4m3", 64)],
)
def test_scores_use_tensor_cores_and_spill_nothing(phase, stored, page):
    found = built(plans_of(phase, 90, stored=stored, page=page).score, 90)
    assert found.tensor_core == "wgmma" and found.spill_store_bytes == 0
    most = 227 if phase == "prefill" else 113  # decode: two programs a multiprocessor
    assert found.shared_bytes <= most * 1024


def test_counting_picking_and_sorting_spill_nothing():
    plans = plans_of("decode", 90)
    for plan in (plans.count, plans.pick, plans.sort):
        found = built(plan, 90)
        assert found.spill_store_bytes == found.stack_bytes == 0, plan.phase


def test_each_kernel_may_be_on_its_way_while_the_one_ahead_drains():
    plans = plans_of("decode", 90, page=64, chained=True)
    assert plans.append is not None and all(plan.chained for plan in plans.all)
    for plan in (plans.score, plans.count, plans.pick, plans.sort, plans.part):
        assert "gdc_wait()" in source(plan).text
    found = built(plans.count, 90)
    assert found.spill_store_bytes == 0


def test_two_warpgroups_share_the_scores_of_picked_rows():
    part = plans_of("decode", 90).part
    generated = source(part)
    compiled = compile_source(generated, load(generated).function, 90)
    shapes = re.findall(r"wgmma\.mma_async\S*\.(m64n\d+k16)", compiled.asm["ptx"])
    # 64 rows of queries, half of 64 picked rows each; 256 columns of the value, 64 rows of queries
    assert shapes.count("m64n32k16") == 36 and shapes.count("m64n64k16") == 4 * 4


@pytest.mark.parametrize("page", [0, 64])
def test_the_fold_over_picked_rows_stays_in_registers(page):
    plans = plans_of("decode", 90, page=page)
    for plan in (plans.whole, plans.part):
        assert plan.turned
        found = built(plan, 90)
        # A turned sum fills the registers; later ones than Triton 3.6 put some numbers away.
        most = 0 if triton.__version__.startswith("3.6.") else 48
        assert found.tensor_core == "wgmma" and found.spill_store_bytes <= most, plan.phase
        assert found.shared_bytes <= 227 * 1024


def test_rows_that_pass_through_registers_spill_nothing():
    scales = scales_of(ac.ops.sparse_mla.declaration.trace().tensor("c").pattern, "R")
    held = Scaled("c", "R", 512, scales, "u8", "fp16", "bf16", True)
    found = built(plans_of("decode", 90, quantised=(held,), rows=E4M3).part, 90)
    assert found.spill_store_bytes == 0


@pytest.mark.parametrize(("phase", "stored"), [("prefill", "bf16"), ("decode", "e4m3")])
def test_matrix_descriptors_are_made_from_shared_memory(phase, stored):
    plans = plans_of(phase, 90, stored=stored)
    for plan in (plans.score, plans.whole):
        generated = source(plan)
        compiled = compile_source(generated, load(generated).function, 90)
        text = sass.disassemble(compiled.asm["cubin"])
        assert sass.wgmmas(text) and not sass.faults(text), plan.phase


def test_blackwell_multiplies_on_its_own_tensor_cores():
    plans = plans_of("decode", 100)
    for plan in (plans.score, plans.part):
        found = built(plan, 100)
        assert found.tensor_core == CORES[100] and found.shared_bytes <= 227 * 1024, plan.phase
        assert found.spill_store_bytes <= 160, plan.phase


@ac.op(out={"a": "B T H E", "b": "B T H F"})
def two_values(
    qi=ac.Activation("B T Hi Di"),
    w=ac.Activation("B T Hi"),
    ki=ac.Cache("B S Di"),
    q=ac.Activation("B T H D"),
    k=ac.Cache("B S D"),
    v=ac.Cache("B S E"),
    u=ac.Cache("B S F"),
):
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")
    J = ac.topk(index, "S", k=20, where=ac.causal)
    p = ac.softmax(ac.dot(q, k[J], "D"), J)
    return ac.dot(p, v[J], J), ac.dot(p, u[J], J)


def test_values_of_two_widths_are_merged():
    program = two_values.declaration.trace()
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    static = (("D", 16), ("Di", 16), ("E", 64), ("F", 128), ("Hi", 3))
    spec = Spec(
        dtypes=tuple((n, "bf16") for n in sorted(names)), static=static, aligned=frozenset(names),
        target="sm_90", buckets=(("B", 1), ("T", 1), ("S", 256)),
    )  # fmt: skip
    plans = plan_selected(analyse(program).selected, spec, "decode")
    for merge in (plans.merge, *plans.fewer):
        assert built(merge, 90).spill_store_bytes == 0
