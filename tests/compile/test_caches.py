"""Kernels on pools compiled for GPUs that need not be there, and 64-bit addresses in caches."""

import ast
from dataclasses import replace

import pytest

import attncc as ac
from attncc.codegen.emit.scan_sources import sources_of
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan_affine import plan_chunked
from attncc.codegen.plan_scan import plan_step
from attncc.codegen.printers import source
from attncc.dsl.axes import paged
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load
from tests.compile.test_affine import PROGRAM, spec
from tests.compile.test_softmax import plans_of


def statements(generated):
    """Each statement on one line, however it was broken."""
    return ast.unparse(ast.parse(generated.text)).splitlines()


def pooled(*tokens):
    """The spec of a call whose state lives in a pool."""
    return replace(spec("bf16"), pools=frozenset({"s"}), token_slots=frozenset(tokens))


@pytest.mark.parametrize("target", [90, 100])
@pytest.mark.parametrize("tokens", [(), ("s",)])  # one slot a sequence, or one a token
def test_steps_in_a_pool_need_no_spills(target, tokens):
    plan = plan_step(PROGRAM, pooled(*tokens))
    (generated,) = sources_of(plan)
    compiled = compile_source(generated, load(generated).function, target)
    found = resources(compiled, f"sm_{target}")
    assert found.spill_store_bytes == found.spill_load_bytes == 0


def test_chunks_in_a_pool_are_as_good_as_those_of_plain_states():
    found = []
    for options in (spec("bf16"), pooled()):
        plans = plan_chunked(PROGRAM, analyse(PROGRAM).affine, options)
        generated = sources_of(plans)[-1]
        compiled = compile_source(generated, load(generated).function, 90)
        found.append(resources(compiled, "sm_90"))
    plain, pool = found
    assert pool.tensor_core == plain.tensor_core == "wgmma"
    assert pool.spill_store_bytes <= plain.spill_store_bytes + 16


def test_pages_and_slots_are_64_bit_before_a_stride_meets_them():
    pages = tuple((t.name, paged(t.pattern)) for t in ac.ops.attention.declaration.tensors[1:])
    for page in (16, 64):
        plans = plans_of(
            128, "decode", "bf16", 90, page=page, lengths=True, packed=True, pages=pages
        )
        for plan in (plans.whole, plans.split, plans.append):
            found = [x.strip() for x in statements(source(plan))]
            found = [x for x in found if x.startswith(("page = ", "pages = ", "new_page = "))]
            spread = [x for x in found if x.startswith("page = ") and "pages" in x]
            assert len(spread) == (plan is not plans.append)  # of a block's, which are 64-bit
            made = [x for x in found if x not in spread]
            # of the first block, of a later one, of rows that are written
            assert len(made) == 2 * len(spread) + (plan is not plans.whole)
            assert all(".to(tl.int64)" in line for line in made)
            strides = {p.type for p in plan.parameters if p.name.startswith(("k_s", "v_s"))}
            assert strides == {"i64"}
    (generated,) = sources_of(plan_step(PROGRAM, pooled("s")))
    lines = [
        x for x in statements(generated) if x.strip().startswith(("s_slot = ", "s_out_slot = "))
    ]
    assert len(lines) == 2 and all(x.endswith(".to(tl.int64)") for x in lines)
