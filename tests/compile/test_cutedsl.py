"""CuTe-DSL prefill compiled for sm_90a without a GPU, into the store and out of a bundle."""

import re
from dataclasses import replace

import pytest

from attncc.codegen.forms import Refusal
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_cutedsl import CutePlan, cute_plan
from attncc.codegen.plan_gluon import WarpChoice
from attncc.codegen.plan_softmax import plan_softmax
from attncc.codegen.printers import source
from attncc.dsl.errors import MissingArtifactError, ToolchainError
from attncc.runtime import compile as runtime_compile
from attncc.runtime import compile_cutedsl
from attncc.runtime.compile import artifact, build_artifact
from attncc.runtime.inspect import usage
from attncc.runtime.key import key_of
from attncc.runtime.loader import parameter_format
from attncc.runtime.store import Store
from tests.compile import sass
from tests.compile.test_gluon import whole
from tests.gluon_ops import CASES

pytestmark = pytest.mark.cutedsl


def plan_of(name, dim, **options):
    """The CuTe-DSL plan of a case."""
    plan, _ = whole(name, dim, dialect=Dialect.CUTEDSL, **options)
    assert isinstance(plan, CutePlan)
    return plan


def built(plan, folder):
    """Its entry in a store."""
    return build_artifact(source(plan), "sm_90", Store(folder))


def hold(entry, plan, stack=0):
    """Copies, products and barriers as they were written, and nothing serialised or spilled."""
    manifest = entry.manifest
    assert manifest.family == "sm_90a" and manifest.num_warps == 12
    assert [name for name, _ in manifest.parameters] == [p.name for p in plan.parameters]
    assert manifest.shared_bytes <= 227 * 1024 and manifest.tensor_maps == "device"
    cubin = entry.files[manifest.artifact]
    registers, spilled = usage(cubin, manifest.entry)
    assert registers == manifest.registers <= 168 and spilled <= stack
    text = sass.disassemble(cubin)
    assert "UTMALDG" in text and "USETMAXREG" in text and "SYNCS" in text
    products, waits = sass.wgmmas(text), text.count("WARPGROUP.DEPBAR")
    assert products == 2 * plan.widths_k[0] // 16 + 2 * plan.block_n // 16 and waits == 4
    found = sass.faults(text)
    assert not found and not sass.sent_twice(text), sass.report(found)


def test_causal_prefill_of_128(tmp_path):
    plan = plan_of("causal", 128)
    entry = built(plan, tmp_path)
    hold(entry, plan)
    # three tensor maps, each of which a program writes into its scratch
    assert entry.manifest.scratch_bytes == 3 * 128
    assert set(entry.manifest.versions) == {"cutedsl", "ptxas", "python"}
    assert entry.key["cutedsl"] == entry.manifest.versions["cutedsl"]
    # While the values are summed, the next weights are computed: not behind the wait for the sum.
    text = sass.disassemble(entry.files[entry.manifest.artifact])
    order = re.findall(r"DEPBAR\.LE gsb0, 0x[01]|MUFU\.EX2", text)
    under_way = order[order.index("DEPBAR.LE gsb0, 0x1") + 1 :]
    assert under_way.index("DEPBAR.LE gsb0, 0x0") >= plan.block_n // 2
    parameter_format(entry.manifest)  # every launcher here can lay out its parameters
    folders = (str(tmp_path), str(runtime_compile.__file__).rpartition("/runtime")[0])
    for folder in folders:
        assert all(folder.encode() not in content for content in entry.files.values())


def test_packed_documents_of_64(tmp_path):
    plan = plan_of("documents", 64, packed=True)
    entry = built(plan, tmp_path)
    hold(entry, plan, stack=64)  # addresses of the loading warp, a few a tile
    assert entry.manifest.scratch_bytes == 4 * 128


def test_a_choice_of_fp16_fits_too(tmp_path):
    plan, spec = whole("capped", 128, dialect=Dialect.TRITON, dtype="fp16")
    made = cute_plan(plan, spec, WarpChoice(block_n=64, stages=4, packed_rows=False))
    hold(built(made, tmp_path), made)


def test_a_bundle_serves_where_there_is_no_compiler(tmp_path, monkeypatch):
    plan = plan_of("full", 64)
    entry = built(plan, tmp_path / "bundle")
    monkeypatch.setattr("attncc.runtime.key.cutedsl_version", lambda: "none")
    monkeypatch.setattr(compile_cutedsl, "cutedsl_problem", lambda: "it is not installed")
    monkeypatch.setenv("ATTNCC_CACHE_DIR", f"{tmp_path / 'own'}:{tmp_path / 'bundle'}")
    found = artifact(source(plan), "sm_90")
    assert found.bundled and found.manifest == entry.manifest
    assert found.key != key_of(source(plan), "sm_90")
    with pytest.raises(ToolchainError, match="carry the bundle"):
        artifact(source(plan_of("causal", 64)), "sm_90")
    monkeypatch.setenv("ATTNCC_EXPECT_HIT", "1")
    with pytest.raises(MissingArtifactError):
        artifact(source(plan_of("causal", 64)), "sm_90")


def test_what_the_compiler_says_is_the_error(tmp_path, monkeypatch):
    wrong = source(plan_of("causal", 64))
    monkeypatch.setattr(wrong, "_text", wrong.text.replace("load_blocks(\n", "load_block(\n", 1))
    with pytest.raises(ToolchainError, match="does not compile") as raised:
        build_artifact(wrong, "sm_90", Store(tmp_path))
    assert re.search("load_blocks", str(raised.value))


def test_sm_100_is_refused_for_one_reason():
    spec = replace(whole("causal", 128)[1], target="sm_100", dialect=Dialect.CUTEDSL)
    program = CASES["causal"].declaration.trace()
    found = plan_softmax(program, analyse(program).softmax, spec, "prefill")
    assert isinstance(found, Refusal) and found.reason == "it is written for sm_90, not sm_100"
