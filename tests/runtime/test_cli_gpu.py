"""``attncc tune`` and ``attncc verify``: what they do without a GPU, and what they write."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attncc as ac
from attncc.codegen.plan_gathered import GatherPlan
from attncc.codegen.plan_selected import ScorePlan
from attncc.codegen.plan_table import RULE, Family
from attncc.runtime import commands, commands_gpu, tune, tune_report, tuned, verify
from attncc.runtime.backends import sources
from attncc.runtime.bundle import Request
from attncc.runtime.candidates import candidates, rule_of
from attncc.runtime.samples import Sample, sample_call
from attncc.runtime.sources import call_sources
from attncc.runtime.tolerance import Judged
from attncc.runtime.trial import Finding
from attncc.runtime.tuned import write_entries

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"D": 64, "E": 64, "G": 4, "B": 8, "S": 4096}
GIVEN = ["attention", "--sizes", "D=64,E=64,G=4,B=8,S=4096", "--phase", "decode"]


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.delenv("ATTNCC_EXPECT_HIT", raising=False)
    tuned._tables.cache_clear()
    yield tmp_path / "store"
    tuned._tables.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch):
    for module in (commands_gpu, verify):
        monkeypatch.setattr(module, "has_gpu", lambda: False)


@pytest.fixture
def h200(monkeypatch):
    """A GPU as far as the command is concerned; what would run on it is made up by the test."""
    monkeypatch.setattr(commands_gpu, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def two(monkeypatch):
    """Two candidates instead of dozens."""

    def some(family, plans, target):
        found = list(candidates(family, plans, target))
        return [found[0], next(c for c in found if c["block_n"] != found[0]["block_n"])]

    monkeypatch.setattr(tune, "candidates", some)


def ran(capsys, *arguments):
    """Exit code, standard output and standard error of the command."""
    code = commands.run([str(a) for a in arguments])
    done = capsys.readouterr()
    return code, done.out, done.err


def test_without_a_gpu_tuning_says_so(capsys, no_gpu, own_store):
    code, out, err = ran(capsys, "tune", *GIVEN, "--target", "sm_90")
    assert (code, out) == (3, "") and "needs such a GPU, there is none here" in err
    assert not own_store.exists()


def test_a_gpu_of_another_kind_is_none(capsys, h200):
    code, _, err = ran(capsys, "tune", *GIVEN, "--target", "sm_100")
    assert code == 3 and "this one is sm_90" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tune", "attention", "--sizes", "D=64", "--dry-run"], "axis E G"),
        (["tune", *GIVEN, "--phase", "train", "--dry-run"], "no phase"),
        (["tune", *GIVEN, "--form", "pool", "--dry-run"], "can be called so"),
        (["tune", *GIVEN, "--dtype", "bf16,fp16", "--dry-run"], "one dtype at a time"),
        (["verify", "nothing"], "the library has"),
    ],
)
def test_wrong_usage_is_2(capsys, no_gpu, arguments, says, monkeypatch):
    monkeypatch.setattr(verify, "choose_device", lambda: torch.device("cpu"))
    code, out, err = ran(capsys, *arguments)
    assert code == 2 and out == "" and says in err


def test_a_dry_run_lists_candidates_with_what_they_need(capsys, no_gpu, two, own_store):
    arguments = ["tune", *GIVEN, "--target", "sm_90", "--dry-run", "--jobs", "1"]
    code, out, err = ran(capsys, *arguments, "--json")
    found = json.loads(out)
    assert code == 0 and found["entry"] is found["table"] is None
    assert found["match"]["dtype"] == "bf16" and found["sizes"]["keys"] == 4096
    assert len(found["candidates"]) == 2
    for c in found["candidates"]:
        assert c["problem"] is None and c["ms"] is None
        assert c["registers"] > 0 and c["shared_bytes"] > 0 and c["spill_bytes"] is not None
    names = {k for c in found["candidates"] for k in c["kernels"]}
    assert len(err.splitlines()) == len(names)
    code, out, _ = ran(capsys, *arguments)
    assert code == 0 and "compiled" in out and "block_n=" in out
    assert not (own_store / "plans").exists()


def timed(ms):
    """A measurement that says so much of each candidate; None is a wrong answer."""

    def measure(work, device, done):
        new = []
        for c, t in zip(work.candidates, ms, strict=True):
            new.append(replace(c, ms=t, problem=None if t else "wrong answer: o"))
            done(new[-1])
        return replace(work, candidates=tuple(new))

    return measure


def plan():
    declaration = ac.ops.attention.declaration
    return sources(declaration, sizes=SIZES, phase="decode")[0].plan


def test_the_winner_goes_into_the_stores_table_and_decides(
    capsys, h200, two, own_store, monkeypatch
):
    monkeypatch.setattr(tune, "measure", timed([2.0, 1.0]))
    before = plan()
    code, out, _ = ran(capsys, "tune", *GIVEN, "--jobs", "1", "--json")
    found = json.loads(out)
    assert code == 0 and found["table"] == str(own_store / "plans" / "sm_90.json")
    entry = found["entry"]
    assert entry["choose"] == found["candidates"][1]["choices"]
    [time] = entry["measured"]["times"]
    assert time["ms"] == 1.0 and list(time["tried"].values()) == [2.0]
    assert entry["measured"]["gpu"] == "NVIDIA H200" and entry["sizes"]["keys"] == [4096, 4096]
    after = plan()
    assert before.chosen == RULE and after.chosen == entry["id"]
    assert after.kernel in found["candidates"][1]["kernels"]  # compiled while it was tuned


def test_a_wrong_answer_never_wins(capsys, h200, two, own_store, monkeypatch):
    monkeypatch.setattr(tune, "measure", timed([2.0, None]))
    code, out, _ = ran(capsys, "tune", *GIVEN, "--jobs", "1", "--json")
    found = json.loads(out)
    assert code == 0 and found["entry"]["choose"] == found["candidates"][0]["choices"]
    monkeypatch.setattr(tune, "measure", timed([None, None]))
    code, out, _ = ran(capsys, "tune", *GIVEN, "--jobs", "1")
    assert code == 1 and out.count("wrong answer") == 2


def test_a_result_can_go_into_the_packages_table(capsys, h200, two, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "measure", timed([2.0, 1.0]))
    folder = tmp_path / "package" / "codegen" / "plans"
    monkeypatch.setattr(tuned, "PLANS", folder)
    code, _, err = ran(capsys, "tune", *GIVEN, "--jobs", "1", "--write-table")
    assert code == 1 and "use a checkout" in err
    folder.mkdir(parents=True)
    (tmp_path / "package" / "pyproject.toml").write_text("")
    code, out, _ = ran(capsys, "tune", *GIVEN, "--jobs", "1", "--write-table")
    assert code == 0 and str(folder / "sm_90.json") in out and (folder / "sm_90.json").exists()


def test_candidates_start_with_todays_choice_and_fit_the_target():
    for op, sizes, phase in [
        (ac.ops.attention, {"D": 128, "E": 128, "G": 4}, "prefill"),
        (ac.ops.gated_delta_rule, {"K": 128, "V": 128, "G": 2, "B": 1}, "prefill"),
    ]:
        work = tune.plan_tuning(op.declaration, Sample(sizes, phase), "sm_90")
        plans = [s.plan for s in work.candidates[0].sources]
        assert dict(work.candidates[0].choices) == rule_of(work.wanted.family, plans)
        assert len({c.choices for c in work.candidates}) == len(work.candidates) > 10
        for c in work.candidates:  # what a plan cannot take as it is would be measured as another
            assert rule_of(work.wanted.family, [s.plan for s in c.sources]) == dict(c.choices)
        names = {c.sources[0].plan.chosen for c in work.candidates} - {RULE}
        assert all(name.startswith(work.wanted.family.value) for name in names)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("family", "kernel"), [(Family.PICKED, GatherPlan), (Family.SCORES, ScorePlan)]
)
def test_both_stages_of_a_selection_have_choices_of_their_own(family, kernel, phase):
    sizes = {"Hi": 64, "Di": 128, "H": 128, "R": 512, "P": 64}
    op = ac.ops.sparse_mla.declaration
    work = tune.plan_tuning(op, Sample(sizes, phase), "sm_90", family)
    assert work.wanted.family is family and len(work.candidates) > 5
    assert tune.plan_tuning(op, Sample(sizes, phase), "sm_90").wanted.family is Family.PICKED
    kernels = {}
    for c in work.candidates:
        plans = [s.plan for s in c.sources]
        assert rule_of(family, plans) == dict(c.choices)
        own = {s.entry for s in c.sources if isinstance(s.plan, kernel)}
        assert all(s.text for s in c.sources if isinstance(s.plan, kernel))
        kernels[c.choices] = frozenset(own)
    assert len(set(kernels.values())) == len(kernels)  # a choice is part of a kernel
    others = {frozenset(s.entry for s in c.sources if not isinstance(s.plan, kernel))
              for c in work.candidates}  # fmt: skip
    assert len(others) == 1


def test_an_entry_decides_a_selections_kernels(own_store):
    sizes = {"Hi": 4, "Di": 64, "H": 16, "R": 64, "P": 16}
    op, sample = ac.ops.sparse_mla.declaration, Sample(sizes, "decode")
    work = tune.plan_tuning(op, sample, "sm_90", Family.PICKED)
    best = replace(work.candidates[-1], ms=1.0)
    entry = tune_report.entry_of(replace(work, candidates=(best,)), "a GPU")
    write_entries(own_store / tuned.FOLDER, "sm_90", (entry,))
    found = {s.plan.phase: s.plan for s in call_sources(sample_call(op, sample), "decode", "sm_90")}
    assert found["decode_picked"].chosen == found["decode_picked_split"].chosen == entry.id
    assert found["decode_score"].chosen == RULE
    assert rule_of(Family.PICKED, list(found.values())) == dict(best.choices)


def test_a_family_that_a_call_has_not_is_named(capsys, own_store):
    code, _, err = ran(capsys, "tune", *GIVEN, "--family", "selected_fold", "--dry-run")
    assert code != 0 and "no such choices" in err and "expected softmax" in err.replace(":", "")
    code, _, err = ran(capsys, "tune", *GIVEN, "--family", "tiles", "--dry-run")
    assert code == 2 and "no family tiles: softmax, affine, selected_fold" in err


def test_what_spills_more_than_today_is_out(own_store, monkeypatch):
    work = tune.plan_tuning(ac.ops.attention.declaration, Sample(SIZES, "decode"), "sm_90")
    work = replace(work, candidates=work.candidates[:3])
    spills = {work.candidates[0].sources[0].entry: 8, work.candidates[1].sources[0].entry: 16}

    def compiled(given):
        _, source, _ = given
        if source.entry == work.candidates[2].sources[0].entry:
            raise RuntimeError("no such instruction\nmore")
        return 128, spills.get(source.entry, 0), 1024

    monkeypatch.setattr(tune, "_compile", compiled)
    found = tune.compile_all(work, own_store, 1)
    assert [c.problem for c in found.candidates] == [
        None, "spills 16 bytes", "RuntimeError: no such instruction",
    ]  # fmt: skip


def judged(error):
    return lambda call, spec, phase, parts=None: [Finding("o", Judged(error, 0.5))]


def test_verify_tells_right_from_wrong_by_kernel(capsys, no_gpu, monkeypatch):
    monkeypatch.setattr(verify, "choose_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(verify, "compare", judged(0.25))
    arguments = ["verify", "attention", "--phase", "decode", "--json"]
    code, out, err = ran(capsys, *arguments)
    found = json.loads(out)
    assert code == 0 and found["where"] == "interpreter" and "no GPU" in err
    assert {v["form"] for v in found["verdicts"]} == {"plain", "cache"}
    for v in found["verdicts"]:
        assert v["right"] and v["dtype"] == "fp32" and v["results"][0]["allowed"] == 0.5
        assert all(k.startswith("attention__") for k in v["kernels"])
    monkeypatch.setattr(verify, "compare", judged(0.75))
    assert ran(capsys, *arguments)[0] == 1
    code, out, _ = ran(capsys, *arguments[:-1])
    assert code == 1 and out.count("WRONG") == len(found["verdicts"])


def test_what_the_interpreter_cannot_run_needs_a_gpu(capsys, no_gpu, monkeypatch):
    monkeypatch.setattr(verify, "choose_device", lambda: torch.device("cpu"))

    def broken(*args, **kwargs):
        raise AttributeError("'int' object has no attribute 'to'")

    monkeypatch.setattr(verify, "compare", broken)
    code, out, _ = ran(capsys, "verify", "attention", "--phase", "decode")
    assert code == 3 and "not run: AttributeError" in out
    code, out, err = ran(capsys, "verify", "attention", "--dtype", "bf16")
    assert (code, out) == (3, "") and "need a GPU" in err


def test_a_process_that_compiles_cannot_interpret(no_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", sys)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ac.AttnccError, match="TRITON_INTERPRET=1"):
        verify.choose_device()


def test_verify_runs_kernels_in_the_interpreter_by_itself():
    path = os.pathsep.join([str(ROOT / ".pkg"), os.environ.get("PYTHONPATH", "")])
    if torch.cuda.is_available():
        pytest.skip("it would run on the GPU, which tests/gpu shows")
    done = subprocess.run(
        [sys.executable, "-m", "attncc.runtime.cli", "verify", "gated_delta_rule", "--phase",
         "decode", "--form", "plain,pool", "--json"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "in Triton's interpreter" in done.stderr and found["where"] == "interpreter"
    assert {v["form"] for v in found["verdicts"]} == {"plain", "pool"}
    for v in found["verdicts"]:
        assert {r["output"] for r in v["results"]} == {"o", "s"}
        assert all(0 < r["error"] <= r["allowed"] for r in v["results"])


def test_finalists_are_ranked_by_one_clock():
    work = tune.plan_tuning(ac.ops.attention.declaration, Sample(SIZES, "decode"), "sm_90")
    a, b, c, d = work.candidates[:4]
    timed = (
        replace(a, ms=0.4, graph_ms=0.3), replace(b, ms=0.5, graph_ms=0.2), replace(c, ms=0.1),
        replace(d, ms=0.01, problem="wrong answer: o"),
    )  # fmt: skip
    work = replace(work, candidates=timed)
    assert [ms for ms, _ in tune.ranked(work)] == [0.2, 0.3]
    [time] = tune_report.entry_of(work, "a GPU").measured.times
    assert time.ms == 0.2 and [ms for _, ms in time.tried] == [0.3]
    events = replace(work, candidates=tuple(replace(x, graph_ms=None) for x in timed))
    assert [ms for ms, _ in tune.ranked(events)] == [0.1, 0.4, 0.5]


def test_verify_runs_the_kernels_whose_results_it_records(monkeypatch):
    """Those of a GPU, launched in a chain; the call that it starts from has tensors on the CPU."""
    ran, recorded = [], []

    def compare(call, spec, phase, parts=None):
        ran.append([s.entry for s in call_sources(call, phase, spec=spec)])
        return [Finding("o", Judged(0.0, 1.0))]

    monkeypatch.setattr(verify, "compare", compare)
    monkeypatch.setattr(verify, "trial_call", lambda call, device, seed=0: call)
    monkeypatch.setattr(verify, "target_for", lambda device: "sm_90")
    monkeypatch.setattr(verify, "_record", lambda sources, device, found: recorded.extend(sources))
    request = Request(sizes=[SIZES], phases=("decode",), forms=[frozenset()])
    verdicts = verify.verify(
        [ac.ops.attention.declaration], request, torch.device("cuda"), lambda verdict: None
    )
    assert verdicts and all(v.right for v in verdicts)
    assert {names for v in verdicts for names in v.kernels} == {n for names in ran for n in names}
    assert recorded and all(s.plan.chained for s in recorded)
