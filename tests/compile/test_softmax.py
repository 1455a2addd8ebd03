"""Softmax kernels compiled for GPUs that are not here: tensor cores, registers, spills."""

import pytest

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_softmax import SoftmaxPlans, plan_softmax
from attncc.codegen.printers import source
from attncc.dsl.axes import paged
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load

TARGETS = [90, 100]


def plans_of(dim, phase, dtype, target, page=0, unaligned=(), **options):
    """The plans of causal attention with four query heads a key head."""
    program = ac.ops.attention.declaration.trace()
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    names |= {f"new_{n}" for n in names}
    spec = Spec(
        dtypes=tuple((n, dtype) for n in sorted(names)),
        static=(("D", dim), ("E", dim), ("G", 4), *([("page", page)] if page else [])),
        aligned=frozenset(names) - {*unaligned},
        return_lse=True,
        target=f"sm_{target}",
        buckets=(("B", 8), ("T", 1 if phase == "decode" else 4096), ("S", 8192)),
        dialect=Dialect.TRITON,
        **options,
    )
    plans = plan_softmax(program, analyse(program).softmax, spec, phase)
    assert isinstance(plans, SoftmaxPlans)
    return plans


def built(plan, target):
    """What one plan's kernel needs."""
    generated = source(plan)
    compiled = compile_source(generated, load(generated).function, target)
    return resources(compiled, f"sm_{target}")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dim", "packed"), [(128, False), (128, True), (256, False)])
def test_prefill_uses_the_newest_tensor_core_without_spills(target, dim, packed):
    found = built(plans_of(dim, "prefill", "bf16", target, packed=packed).whole, target)
    assert found.tensor_core == {90: "wgmma", 100: "tcgen05"}[target]
    assert found.spill_store_bytes == found.spill_load_bytes == 0
    assert found.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dim", [128, 256])
def test_decode_has_many_blocks_in_flight_and_no_spills(target, dim):
    plans = plans_of(dim, "decode", "bf16", target, lengths=True)
    assert plans.merge is None and plans.split.fused is not None
    for plan in (plans.whole, plans.split, plans.append):
        found = built(plan, target)
        assert found.spill_store_bytes == 0, plan.phase
        assert found.shared_bytes <= 227 * 1024
    assert built(plans.split, target).tensor_core is not None
    assert plans.split.num_stages >= 3


@pytest.mark.parametrize(("dim", "phase", "spills"), [(128, "prefill", 256), (128, "decode", 0)])
def test_fp32_takes_three_passes_and_few_spills(dim, phase, spills):
    plans = plans_of(dim, phase, "fp32", 90)
    assert "tf32x3" in source(plans.whole).text
    found = built(plans.whole, 90)
    assert found.tensor_core is not None and found.spill_store_bytes <= spills


@pytest.mark.parametrize("target", TARGETS)
def test_a_merge_of_many_rows_is_a_kernel_of_its_own_without_spills(target):
    plans = plans_of(128, "prefill", "bf16", target)
    assert plans.split.fused is None
    assert built(plans.merge, target).spill_store_bytes == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("page", [16, 64])  # a block of keys lies in several pages, or in one
def test_decode_through_pages_without_spills(target, page):
    pages = tuple((t.name, paged(t.pattern)) for t in ac.ops.attention.declaration.tensors[1:])
    plans = plans_of(
        128, "decode", "bf16", target, page=page, lengths=True, packed=True, pages=pages
    )
    assert (plans.whole.page, plans.append.page) == (page, page)
    for plan in (plans.whole, plans.split, plans.append):
        found = built(plan, target)
        assert found.spill_store_bytes == found.spill_load_bytes == 0, plan.phase
        assert found.shared_bytes <= 227 * 1024


def test_no_split_count_or_length_is_compiled_in():
    plans = plans_of(128, "decode", "bf16", 90)
    again = plans_of(128, "decode", "bf16", 90)
    assert source(plans.split).text == source(again.split).text
    scalars = {p.name for p in plans.split.parameters}
    assert {"splits", "rows", "tiles", "T", "S", "n_B", "n_Hkv"} <= scalars
