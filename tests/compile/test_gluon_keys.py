"""Gluon kernels of decays along the key, compiled for sm_90 without a GPU."""

import re

import pytest

from attncc.codegen.emit.scan_sources import choose_plans, split_sources
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_affine import plan_chunked
from attncc.codegen.plan_gluon_keys import InversePlan, KeysPlan, keys_plans
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.runtime.inspect import resources
from tests.compile import sass
from tests.compile.test_gluon_affine import OLDER, built, hold
from tests.key_decay_ops import OPS, ROWS, SYSTEMS

pytestmark = pytest.mark.gluon
NUMBERS = dict.fromkeys(("g", "w", "beta", "bias"), "fp32")
SIZES = {"G": 2, "N": 2}


def spec_of(program, key, value, dtype="bf16", systems=32, dialect=Dialect.GLUON):
    names = {t.name for t in program.tensors} | {o.name for o in program.outputs}
    dtypes = {n: NUMBERS.get(n, dtype) for n in sorted(names)} | {"s": "fp32", "s_initial": "fp32"}
    axes = {a for t in program.tensors for a in t.pattern.axes}
    sizes = {**SIZES, "K": key, "V": value}
    return Spec(
        dtypes=tuple(dtypes.items()),
        static=tuple((a, n) for a, n in sizes.items() if a in axes),
        packed=True,
        aligned=frozenset([*dtypes, "s_final"]) - set(NUMBERS),
        given_states=frozenset({"s"}),
        target="sm_90",
        dialect=dialect,
        buckets=(("systems", systems),),
    )


def plans_of(name, key=128, value=128, **options):
    program = SYSTEMS[name].declaration.trace(None, SIZES)
    return choose_plans(
        program, analyse(program), spec_of(program, key, value, **options), chunked=True
    )


def systems_of(name, key=128, leaf=32, **options):
    program = SYSTEMS[name].declaration.trace(None, SIZES)
    spec = spec_of(program, key, 128, **options)
    plans = plan_chunked(program, analyse(program).affine, spec)
    return keys_plans(plans, spec, leaf=leaf, joined=True)


def fenced(ptx):
    """Whether a barrier for all threads lies between each fence and the products behind it."""
    ready, order = False, re.compile(r"fence\.proxy\.async|bar\.sync|wgmma\.mma_async")
    for found in order.findall(ptx):
        if found == "wgmma.mma_async" and not ready:
            return False
        ready = found == "bar.sync" or (ready and found == "wgmma.mma_async")
    return True


@pytest.mark.parametrize(("name", "key", "dtype"), [
    ("kda", 128, "bf16"), ("kda", 64, "fp16"), ("gla", 128, "fp16"), ("two_vectors", 128, "bf16"),
    ("normalised", 128, "bf16"), ("rwkv7", 128, "bf16"), ("two_updates", 128, "fp16"),
    ("ahead", 128, "bf16"),
])  # fmt: skip
def test_systems_have_no_spills_and_no_exchange_between_lanes(name, key, dtype, tmp_path):
    plan, _ = systems_of(name, key, dtype=dtype)
    assert isinstance(plan, KeysPlan)
    compiled, said = built(plan, tmp_path)
    found = resources(compiled, "sm_90")
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    # One warpgroup alone has twice the squares a thread; sums over K take a few addresses.
    # Two joined programs of 128 registers a thread share a multiprocessor, and put away
    # a few: 144 bytes with Triton 3.6, whose kernel was the faster one all the same.
    assert found.spill_store_bytes <= (144 if plan.registers else 128 if key == 64 else 16), said
    assert "C75" not in said, said  # serialised wgmma
    assert found.shared_bytes <= 113 * 1024, "two programs a multiprocessor"
    if name != "normalised":
        assert compiled.asm["ptx"].count("shfl.sync") <= 4  # the last sums, none of a level
    assert fenced(compiled.asm["ptx"])
    faults = sass.faults(sass.disassemble(compiled.asm["cubin"]))
    assert not faults, sass.report(faults)


@pytest.mark.parametrize("leaf", [16, 32])
def test_systems_are_inverted_by_many_programs_at_once(leaf, tmp_path):
    _, plan = systems_of("kda", leaf=leaf)
    assert isinstance(plan, InversePlan) and systems_of("gla")[1] is None
    compiled, said = built(plan, tmp_path)
    found = resources(compiled, "sm_90")
    assert found.spill_store_bytes == 0, said
    assert found.registers <= 128 and 8 * (found.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("name", ["kda", "gla", "two_vectors", *ROWS])
def test_states_are_carried_by_warps_of_their_own(name, tmp_path):
    plans = plans_of(name)
    assert isinstance(plans.prepare, KeysPlan)
    assert (plans.mix is None) == (name in ("gla", "ahead"))
    hold(plans.state, tmp_path)


@pytest.mark.parametrize("name", ["kda", "gla"])
def test_segments(name, tmp_path):
    found = {s.plan.phase: s.plan for s in split_sources(plans_of(name))}
    hold(found["summary"], tmp_path)
    hold(found["local"], tmp_path)


def test_many_systems(tmp_path):
    plan = plans_of("kda", systems=512).state
    hold(plan, tmp_path, spills=16 * OLDER)  # 12


@pytest.mark.parametrize("value", [64, 128])
@pytest.mark.parametrize("name", [*OPS, "rwkv7", "normalised"])
def test_64_elements_have_no_reader(name, value, tmp_path):
    plan = plans_of(name, key=64, value=value, dialect=None).state
    if isinstance(plan, WarpStatePlan):
        assert not plan.reader
        hold(plan, tmp_path, spills=160 * ((name, value) == ("two_vectors", 128)))  # 144, by two
