"""The state pass in CuTe-DSL compiled for sm_90a without a GPU: wgmma, registers, barriers."""

from dataclasses import replace

import pytest

from attncc.codegen.emit.cutedsl_state import cute_state_code
from attncc.codegen.emit.scan_sources import choose_plans
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_affine import Part
from attncc.codegen.plan_cutedsl_state import CuteStatePlan
from attncc.codegen.printers import source
from attncc.dsl.errors import RefusedError
from attncc.runtime.compile import build_artifact
from attncc.runtime.inspect import usage
from attncc.runtime.store import Store
from tests.compile import sass
from tests.compile.test_gluon_affine import spec_of
from tests.state_pass_ops import OPS

pytestmark = pytest.mark.cutedsl


def plans_of(name, key=128, value=128, rows=2, target="sm_90", **options):
    """The plans of a call in CuTe-DSL."""
    sizes = {"N": rows} if name == "two_rows" else {}
    program = OPS[name].declaration.trace(None, sizes)
    spec = spec_of(program, key, value, **options)
    static = tuple((a, rows if a == "N" else n) for a, n in spec.static)
    spec = replace(spec, static=static, dialect=Dialect.CUTEDSL, target=target)
    return choose_plans(program, analyse(program), spec, chunked=True)


def hold(plan, folder):
    """Products and copies as they were written, and nothing serialised or spilled."""
    assert isinstance(plan, CuteStatePlan)
    entry = build_artifact(source(plan), "sm_90", Store(folder))
    manifest = entry.manifest
    assert manifest.family == "sm_90a" and manifest.num_warps == 4 * (plan.consumers + 1)
    assert [name for name, _ in manifest.parameters] == [p.name for p in plan.parameters]
    assert manifest.shared_bytes <= 227 * 1024 and manifest.tensor_maps == "device"
    cubin = entry.files[manifest.artifact]
    registers, stack = usage(cubin, manifest.entry)
    assert registers == manifest.registers <= (168 if plan.consumers > 1 else 255)
    assert stack == 0
    text = sass.disassemble(cubin)
    assert ("USETMAXREG" in text) == (plan.consumers > 1)
    assert "UTMALDG" in text and "UBLKCP" in text and "SYNCS" in text
    height = plan.axis(plan.form.active[0]).block
    shown = plan.part is not Part.SUMMARY
    warps = 4 * plan.consumers * shown  # each has a map of its own for what it stores
    assert manifest.scratch_bytes == 128 * (len(cute_state_code(plan).maps) + warps)
    reads = len(plan.form.reads) * shown
    # Reads of the state, the inverse, what rows add to read-outs, and the state's own product.
    assert sass.wgmmas(text) == (plan.solve + reads) * (height + 64) // 16 + 64 // 16
    assert ("UTMASTG" in text) == shown
    # A fence before each product, and the waits, as they were written: a serialised product has
    # its own fence, and what touches registers of one that is under way a wait in front.
    assert text.count("WARPGROUP.ARRIVE") == 2 * plan.solve + 2 * reads + 1
    assert text.count("WARPGROUP.DEPBAR") == 2 * plan.solve + reads + 1 + (reads > 0)
    found = sass.faults(text)
    assert not found and not sass.sent_twice(text), sass.report(found)


@pytest.mark.parametrize(("name", "rows"), [
    ("delta", 1), ("two_rows", 2), ("two_rows", 3), ("two_rows", 4), ("two_rows", 5),
    ("gated_output", 1),
])  # fmt: skip
def test_nothing_is_serialised_or_spilled(name, rows, tmp_path):
    hold(plans_of(name, rows=rows).state, tmp_path)


def test_many_systems_share_what_two_warpgroups_load(tmp_path):
    plan = plans_of("delta", systems=512, dtype="fp16").state
    assert plan.consumers == 2 and plan.num_stages == 3
    hold(plan, tmp_path)


@pytest.mark.parametrize("name", ["delta", "linear"])
def test_segments(name, tmp_path):
    split = plans_of(name, 64, 128, packed=False).split
    hold(split.summary, tmp_path)
    hold(split.local, tmp_path)


def test_pools(tmp_path):
    hold(plans_of("delta", pooled=True).state, tmp_path)


def test_sm_100_is_refused_for_one_reason():
    with pytest.raises(RefusedError, match="it is written for sm_90, not sm_100"):
        plans_of("delta", target="sm_100")
