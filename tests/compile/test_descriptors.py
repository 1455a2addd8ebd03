"""No wgmma takes a descriptor that is made from a kernel's parameters or from nothing."""

from dataclasses import replace

import pytest
import triton

import attncc as ac
from attncc.codegen.emit.scan_sources import sources_of
from attncc.codegen.pipeline import analyse, kernel_sources
from attncc.codegen.plan import Spec
from attncc.codegen.plan_affine import plan_chunked
from attncc.codegen.plan_softmax import TiledPlan, plan_softmax
from attncc.codegen.printers import source
from attncc.dsl.axes import paged
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.inspect import tensor_core
from attncc.runtime.kernels import compile_source, load
from tests.compile import sass, test_affine, test_softmax
from tests.drawn.seeded import drawing

KERNEL = """
.text.hoisted:
        /*0000*/                   ULDC UR8, c[0x0][0x260] ;
        /*0010*/                   UMOV UR4, 0x400 ;
        /*0020*/                   S2UR UR6, SR_CgaCtaId ;
        /*0030*/                   ULEA UR6, UR6, UR4, 0x18 ;
        /*0040*/                   USHF.R.U32.HI UR22, URZ, 0x4, UR6 ;
        /*0050*/                   ISETP.GE.AND P1, PT, R0, UR8, PT ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   UIADD3 UR14, UP0, {base}, 0x40, URZ ;
        /*0080*/                   UMOV UR15, 0x40000040 ;
        /*0090*/                   UMOV UR18, UR22 ;
        /*00a0*/                   UMOV UR19, 0x40000040 ;
.L_x_0:
        /*00b0*/                   HGMMA.64x32x16.F32.BF16 R56, R24, gdesc[UR16].tnspB, R56 ;
        /*00c0*/                   HGMMA.64x32x16.F32.BF16 R56, R28, gdesc[UR12].tnspB, R56, gsb0 ;
        /*00d0*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*00e0*/                   EXIT ;
"""
COPIES = """
.text.copies:
        /*0000*/                   VOTEU.ALL UP0, P1 ;
        /*0010*/                   @!UP0 UTMALDG.2D [UR16], [UR44] ;
        /*0020*/                   BSSY B0, `(.L_x_1) ;
        /*0030*/               @P1 BRA `(.L_x_0) ;
        /*0040*/                   UTMALDG.2D [UR8], [UR12] ;
.L_x_0:
        /*0050*/                   {between} ;
        /*0060*/                   @!UP0 UTMALDG.3D [UR16], [UR10] ;
        /*0070*/                   BSYNC B0 ;
.L_x_1:
        /*0080*/                   EXIT ;
"""
SPILLED = """
.text.spilled:
        /*0000*/                   S2R R4, SR_TID.X ;
        /*0010*/                   LDC R1, c[0x0][0x28] ;
        /*0020*/                   LDC.64 R6, c[0x0][0x210] ;
        /*0030*/                   MOV R5, 0x40000040 ;
        /*0040*/                   STL.64 [R1+0x10], {kept} ;
        /*0050*/                   CALL.REL.NOINC `($inner) ;
        /*0060*/                   LDL.64 R8, [R1+0x10] ;
        /*0070*/                   R2UR UR4, R8 ;
        /*0080*/                   R2UR UR5, R9 ;
        /*0090*/                   UMOV UR6, UR4 ;
        /*00a0*/                   UMOV UR7, UR5 ;
        /*00b0*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], RZ, !UPT ;
        /*00c0*/                   EXIT ;
$inner:
        /*00d0*/                   IADD3 R9, R6, R7, RZ ;
        /*00e0*/                   RET.REL.NODEC R2 `(spilled) ;
"""
GUARDED = """
.text.guarded:
        /*0000*/              @!P0 UMOV UR6, 0x40 ;
        /*0010*/                   {other} UR6, {value} ;
        /*0020*/                   UMOV UR7, 0x40000040 ;
        /*0030*/                   HGMMA.64x8x16.F32 R24, R4, gdesc[UR4], RZ, !UPT ;
        /*0040*/                   EXIT ;
"""


def test_a_descriptor_from_a_parameter_is_found_across_a_loop() -> None:
    [fault] = sass.faults(KERNEL.replace("{base}", "UR8"))
    assert (fault.register, fault.use.address) == ("UR14", 0xC0)
    assert "the constant c[0x0][0x260], read at 0x0" in str(fault)
    assert sass.faults(KERNEL.replace("{base}", "UR22")) == []


def test_a_descriptor_from_nothing_is_found() -> None:
    [fault] = sass.faults(KERNEL.replace("{base}", "UR18"))
    assert fault.origins == ("nothing: no definition on some path",)


def test_values_are_followed_through_the_stack_and_around_calls() -> None:
    assert sass.faults(SPILLED.replace("{kept}", "R4")) == []
    found = sass.faults(SPILLED.replace("{kept}", "R6"))
    assert {f.register for f in found} == {"UR4", "UR5", "UR6", "UR7"}


def test_a_guarded_instruction_may_leave_its_register_undefined() -> None:
    right = GUARDED.replace("{other}", "UMOV").replace("{value}", "0x80")
    assert sass.faults(right) == []
    [fault] = sass.faults(GUARDED.replace("{other}", "@UP1 UMOV").replace("{value}", "0x80"))
    assert fault.register == "UR6"
    loaded = GUARDED.replace("{other}", "ULDC").replace("{value}", "c[0x0][0x210]")
    assert [f.register for f in sass.faults(loaded)] == ["UR6"]


@pytest.mark.parametrize("jump", ["BRX R4 -0x10", "BRA 0x40"])
def test_a_jump_to_an_unknown_place_is_not_passed_over(jump: str) -> None:
    with pytest.raises(ValueError, match="unknown place"):
        sass.faults(KERNEL.replace("EXIT", jump))


@pytest.mark.parametrize(("between", "twice"), [
    ("NOP", True), ("VOTEU.ALL UP0, P1", False), ("BSYNC B0", False), ("WARPSYNC.ALL", False),
])  # fmt: skip
def test_a_copy_that_both_parts_of_a_warp_send_is_found(between: str, twice: bool) -> None:
    found = sass.sent_twice(COPIES.replace("{between}", between))
    assert found == ["copies at 0x60: `@!UP0 UTMALDG.3D [UR16], [UR10]`"] * twice


# --- compiled kernels ------------------------------------------------------------------------


def disassembled(generated) -> tuple[str, str | None]:
    """A kernel's machine code for Hopper, and its strongest tensor-core instruction."""
    compiled = compile_source(generated, load(generated).function, 90)
    return sass.disassemble(compiled.asm["cubin"]), tensor_core(compiled.asm["ptx"])


def checked(generated) -> str | None:
    """No fault in a kernel; gives back its tensor-core instruction."""
    text, core = disassembled(generated)
    assert (sass.wgmmas(text) > 0) == (core == "wgmma"), generated.plan.phase
    found = sass.faults(text)
    assert not found, sass.report(found)
    return core


def drawn(seed: int) -> list:
    """The generated kernels of a seed's call."""
    found = drawing(seed)
    call, _ = bind(found.drawn.op.declaration, (), dict(found.kwargs))
    return kernel_sources(call.program, spec_of(call), "prefill")


@pytest.mark.parametrize("seed", [79, 183])
def test_seeds_whose_operands_pass_through_registers(seed: int) -> None:
    """As wgmma they were wrong on a GPU: the assembler hoisted descriptors from the wrong base."""
    [whole] = [s for s in drawn(seed) if s.plan.phase == "prefill"]
    plan = whole.plan
    assert isinstance(plan, TiledPlan)
    assert checked(whole) == "mma"
    rows, warps = {79: (64, 4), 183: (128, 8)}[seed]
    wide = source(replace(plan, block_m=rows, block_n=64, num_warps=warps, num_stages=3))
    text, core = disassembled(wide)
    assert core == "wgmma"
    assert sass.faults(text) or not triton.__version__.startswith(("3.6.", "3.7."))


@pytest.mark.parametrize("seed", [9, 33])
def test_a_sample_of_random_declarations(seed: int) -> None:
    for generated in drawn(seed):
        if isinstance(generated.plan, TiledPlan):
            checked(generated)


@pytest.mark.parametrize(
    ("dim", "dtype", "packed"), [(64, "fp16", False), (128, "bf16", True), (256, "bf16", False)]
)
def test_attention(dim: int, dtype: str, packed: bool) -> None:
    plans = test_softmax.plans_of(dim, "prefill", dtype, 90, packed=packed)
    for plan in (plans.whole, plans.split):
        assert checked(source(plan)) == "wgmma"


def test_attention_through_pages() -> None:
    pages = tuple((t.name, paged(t.pattern)) for t in ac.ops.attention.declaration.tensors[1:])
    plans = test_softmax.plans_of(
        128, "prefill", "bf16", 90, page=16, lengths=True, packed=True, pages=pages
    )
    assert checked(source(plans.whole)) == "wgmma"


@pytest.mark.parametrize(("size", "dtype", "aligned"), [(128, "bf16", True), (64, "fp16", False)])
def test_the_state_of_the_gated_delta_rule(size: int, dtype: str, aligned: bool) -> None:
    form = analyse(test_affine.PROGRAM).affine
    spec = test_affine.spec(dtype, size)
    spec = spec if aligned else replace(spec, aligned=frozenset())
    [state] = [
        s
        for s in sources_of(plan_chunked(test_affine.PROGRAM, form, spec))
        if s.plan.phase == "state"
    ]
    assert checked(state) == "wgmma"


@ac.op(out="B T H E")
def weighed(
    q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H E"), c=ac.Cache("B S H"),
):  # fmt: skip
    """Values that are computed before they are summed."""
    p = ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=ac.causal)
    return ac.dot(p, v * ac.sigmoid(c), "S")


@pytest.mark.parametrize("target", [90, 100])
@pytest.mark.parametrize("dim", [128, 256])
def test_operands_without_alignment_have_no_descriptors(dim: int, target: int) -> None:
    plans = test_softmax.plans_of(dim, "prefill", "bf16", target, unaligned=("k", "v"))
    found = test_softmax.built(plans.whole, target)
    assert found.tensor_core == "mma"
    assert found.spill_store_bytes <= 32  # at most a few addresses


def test_computed_and_fp32_operands_have_no_descriptors() -> None:
    program = weighed.declaration.trace()
    for dtype in ("bf16", "fp32"):
        spec = Spec(
            dtypes=tuple((n, dtype) for n in "ckoqv"),
            static=(("D", 64), ("E", 64)),
            aligned=frozenset("ckoqv"),
            buckets=(("B", 8), ("T", 4096), ("S", 8192)),
        )
        plans = plan_softmax(program, analyse(program).softmax, spec, "prefill")
        assert plans.whole.block_m == 32
        assert checked(source(plans.whole)) == "mma"


def test_one_operand_that_is_not_aligned_is_enough() -> None:
    for name, rows in (("q", 64), ("k", 32), ("v", 32)):
        plans = test_softmax.plans_of(128, "prefill", "bf16", 90, unaligned=(name,))
        assert plans.whole.block_m == rows, name
    odd = test_softmax.plans_of(33, "prefill", "bf16", 90)
    assert odd.whole.block_m == 32
