"""The command line: what it prints, its exit codes, and the bundles it builds."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import attncc as ac
from attncc.runtime import cli, commands
from attncc.runtime.bundle import Request, Work, build_bundle, plan_bundle
from attncc.runtime.compile import build_artifact
from attncc.runtime.samples import Sample, Trait, sample_call
from attncc.runtime.sources import call_sources, long_sources
from attncc.runtime.store import Store

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--sizes", "D=64,E=64,G=1"]


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.delenv("ATTNCC_EXPECT_HIT", raising=False)
    return tmp_path / "store"


def ran(capsys, *arguments):
    """Exit code, standard output and standard error of the command."""
    code = commands.run([str(a) for a in arguments])
    done = capsys.readouterr()
    return code, done.out, done.err


def child(code, **env):
    """A fresh Python that runs some code with the package importable."""
    path = os.pathsep.join([str(ROOT / ".pkg"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, **env},
    )  # fmt: skip


def test_show_prints_the_program(capsys):
    code, out, err = ran(capsys, "show", "attention")
    assert (code, out.rstrip(), err) == (0, ac.ops.attention.text().rstrip(), "")
    code, out, _ = ran(capsys, "show", "attention", "--json")
    assert code == 0 and json.loads(out)["program"] == ac.ops.attention.text()


def test_show_prints_the_kernels(capsys):
    sizes = {"G": 2, "K": 64, "V": 64}
    want = ac.ops.gated_delta_rule.source(sizes=sizes, phase="decode")
    given = ["gated_delta_rule", "--source", "--sizes", "G=2,K=64,V=64", "--phase", "decode"]
    code, out, err = ran(capsys, "show", *given)
    assert (code, err) == (0, "") and all(text in out for text in want.values())
    code, out, _ = ran(capsys, "show", *given, "--json")
    assert code == 0 and json.loads(out)["kernels"] == want
    code, out, err = ran(capsys, "show", "attention", "--source")  # of no sizes there are none
    assert (code, out) == (1, "") and "size" in err


def test_show_draws_into_a_document_too(capsys):
    code, out, _ = ran(capsys, "show", "gdn_layer", "--graph", "svg", "--json")
    assert code == 0 and json.loads(out)["graph"].startswith("<svg")


def test_an_op_of_the_users_own_module(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_ops_for_cli.py").write_text(
        "import attncc as ac\n\nprint('imported')\n\n\n"
        "@ac.op(out='B T H D')\n"
        "def mean(x=ac.Activation('B T H D'), k=ac.Cache('B S H D')):\n"
        "    return ac.dot(ac.softmax(ac.dot(x, k, 'D'), 'S', where=ac.causal), k, 'S')\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = ran(capsys, "show", "my_ops_for_cli:mean")
    assert code == 0 and out.startswith("op mean") and err == "imported\n"
    assert ran(capsys, "show", "my_ops_for_cli:ac")[0] == 2
    assert ran(capsys, "show", "my_ops_for_cli:none")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "nothing"], "the library has alibi, attention"),
        (["show"], "Missing argument"),
        (["nothing"], "No such command"),
        (["explain", "attention", "--sizes", "D:64"], "a size is AXIS=NUMBER"),
        (["explain", "attention", *SIZES, "--dtype", "fp8"], "no dtype 'fp8'"),
        (["build", "attention", *SIZES, "--phase", "train", "-o", "x"], "no phase 'train'"),
        (["build", "attention", *SIZES, "--form", "plain+odd", "-o", "x"], "no form"),
        (["build", "attention", *SIZES, "--form", "pool", "-o", "x"], "can be called so"),
        (["build", "attention", "--sizes", "D=64", "-o", "x"], "axis E G"),
        (["build", "attention", "--sizes", "Q=64", "-o", "x"], "no such axis|such an axis"),
        (["build", "attention", *SIZES], "Missing option"),
        (["build", "attention", *SIZES, "--without", "q", "-o", "x"], "not an optional input"),
    ],
)
def test_wrong_usage_is_2_and_one_message(capsys, arguments, says):
    code, out, err = ran(capsys, *arguments)
    assert code == 2 and out == "" and re.search(says, err) and "Traceback" not in err


def test_a_target_that_is_none_is_a_failure(capsys, tmp_path):
    code, _, err = ran(
        capsys, "build", "attention", *SIZES, "--target", "hopper", "-o", tmp_path / "b"
    )
    assert code == 1 and "no such target" in err


def test_explain_tells_kernels_and_says_so_where_there_are_none(capsys, monkeypatch):
    code, out, _ = ran(capsys, "explain", "attention")
    assert code == 0 and "softmax-weighted sum" in out and "kernels" not in out
    arguments = ["gated_delta_rule", "--sizes", "K=64,V=64,G=1", "--phase", "decode", "--json"]
    code, out, _ = ran(capsys, "explain", *arguments)
    found = json.loads(out)
    assert code == 0 and found["kernels"][0].startswith("gated_delta_rule__step__")
    assert found["chosen"] == dict.fromkeys(found["kernels"], "rule")
    monkeypatch.chdir(ROOT)
    code, out, _ = ran(capsys, "explain", "attention", "--sizes", "D=64,E=64,G=1")
    assert code == 0 and "attention__prefill__" in out


def test_where_the_extra_is_missing_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main() == 2
    err = capsys.readouterr().err
    assert "attncc[cli]" in err and len(err.splitlines()) == 1


def test_the_package_needs_neither_typer_nor_rich():
    code = "import sys, attncc; sys.exit(bool({'typer', 'rich', 'triton'} & set(sys.modules)))"
    done = child(code)
    assert done.returncode == 0, done.stderr


def test_cache_commands_look_after_the_store(capsys, own_store):
    call = sample_call(ac.ops.attention.declaration, Sample({"D": 64, "E": 64, "G": 1}, "decode"))
    entry = build_artifact(call_sources(call, "decode", "sm_90")[-1], "sm_90", Store(own_store))
    assert ran(capsys, "cache", "path") == (0, f"{own_store}\n", "")
    code, out, _ = ran(capsys, "cache", "ls", "--json")
    (held,) = json.loads(out)
    assert code == 0 and held["name"] == entry.folder.name and held["current"]
    assert json.loads(ran(capsys, "cache", "sweep", "--json")[1]) == {"removed": []}
    (entry.folder / "kernel.py").write_text("")
    code, out, _ = ran(capsys, "cache", "ls")
    assert code == 1 and "kernel.py is not" in out
    (Store(own_store).base / ".new-left-behind").mkdir()
    removed = json.loads(ran(capsys, "cache", "sweep", "--json")[1])["removed"]
    assert removed == [entry.folder.name]  # what is unfinished may still have its writer
    os.utime(Store(own_store).base / ".new-left-behind", (0, 0))
    assert "left-behind" in ran(capsys, "cache", "sweep", "--json")[1]
    assert ran(capsys, "cache", "ls", "--json")[:2] == (0, "[]\n")


def test_a_sweep_of_everything_spares_bundles(capsys, own_store, tmp_path, monkeypatch):
    call = sample_call(ac.ops.attention.declaration, Sample({"D": 64, "E": 64, "G": 1}, "decode"))
    source = call_sources(call, "decode", "sm_90")[-1]
    for root in (own_store, tmp_path / "bundle"):
        build_artifact(source, "sm_90", Store(root))
    monkeypatch.setenv("ATTNCC_CACHE_DIR", f"{own_store}{os.pathsep}{tmp_path / 'bundle'}")
    assert len(json.loads(ran(capsys, "cache", "sweep", "--all", "--json")[1])["removed"]) == 1
    (held,) = json.loads(ran(capsys, "cache", "ls", "--json")[1])
    assert held["bundled"]


CARRIED = """
import triton, attncc as ac
from attncc.runtime import compile
from attncc.runtime.samples import Sample, Trait, sample_call
from attncc.runtime.sources import call_sources

def refuse(*args, **kwargs):
    raise AssertionError("compiled")

triton.compile = refuse
names = []
for traits in (frozenset(), frozenset({Trait.CACHE})):
    sample = Sample({"D": 64, "E": 64, "G": 1, "B": 3, "S": 999}, "decode", traits=traits)
    call = sample_call(ac.ops.attention.declaration, sample)
    for source in call_sources(call, "decode", "sm_90"):
        entry = compile.artifact(source, "sm_90")
        assert entry.bundled and entry.manifest.family == "sm_90a"
        names.append(entry.manifest.entry)
assert compile.compilations() == 0
print(len(set(names)))
"""


def test_a_bundle_loads_in_a_fresh_process_without_compiling(capsys, own_store, tmp_path):
    bundle = tmp_path / "bundle"
    arguments = ["attention", *SIZES, "--phase", "decode", "-o", bundle, "--json"]
    code, out, err = ran(capsys, "build", *arguments)
    made = json.loads(out)["kernels"]
    assert code == 0 and all(k["compiled"] and k["error"] is None for k in made)
    assert all(k["registers"] > 0 and k["spill_bytes"] == 0 for k in made)
    assert len(err.splitlines()) == len(made)  # progress, one line a kernel without a terminal
    code, out, _ = ran(capsys, "build", *arguments)
    assert code == 0 and not any(k["compiled"] for k in json.loads(out)["kernels"])
    where = f"{own_store}{os.pathsep}{bundle}"
    for expect in ("1", "0"):
        done = child(CARRIED, ATTNCC_CACHE_DIR=where, ATTNCC_EXPECT_HIT=expect)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == len(made)
    assert not own_store.exists()


def test_a_kernel_that_does_not_compile_is_a_finding(capsys, tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("attncc.runtime.compile.compile_source", broken)
    arguments = ["attention", *SIZES, "--phase", "decode", "-o", tmp_path / "b"]
    code, out, err = ran(capsys, "build", *arguments)
    assert code == 1 and re.search(r": (\d+) kernels, 0 compiled now, \1 failed$", out.strip())
    assert "no such instruction" in err


@pytest.mark.parametrize("traits", [(), (Trait.PACKED,), (Trait.PAGED,), (Trait.PACKED, Trait.LSE)])
def test_samples_are_calls_that_bind(traits):
    sample = Sample({"D": 64, "E": 64, "G": 4}, "prefill", traits=frozenset(traits), page=64)
    call = sample_call(ac.ops.attention.declaration, sample)
    assert call.packed == (Trait.PACKED in traits) and call.sizes["T"] >= 4096
    assert (call.block_table is not None) == (Trait.PAGED in traits)


def test_samples_of_states_take_pools():
    sizes = {"K": 64, "V": 64, "G": 2}
    sample = Sample(sizes, "decode", dtypes={"g": "fp32"}, traits=frozenset({Trait.POOL}))
    call = sample_call(ac.ops.gated_delta_rule.declaration, sample)
    assert set(call.pools) == {"s"} and str(call.tensors["g"].dtype) == "torch.float32"


def test_processes_build_what_one_builds_and_name_what_fails(tmp_path):
    request = Request(sizes=[{"D": 64, "E": 64, "G": 1}], phases=("decode",), forms=[frozenset()])
    work = plan_bundle([ac.ops.attention.declaration], request)
    told = []
    made = build_bundle([*work, Work(work[0].source, "sm_x")], tmp_path, told.append, jobs=2)
    *good, bad = made
    assert [o.work for o in good] == work and all(o.compiled and o.error is None for o in good)
    assert bad.entry is None and "sm_x" in bad.error
    assert sorted(map(repr, told)) == sorted(map(repr, made))
    again = build_bundle(work, tmp_path, jobs=0)
    assert not any(o.compiled for o in again) and [o.entry for o in again] == [
        o.entry for o in good
    ]


@pytest.fixture(scope="module")
def gated():
    """The work of a bundle of the gated delta rule, its sizes, and the dtypes of its gates."""
    sizes, single = {"K": 128, "V": 128, "G": 2}, {"g": "fp32", "beta": "fp32"}
    declaration = ac.ops.gated_delta_rule.declaration
    return plan_bundle([declaration], Request([sizes], single=single)), sizes, single


def test_a_bundle_has_the_kernels_of_every_number_of_states(gated):
    works, sizes, single = gated
    declaration, built = ac.ops.gated_delta_rule.declaration, {w.source.entry for w in works}
    several = [w.split() for w in ("prefill 4", "prefill 300", "prefill 9000", "decode 1")]
    for heads, batch, (phase, tokens) in product((8, 32), (1, 2, 3, 8, 20, 300), several):
        if batch * int(tokens) > 200_000:  # more memory than there is
            continue
        shape = {"B": batch, "T": int(tokens), "Hk": heads, **sizes}
        call = sample_call(declaration, Sample(shape, phase, dtypes=single))
        wanted = {s.entry for s in long_sources(call, phase, "sm_90")}
        assert wanted <= built, (heads, batch, phase, tokens)


def test_prompts_are_built_for_with_and_without_a_state(gated):
    works, sizes, single = gated
    names = [{a.name for a in w.source.plan.args} for w in works]
    assert any("s_initial" in n for n in names) and any("s_initial" not in n for n in names)
    request = Request(
        [{**sizes, "B": 8, "T": 300_000}], single=single, phases=("prefill",),
        forms=[frozenset()], without=frozenset({"s"}),
    )  # fmt: skip
    declaration = ac.ops.gated_delta_rule.declaration
    plans = [w.source.plan for w in plan_bundle([declaration], request)]
    given = [p for p in plans if any(a.name == "s_initial" for a in p.args)]
    assert {p.phase for p in given} == {"state"}  # of long prompts: slices have one
    assert "state" in {p.phase for p in plans if p not in given}


def test_a_scans_kernels_of_both_dialects_are_built_whatever_the_heads(gated):
    """Tables of plans choose by systems, which are data; one number of heads is built with."""
    works, _, _ = gated
    found = {(w.source.plan.phase, w.source.plan.dialect.value) for w in works}
    assert {("systems", "gluon"), ("state", "gluon"), ("prepare", "triton")} < found
    assert {("mix", "triton"), ("state", "triton"), ("step", "triton")} < found


def test_flags_and_a_scale_are_built_for_where_they_are_named():
    sizes = [{"K": 64, "V": 64, "G": 2}]
    declaration = ac.ops.gated_delta_rule.declaration
    plans = {}
    for also in ((), ("l2norm",), ("scale",)):
        request = Request(sizes, phases=("decode",), also=frozenset(also))
        plans[also] = [w.source for w in plan_bundle([declaration], request)]
    assert not any("scale_value" in {a.name for a in s.plan.args} for s in plans[()])
    assert all("scale_value" in {a.name for a in s.plan.args} for s in plans["scale",])
    normed = {s.entry for s in plans["l2norm",]}
    assert normed and not normed & {s.entry for s in plans[()]}
    call = sample_call(declaration, Sample(sizes[0], "decode"))
    assert not {"scale", "l2norm"} & call.program.given


def test_a_flag_on_the_command_line(capsys):
    code, _, err = ran(capsys, "build", "attention", *SIZES, "--with", "l2norm", "-o", "x")
    assert code == 2 and "not an optional input" in err


def test_bench_passes_on_the_code_of_the_benchmarks(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands.run(["bench"]) == 2 and "no benchmarks here" in capfd.readouterr().err
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").write_text(
        "import sys; print(sys.argv[1:]); sys.exit(5)"
    )
    assert commands.run(["bench", "table", "--quick"]) == 5
    assert capfd.readouterr().out == "['table', '--quick']\n"
