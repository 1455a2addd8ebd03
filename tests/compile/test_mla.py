"""Latent attention compiled for GPUs that are not here, with the dims that models have."""

import pytest

import attncc as ac
from attncc.codegen.passes.associate import associate
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_softmax import SoftmaxPlans, TiledPlan, plan_softmax
from attncc.codegen.printers import source
from attncc.codegen.specialise import static_sizes
from attncc.dsl.axes import PAGE, paged
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load
from tests.compile import sass

REAL = {"D": 128, "P": 64, "R": 512, "V": 128}
SHARED = 227 << 10


def plans_of(heads, phase, target, *, page=0, tokens=None, **options):
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
        aligned=frozenset(names), return_lse=True, target=f"sm_{target}",
        buckets=(("B", 32), ("T", tokens), ("S", 8192)), dialect=Dialect.TRITON,
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
