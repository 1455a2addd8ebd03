"""``attncc verify`` in Triton's interpreter: the generated kernels held to the reference."""

import json
from contextvars import Context

import pytest

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl.errors import MiscompiledError
from attncc.runtime import commands, selfcheck, trial
from attncc.runtime.backends import spec_of
from attncc.runtime.key import key_of
from attncc.runtime.manifest import Manifest
from attncc.runtime.samples import Sample, sample_call
from attncc.runtime.sources import call_sources
from attncc.runtime.store import Built, current
from tests.selected_ops import picks


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path))


def test_every_kernel_of_a_call_is_right(capsys):
    arguments = [
        "attention",
        "gated_delta_rule",
        "--phase",
        "decode",
        "--sizes",
        "D=32,E=32,K=32,V=32",
    ]
    code = commands.run(["verify", *arguments, "--form", "plain,cache,paged,pool", "--json"])
    done = capsys.readouterr()
    found = json.loads(done.out)
    assert code == 0 and found["where"] == "interpreter" and "fp32 only" in done.err
    forms = {(v["op"], v["form"]) for v in found["verdicts"]}
    assert forms == {
        ("attention", "plain"), ("attention", "cache"), ("attention", "paged"),
        ("gated_delta_rule", "plain"), ("gated_delta_rule", "pool"),
    }  # fmt: skip
    for v in found["verdicts"]:
        assert v["right"] and all(r["error"] <= r["allowed"] for r in v["results"])


def test_a_kernel_that_is_wrong_is_found(capsys, monkeypatch):
    run = trial.run_kernels

    def spoiled(call, *args, **kwargs):
        run(call, *args, **kwargs)
        call.outputs["o"].view(-1)[0] *= 1.01

    monkeypatch.setattr(trial, "run_kernels", spoiled)
    code = commands.run(["verify", "gated_delta_rule", "--phase", "decode", "--form", "plain"])
    assert code == 1 and "WRONG" in capsys.readouterr().out


@pytest.fixture
def kind():
    """A step of a gated delta rule, and its kernel's entry in the store."""
    sizes = {"K": 32, "V": 32, "G": 2, "Hk": 1}
    sample = Sample(sizes, "decode", "fp32")
    call = sample_call(ac.ops.gated_delta_rule.declaration, sample)
    source, *_ = call_sources(call, "decode", "sm_90")  # others are for several tokens
    manifest = Manifest(source.entry, "sm_90", "sm_90a", versions={"triton": "3.6.0"})
    made = Built(manifest, {manifest.artifact: b"cubin"})
    entry = current().get(key_of(source, "sm_90"), source, lambda folder: made)
    like = selfcheck.KindOfCall(call, analyse(call.program), spec_of(call), "decode")
    return like, entry, source.plan


def test_a_check_before_a_first_launch_runs_the_kernels_of_the_call(kind):
    like, entry, plan = kind
    Context().run(selfcheck._check, like, entry, plan, "a GPU")
    assert selfcheck.read_record(entry, "a GPU") == {"right": True, "why": ""}


def test_such_a_check_finds_a_wrong_kernel(kind, monkeypatch):
    like, entry, plan = kind
    run = trial.run_kernels

    def spoiled(call, *args, **kwargs):
        run(call, *args, **kwargs)
        call.final_states["s"].view(-1)[-1] += 0.01

    monkeypatch.setattr(trial, "run_kernels", spoiled)
    with pytest.raises(MiscompiledError, match="s errs by"):
        Context().run(selfcheck._check, like, entry, plan, "a GPU")
    assert not entry.folder.exists()


def test_a_check_of_a_selection_picks_some_rows_and_not_others(monkeypatch):
    """A pick that is one row off is found, whatever the order of the sums was."""
    sample = Sample({"Hi": 2, "Di": 16}, "decode", "fp32")
    call = sample_call(picks.declaration, sample)
    small, spec = trial.trial_call(call, "cpu"), spec_of(call)
    [found] = trial.compare(small, spec, "decode")
    assert found.judged.right and found.judged.error == 0.0
    picked = set(small.outputs["o"][0, 0].tolist())
    assert -1 not in picked and len(picked) == 20 < small.sizes["S"]
    run = trial.run_kernels

    def spoiled(call, *args, **kwargs):
        run(call, *args, **kwargs)
        call.outputs["o"][0, 0, 3] += 1

    monkeypatch.setattr(trial, "run_kernels", spoiled)
    [found] = trial.compare(trial.trial_call(call, "cpu"), spec, "decode")
    assert not found.judged.right
