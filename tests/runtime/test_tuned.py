"""The caller's own tables of plans: written, read, damaged, carried in bundles."""

import json
import os

import pytest

import attncc as ac
from attncc.codegen.plan_table import RULE, Family, Measured, TableEntry, Time
from attncc.runtime import tuned
from attncc.runtime.backends import sources
from attncc.runtime.tuned import PlanTableWarning, copy_tables, local_table, write_entries

SIZES = {"D": 64, "E": 64, "G": 4}
FACTS = (("dots", "64"), ("dtype", "bf16"), ("phase", "decode"))
MEASURED = Measured("a GPU", (("triton", "3.6.0"),), "0", "events", (Time("work", 1.0),))


def entry(name, block_n=32, facts=FACTS):
    sizes = (("keys", 4096, 4096.0),)
    return TableEntry(name, Family.SOFTMAX, facts, sizes, (("block_n", block_n),), MEASURED)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "own"))
    tuned._tables.cache_clear()
    yield tmp_path / "own"
    tuned._tables.cache_clear()


def plan():
    return sources(ac.ops.attention.declaration, sizes=SIZES, phase="decode")[0].plan


def test_a_written_entry_decides_the_next_plan(root):
    before = plan()
    assert before.chosen == RULE and local_table("sm_90") is None
    path = write_entries(root / tuned.FOLDER, "sm_90", (entry("mine"),))
    assert path == root / "plans" / "sm_90.json"
    after = plan()
    assert (after.chosen, after.block_n) == ("mine", 32) and after.kernel != before.kernel
    assert "chosen by entry mine" in ac.ops.attention.explain(sizes=SIZES, phase="decode")
    assert local_table("sm_100") is None


def test_an_entry_replaces_what_matches_the_same(root):
    folder = root / tuned.FOLDER
    write_entries(folder, "sm_90", (entry("old"), entry("other", facts=FACTS[:1])))
    write_entries(folder, "sm_90", (entry("new", 128),))
    assert [e.id for e in local_table("sm_90").entries] == ["new", "other"]
    assert os.listdir(folder) == ["sm_90.json"]


def test_a_damaged_table_is_a_warning_and_is_not_overwritten(root):
    folder = root / tuned.FOLDER
    path = write_entries(folder, "sm_90", (entry("mine"),))
    path.write_text(path.read_text()[:-20])
    tuned._tables.cache_clear()
    with pytest.warns(PlanTableWarning, match="not used"):
        assert plan().chosen == RULE
    with pytest.raises(ValueError, match="no table"):
        write_entries(folder, "sm_90", (entry("new"),))


def test_a_table_everybody_may_write_is_not_used(root):
    folder = root / tuned.FOLDER
    write_entries(folder, "sm_90", (entry("mine"),))
    folder.chmod(0o777)
    tuned._tables.cache_clear()
    with pytest.warns(PlanTableWarning, match="everybody may write"):
        assert local_table("sm_90") is None


def test_a_write_that_fails_leaves_the_old_table(root, monkeypatch):
    folder = root / tuned.FOLDER
    path = write_entries(folder, "sm_90", (entry("mine"),))
    before = path.read_text()

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuned, "write_file", full)
    with pytest.raises(OSError, match="No space"):
        write_entries(folder, "sm_90", (entry("new"),))
    assert path.read_text() == before and os.listdir(folder) == ["sm_90.json"]


def test_a_bundle_carries_the_tables_that_decided_its_plans(root, tmp_path, monkeypatch):
    write_entries(root / tuned.FOLDER, "sm_90", (entry("mine"),))
    bundle = tmp_path / "bundle"
    assert copy_tables(bundle, ("sm_90", "sm_100")) == [bundle / "plans" / "sm_90.json"]
    monkeypatch.setenv("ATTNCC_CACHE_DIR", os.pathsep.join([str(tmp_path / "else"), str(bundle)]))
    assert plan().chosen == "mine"
    write_entries(tmp_path / "else" / tuned.FOLDER, "sm_90", (entry("mine", 128),))
    assert plan().block_n == 128  # the writable folder's comes first


def test_an_entry_is_shown_as_the_file_has_it(root):
    path = write_entries(root / tuned.FOLDER, "sm_90", (entry("mine"),))
    assert json.loads(path.read_text())["entries"] == [tuned.as_dict(entry("mine"))]
