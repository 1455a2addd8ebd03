"""Warp-specialised softmax prefill compiled for sm_90 without a GPU: wgmma, registers, warnings."""

import re
from dataclasses import replace

import pytest

from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_gluon import WarpChoice, WarpPlan, warp_plan
from attncc.codegen.plan_softmax import SoftmaxPlans, plan_softmax
from attncc.codegen.printers import source
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load
from tests.compile import assembled, sass
from tests.gluon_ops import CASES, CROWDED, apart, from_a_key_on

pytestmark = pytest.mark.gluon
OWN = {"document": "i32", "slope": "fp32", "sink": "fp32", "weight": "fp32"}
OPS = {**CASES, **CROWDED, "apart": apart, "from_a_key_on": from_a_key_on}


def spec_of(program, dim, packed, group=4, dtype="bf16", lse=True):
    """A call of a case with four query heads a key head."""
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    axes = {a for t in program.tensors for a in t.pattern.axes}
    return Spec(
        dtypes=tuple((n, OWN.get(n, dtype)) for n in sorted(names)),
        static=tuple((a, n) for a, n in (("D", dim), ("E", dim), ("G", group)) if a in axes),
        aligned=frozenset(names),
        packed=packed,
        return_lse=lse,
        buckets=(("B", 8), ("T", 4096), ("S", 8192)),
    )


def whole(name, dim, packed=False, dialect=Dialect.GLUON, **options):
    """The plan of a case's tile."""
    program = OPS[name].declaration.trace()
    spec = replace(spec_of(program, dim, packed, **options), dialect=dialect)
    plans = plan_softmax(program, analyse(program).softmax, spec, "prefill")
    assert isinstance(plans, SoftmaxPlans), plans
    return plans.whole, spec


def built(plan, tmp_path):
    """Compiled for sm_90, and what the assembler says of it."""
    generated = source(plan)
    compiled = compile_source(generated, load(generated).function, 90)
    return compiled, assembled.said(compiled, tmp_path)


def without_switch(text):
    """A disassembly whose computed jumps, by which warps part, are branches to each target."""

    def branches(found):
        *some, last = found[2].split(",")
        lines = [f"{found[1]}@P0 BRA `({label}) ;" for label in some]
        return "\n".join([*lines, f"{found[1]}BRA `({last}) ;"])

    code = r'^(\s*/\*[0-9a-f]+\*/\s+)BRX [^;]*?BRANCH_TARGETS ([^"]+)"\*\)\s*;'
    return re.sub(code, branches, text, flags=re.MULTILINE)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", list(CASES))
def test_warps_are_specialised_and_nothing_is_serialised_or_spilled(name, dim, tmp_path):
    plan, _ = whole(name, dim)
    assert isinstance(plan, WarpPlan) and plan.dialect is Dialect.GLUON
    compiled, said = built(plan, tmp_path)
    text = compiled.asm["ptx"]
    for used in ("wgmma.mma_async", "setmaxnreg", "cp.async.bulk.tensor", "mbarrier.try_wait"):
        assert used in text, used
    assert not re.search(r"C75\d\d", said), said  # serialised wgmma, or an injected wait
    found = resources(compiled, "sm_90")
    # Predicates over the history hold 32 loads a thread: a few addresses leave once a tile.
    budget = 64 if name == "documents" and dim == 128 else 0
    assert found.spill_store_bytes <= budget, said
    assert found.shared_bytes <= 227 * 1024
    assert found.num_warps == 12
    # Three tensor maps, each of which a program writes into its scratch.
    assert compiled.metadata.global_scratch_size == 3 * 128
    found = sass.faults(without_switch(sass.disassemble(compiled.asm["cubin"])))
    assert not found, sass.report(found)


@pytest.mark.parametrize("name", ["capped", "alibi", "windowed", "documents"])
def test_forms_without_an_lse_are_not_serialised_and_hardly_spill(name, tmp_path):
    plan, _ = whole(name, 128, lse=False)
    assert plan.query_places == 2 and plan.wide_stores and plan.edges
    compiled, said = built(plan, tmp_path)
    assert not re.search(r"C75\d\d", said), said
    found = resources(compiled, "sm_90")
    assert found.spill_store_bytes <= 64, said
    assert found.shared_bytes <= 227 * 1024
    assert compiled.metadata.global_scratch_size == 3 * 128
    machine = without_switch(sass.disassemble(compiled.asm["cubin"]))
    assert not sass.faults(machine), sass.report(sass.faults(machine))
    assert "STG.E.128" in machine and not re.search(r"STG\.E(\.64)? ", machine)
    if name == "capped":  # one special function besides the weight's, not two
        assert "MUFU.RSQ" not in machine and "MUFU.TANH" not in machine


def test_a_band_without_a_last_key_compiles(tmp_path):
    plan, _ = whole("from_a_key_on", 128, lse=False)
    assert plan.edges
    compiled, _ = built(plan, tmp_path)
    assert "HGMMA" in sass.disassemble(compiled.asm["cubin"])


@pytest.mark.parametrize(("name", "dim"), [("causal", 128), ("documents", 64)])
def test_packed_sequences_end_their_values_with_a_map_of_their_own(name, dim, tmp_path):
    plan, _ = whole(name, dim, packed=True)
    compiled, said = built(plan, tmp_path)
    assert not re.search(r"C75\d\d", said) and " 0 bytes spill stores" in said
    assert compiled.metadata.global_scratch_size == 4 * 128


@pytest.mark.parametrize("group", [1, 6])
def test_any_group_compiles(group, tmp_path):
    plan, _ = whole("causal", 128, group=group)
    assert plan.tile_axes == (("T", "G") if group == 1 else ("T",))
    _, said = built(plan, tmp_path)
    assert not re.search(r"C75\d\d", said) and " 0 bytes spill stores" in said


@pytest.mark.parametrize("name", [*CROWDED, "apart"])
def test_what_takes_more_registers_or_axes_compiles_too(name, tmp_path):
    plan, _ = whole(name, 128)
    compiled, said = built(plan, tmp_path)
    assert not re.search(r"C75\d\d", said)
    assert resources(compiled, "sm_90").spill_store_bytes <= 64, said


def test_whole_numbers_of_64_bits_take_two_registers_each(tmp_path):
    program = CASES["documents"].declaration.trace()
    spec = spec_of(program, 128, packed=True)
    wide = tuple((n, "i64" if n == "document" else t) for n, t in spec.dtypes)
    spec = replace(spec, dtypes=wide, dialect=Dialect.GLUON)
    plan = plan_softmax(program, analyse(program).softmax, spec, "prefill").whole
    compiled, said = built(plan, tmp_path)
    assert not re.search(r"C75\d\d", said)
    assert resources(compiled, "sm_90").spill_store_bytes <= 64, said


@pytest.mark.parametrize("choice", [
    WarpChoice(block_n=64, stages=3), WarpChoice(block_n=128, stages=3),
    WarpChoice(packed_rows=False),
])  # fmt: skip
def test_choices_fit_the_device(choice, tmp_path):
    plan, spec = whole("causal", 128, dialect=Dialect.TRITON)
    compiled, said = built(warp_plan(plan, spec, choice), tmp_path)
    assert not re.search(r"C75\d\d", said) and " 0 bytes spill stores" in said
    assert compiled.metadata.shared <= 227 * 1024


def test_fp16_operands_are_fp16():
    plan, _ = whole("capped", 64, dtype="fp16")
    text = source(plan).text
    assert "gl.float16" in text and "gl.bfloat16" not in text
