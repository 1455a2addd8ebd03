"""The breadth of scores compiled for GPUs that are not here: tensor cores, registers, spills."""

import re

import pytest

from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_softmax import SoftmaxPlans, plan_softmax
from attncc.codegen.printers import source
from attncc.runtime.kernels import compile_source, load
from tests import score_ops as ops
from tests.compile import assembled
from tests.compile.test_softmax import built

TARGETS = [90, 100]
OWN = {"document": "i32", "prefix": "i32", "lam": "fp32", "sink": "fp32", "table": "fp32",
       "weight": "fp32", "least": "fp32", "f": "fp32"}  # fmt: skip
SIZES = {"D": 128, "E": 128, "G": 4, "R": 64, "Hi": 4, "Di": 64, "L": 512}


def plans_of(name, target, phase="prefill"):
    """The plans of a case in bf16 with heads of 128."""
    program = ops.CASES[name][0].declaration.trace()
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    axes = {a for t in program.tensors for a in t.pattern.axes}
    spec = Spec(
        dtypes=tuple((n, OWN.get(n, "bf16")) for n in sorted(names)),
        static=tuple((a, n) for a, n in SIZES.items() if a in axes),
        aligned=frozenset(names),
        target=f"sm_{target}",
        buckets=(("B", 8), ("T", 1 if phase == "decode" else 4096), ("S", 8192)),
        dialect=Dialect.TRITON,
    )
    plans = plan_softmax(program, analyse(program).softmax, spec, phase)
    assert isinstance(plans, SoftmaxPlans), plans
    return plans


CASES = ["differential", "two_values", "rectified", "indexed", "shared_prefix", "relative",
         "documents", "forgetting"]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_prefill_has_tensor_cores_and_no_spills(name, target):
    plans = plans_of(name, target)
    plan = plans.whole or plans.parts[0]
    found = built(plan, target)
    assert found.tensor_core == {90: "wgmma", 100: "tcgen05"}[target]
    assert found.spill_store_bytes == found.spill_load_bytes == 0
    assert found.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("name", CASES)
def test_no_product_waits_for_the_one_before(name, tmp_path):
    plans = plans_of(name, 90)
    generated = source(plans.whole or plans.parts[0])
    said = assembled.said(compile_source(generated, load(generated).function, 90), tmp_path)
    assert not re.search(r"C75\d\d", said), said


def test_a_merge_of_several_passes_compiles():
    for name in ("differential", "shared_prefix"):
        found = built(plans_of(name, 90).merge, 90)
        assert found.spill_store_bytes == 0
