"""Self-checks: which artifacts are checked, what is recorded, and what becomes of a wrong one."""

import json
import pickle
from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl.errors import MiscompiledError
from attncc.runtime import arrivals, backends, selfcheck, trial
from attncc.runtime.backends import spec_of
from attncc.runtime.key import STORE_FORMAT
from attncc.runtime.manifest import Manifest
from attncc.runtime.recorder import marked
from attncc.runtime.samples import Sample, sample_call
from attncc.runtime.selfcheck import SelfCheckWarning, check_first, read_record, suspicion
from attncc.runtime.sources import call_sources
from attncc.runtime.store import Built, Store
from attncc.runtime.tolerance import Judged
from attncc.runtime.trial import Finding

GPU = "NVIDIA H200"
SOURCE = backends.sources(
    ac.ops.attention.declaration, sizes={"D": 64, "E": 64, "G": 1}, phase="decode"
)[0]
STEP = backends.sources(
    ac.ops.gated_delta_rule.declaration, sizes={"K": 64, "V": 64, "G": 1}, phase="decode"
)[0]
RIGHT = [Finding("o", Judged(0.1, 0.2))]
WRONG = [Finding("o", Judged(3.0, 0.2))]


def stored(place, source=SOURCE, **versions):
    """An entry that a toolchain of these versions would have built."""
    from attncc.runtime.key import key_of

    def build(folder):
        held = {"triton": "3.6.0", "ptxas": "12.8.93", "python": "3.11.7", **versions}
        manifest = Manifest(source.entry, "sm_90", "sm_90a", versions=held)
        return Built(manifest, {manifest.artifact: b"cubin"})

    return place.get(key_of(source, "sm_90"), source, build)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "root"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Store(tmp_path / "root")


@pytest.fixture
def during():
    """Inside a call that launches kernels."""
    call = sample_call(ac.ops.attention.declaration, Sample({"D": 64, "E": 64, "G": 1}, "decode"))
    with selfcheck.running(call, analyse(call.program), spec_of(call), "decode"):
        yield call


def finds(monkeypatch, *results):
    """Let trials find these things in turn; returns the seeds they ran with."""
    seeds, left = [], list(results)

    def compare(call, spec, phase, parts):
        assert phase == "decode" and call.sizes["B"] == 2
        seeds.append(parts)
        return left.pop(0)

    monkeypatch.setattr(trial, "compare", compare)
    return seeds


def test_only_what_a_toolchain_is_known_for_is_suspected(place):
    tile, step = stored(place), stored(place, STEP)
    assert "12.8.93" in suspicion(tile, SOURCE.plan)
    assert "gated kernels on Hopper" in suspicion(step, STEP.plan)
    for versions, found in [({"triton": "3.7.1"}, None), ({"triton": "3.7.0"}, "gated"),
                            ({"triton": "3.3.1"}, None)]:  # fmt: skip
        manifest = replace(step.manifest, versions={**step.manifest.versions, **versions})
        said = suspicion(replace(step, manifest=manifest), STEP.plan)
        assert (said is None) == (found is None)
    other = replace(step.manifest, family="sm_100a")
    assert suspicion(replace(step, manifest=other), STEP.plan) is None
    newer = replace(tile.manifest, versions={"triton": "3.9.0", "ptxas": "13.1.80"})
    assert suspicion(replace(tile, manifest=newer), SOURCE.plan) is None


def test_tiles_of_a_selection_are_suspected_and_whole_numbers_are_not(place):
    sizes = {"Hi": 4, "Di": 64, "H": 16, "R": 64, "P": 16}
    found = backends.sources(ac.ops.sparse_mla.declaration, sizes=sizes, phase="decode")
    suspected = {s.plan.phase for s in found if suspicion(stored(place, s), s.plan)}
    assert suspected == {"decode_score", "decode_picked", "decode_picked_split"}
    others = {"count", "pick", "sort", "merge", "merge_2"}
    assert {s.plan.phase for s in found} - suspected == others
    entry = stored(place, found[0])
    newer = replace(entry.manifest, versions={"triton": "3.9.0", "ptxas": "13.1.80"})
    assert suspicion(replace(entry, manifest=newer), found[0].plan) is None


def test_an_artifact_is_checked_once_and_the_result_stays(place, during, monkeypatch):
    entry, seeds = stored(place), finds(monkeypatch, RIGHT)
    check_first(entry, SOURCE.plan, 0)
    assert seeds == [None]
    path = entry.folder / "verified.nvidia-h200.json"
    held = json.loads(path.read_text())
    assert held["right"] and held["gpu"] == GPU and held["versions"]["ptxas"] == "12.8.93"
    check_first(entry, SOURCE.plan, 0)  # compare has nothing left to say
    assert place.find(entry.key) is not None  # the record is no part of the entry
    other = replace(entry.manifest, files={**entry.manifest.files, "kernel.sm_90.cubin": "0"})
    assert read_record(replace(entry, manifest=other), GPU) is None  # of another artifact
    path.write_text("{")
    assert read_record(entry, GPU) is None


def test_a_wrong_kernel_is_set_aside_and_named(place, during, monkeypatch):
    entry, waits = stored(place), arrivals.arrivals(4, torch.device("cpu"))

    def compare(*args):
        counters = arrivals.arrivals(4, torch.device("cpu"))
        assert counters.data_ptr() != waits.data_ptr()  # those of the call that is checked first
        counters.fill_(3)  # as a kernel that counts wrong may leave them
        return WRONG

    monkeypatch.setattr(trial, "compare", compare)
    with pytest.raises(MiscompiledError) as caught:
        check_first(entry, SOURCE.plan, 0)
    assert not arrivals.arrivals(4, torch.device("cpu")).any()
    error = caught.value
    assert error.op == "attention" and error.kernels == (SOURCE.entry,)
    assert error.plans == (SOURCE.plan.chosen,) and error.versions["ptxas"] == "12.8.93"
    for part in ("o errs by 3.00e+00, allowed 2.00e-01", "triton 3.6.0", "plan: rule"):
        assert part in str(error)
    assert pickle.loads(pickle.dumps(error)).versions == error.versions
    assert not entry.folder.exists() and place.find(entry.key) is None
    assert len(list(place.base.glob(".bad-*"))) == 1


def test_every_kernel_of_a_wrong_call_is_set_aside(place, during, monkeypatch):
    call = during
    sources = call_sources(call, "decode", spec=backends.spec_of(call))
    entries = [stored(place, s) for s in sources]
    finds(monkeypatch, WRONG, WRONG)
    with pytest.raises(MiscompiledError) as caught:
        check_first(entries[0], sources[0].plan, 0)
    assert set(caught.value.kernels) == {s.entry for s in sources} and len(sources) > 1
    assert not any(e.folder.exists() for e in entries)


def test_one_draw_at_the_edge_is_no_finding(place, during, monkeypatch):
    entry = stored(place)
    finds(monkeypatch, WRONG, RIGHT)
    check_first(entry, SOURCE.plan, 0)
    assert read_record(entry, GPU)["right"]


def test_a_bundles_entry_is_recorded_in_the_store_that_is_written(
    place, during, tmp_path, monkeypatch
):
    stored(Store(tmp_path / "bundle"))
    before = sorted(p.name for p in (tmp_path / "bundle").rglob("*"))
    roots = f"{place.root}:{tmp_path / 'bundle'}"
    monkeypatch.setenv("ATTNCC_CACHE_DIR", roots)
    found = Store(place.root, (tmp_path / "bundle",)).find(stored(place).key)
    entry = replace(
        found, folder=tmp_path / "bundle" / STORE_FORMAT / found.folder.name, bundled=True
    )
    finds(monkeypatch, WRONG, WRONG)
    with pytest.raises(MiscompiledError):
        check_first(entry, SOURCE.plan, 0)
    assert sorted(p.name for p in (tmp_path / "bundle").rglob("*")) == before
    kept = place.base / ".verified" / entry.folder.name / "verified.nvidia-h200.json"
    assert json.loads(kept.read_text())["right"] is False
    with pytest.raises(MiscompiledError, match="errs by"):  # the next process runs no trial
        check_first(entry, SOURCE.plan, 0)


def test_nothing_is_checked_during_capture_or_outside_a_call(place, monkeypatch):
    entry = stored(place)
    finds(monkeypatch)
    check_first(entry, SOURCE.plan, 0)
    call = sample_call(ac.ops.attention.declaration, Sample({"D": 64, "E": 64, "G": 1}, "decode"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with selfcheck.running(call, analyse(call.program), spec_of(call), "decode"):
        check_first(entry, SOURCE.plan, 0)
    assert read_record(entry, GPU) is None


def test_kernels_that_a_check_loads_are_part_of_it(place, during, monkeypatch):
    entry, merge = stored(place), backends.sources(
        ac.ops.attention.declaration, sizes={"D": 64, "E": 64, "G": 1}, phase="decode"
    )[-1]  # fmt: skip
    other = stored(place, merge)

    def compare(call, spec, phase, parts):
        check_first(other, merge.plan, 0)
        return RIGHT

    monkeypatch.setattr(trial, "compare", compare)
    check_first(entry, SOURCE.plan, 0)
    assert read_record(entry, GPU)["right"] and read_record(other, GPU)["right"]


def test_what_cannot_be_checked_is_a_warning(place, during, monkeypatch):
    def compare(*args):
        arrivals.arrivals(4, torch.device("cpu")).fill_(3)
        raise RuntimeError("no such operator")

    monkeypatch.setattr(trial, "compare", compare)
    entry = stored(place)
    with pytest.warns(SelfCheckWarning, match="was not checked: RuntimeError: no such"):
        check_first(entry, SOURCE.plan, 0)
    assert not arrivals.arrivals(4, torch.device("cpu")).any()
    assert read_record(entry, GPU) is None


def test_a_record_that_cannot_be_written_is_a_warning(place, during, monkeypatch):
    entry = stored(place)
    finds(monkeypatch, RIGHT)

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(selfcheck, "write_file", full)
    with pytest.warns(SelfCheckWarning, match="No space left"):
        check_first(entry, SOURCE.plan, 0)
    assert not list(entry.folder.glob("*verified*"))


def test_a_call_that_is_being_recorded_is_checked_as_any_other():
    """The host must not compute with a recorded call's numbers; a trial has its own."""
    call = sample_call(ac.ops.attention.declaration, Sample({"D": 64, "E": 64, "G": 1}, "decode"))
    like = replace(call, scalars={"scale": marked(0.5, 0), "window": marked(3, 1)})
    scalars = trial.trial_call(like, "cpu").scalars
    assert scalars == {"scale": 0.5, "window": 3}
    assert [type(n) for n in scalars.values()] == [float, int]
