"""Kernels on e4m3 histories compiled for GPUs that are not here: spills, copies, conversions."""

import re

import pytest

import attncc as ac
from attncc.codegen.forms import Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.plan_softmax import plan_softmax
from attncc.codegen.printers import source
from attncc.codegen.quantised import E4M3, Scaled
from attncc.dsl.axes import paged, scales_of
from attncc.runtime.inspect import resources
from attncc.runtime.kernels import compile_source, load
from tests.compile import sass

STORAGES = [(128, "fp32", "bf16"), (128, "u8", "bf16"), (32, "fp32", "bf16"), (64, "u8", "fp16")]


def plans_of(block, scale, dtype, target, phase="decode", page=0, dim=128, **options):
    """The plans of causal attention with four query heads a key head over an e4m3 cache."""
    program = ac.ops.attention.declaration.trace()
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    names |= {f"new_{n}" for n in names}
    patterns = {n: program.tensor(n).pattern for n in ("k", "v")}
    if page:
        patterns = {n: paged(p) for n, p in patterns.items()}
        options["pages"] = tuple(patterns.items())
    spec = Spec(
        dtypes=tuple(sorted((dict.fromkeys(names, dtype) | {"k": E4M3, "v": E4M3}).items())),
        static=(("D", dim), ("E", dim), ("G", 4), *([("page", page)] if page else [])),
        lengths=True,
        aligned=frozenset(names),
        return_lse=True,
        target=f"sm_{target}",
        buckets=(("B", 8), ("T", 1 if phase == "decode" else 4096), ("S", 8192)),
        quantised=tuple(
            Scaled(n, a, block, scales_of(patterns[n], a), scale, "fp16", dtype, True)
            for n, a in (("k", "D"), ("v", "E"))
        ),
        **options,
    )
    return plan_softmax(program, analyse(program).softmax, spec, phase)


def built(plan, target):
    """The compiled kernel and what it needs."""
    generated = source(plan)
    compiled = compile_source(generated, load(generated).function, target)
    return compiled, resources(compiled, f"sm_{target}")


def loops(compiled):
    """Names of the machine instructions of each loop that multiplies matrices."""
    labels, code = {}, []
    for line in sass.disassemble(compiled.asm["cubin"]).splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(.*);", line):
            code.append(found[1].strip())
    for i, text in enumerate(code):
        back = re.match(r"BRA.*`\((\.L_x_\d+)\)", text)
        if back and labels.get(back[1], i) < i:
            body = [x.split()[0] for x in code[labels[back[1]] : i + 1]]
            if any("MMA" in x for x in body):
                yield body


def assert_no_spills(compiled, found):
    """None where it costs: to have three or four programs on a multiprocessor, ptxas puts a few
    words on the stack that only the start and the end need.
    """
    assert found.spill_store_bytes <= 32 and found.spill_load_bytes <= 32
    bodies = list(loops(compiled))
    assert bodies
    assert not [x for body in bodies for x in body if x.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("target", [90, 100])
@pytest.mark.parametrize(("block", "scale", "dtype"), STORAGES)
def test_decode_and_append_without_spills(block, scale, dtype, target):
    plans = plans_of(block, scale, dtype, target)
    for plan in (plans.whole, plans.split, plans.append):
        compiled, found = built(plan, target)
        ptx = compiled.asm["ptx"]
        assert found.shared_bytes <= 227 * 1024
        if plan is plans.append:
            assert found.spill_store_bytes == found.spill_load_bytes == 0
            assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
            continue
        assert_no_spills(compiled, found)
        assert "cvt.rn.f16x2.e4m3x2" in ptx
        assert "cvt.bf16.f16" not in ptx  # a sixteenth of the rate
        assert re.search(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx)


@pytest.mark.parametrize("target", [90, 100])
@pytest.mark.parametrize("page", [16, 64])  # a block of keys lies in several pages, or in one
def test_decode_through_pages_without_spills(target, page):
    plans = plans_of(128, "fp32", "bf16", target, page=page, packed=True)
    assert_no_spills(*built(plans.split, target))
    _, found = built(plans.append, target)
    assert found.spill_store_bytes == found.spill_load_bytes == 0


@pytest.mark.parametrize("target", [90, 100])
@pytest.mark.parametrize(("block", "scale", "dtype"), STORAGES[::2])
def test_prefill_reads_what_it_appended(block, scale, dtype, target):
    plan = plans_of(block, scale, dtype, target, "prefill").whole
    compiled, found = built(plan, target)
    assert_no_spills(compiled, found)
    assert found.tensor_core is not None


def test_there_is_no_e4m3_before_sm_89():
    found = plans_of(128, "fp32", "bf16", 80)
    assert isinstance(found, Refusal) and "sm_89" in found.reason
    assert not isinstance(plans_of(128, "fp32", "bf16", 89), Refusal)
