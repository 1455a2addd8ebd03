import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import identity, roofline, table
from benchmarks.cli import main
from benchmarks.groups import GROUPS, load
from benchmarks.peers import DISTRIBUTIONS
from benchmarks.results import Results, Row, slug

ROOT = Path(__file__).resolve().parents[2]


def row(work: str = "decode/B1", peer: str = "fla", **facts: Any) -> Row:
    plain = {
        "work": work, "ours_ms": 0.05, "backend": "triton", "peer": peer, "peer_ms": 0.06,
        "ratio": 1.2, "error": 0.001, "budget": 0.01, "bound": "bytes", "share_of_ceiling": 0.63,
        "timing": "graph", "versions": {}, "commit": "abc", "run": "r1", "bytes": 10**8,
        "flops": 1e9,
    }  # fmt: skip
    return {**plain, **facts}


def filled(*rows: Row) -> Results:
    ceilings = {"copy_gbs": 4200.0, "read_gbs": 4150.0, "bf16_tflops": 750.0}
    return Results("NVIDIA H200", list(rows), {"r1": {"ceilings": ceilings}})


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("", "gpu"),
    ],
)
def test_devices_have_short_file_names(device: str, name: str) -> None:
    assert slug(device) == name


def test_groups_that_run_apart_are_merged_by_work_and_peer(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    first = filled(row(), row(peer="flex"))
    first.save(path)
    second = Results.load(path)
    second.runs["r2"] = {"ceilings": {}}
    second.merge([row(ratio=1.5, run="r2"), row("prefill/S4096", run="r2")])
    second.save(path)
    rows = Results.load(path).rows
    assert [(r["work"], r["peer"]) for r in rows] == [
        ("decode/B1", "fla"), ("decode/B1", "flex"), ("prefill/S4096", "fla"),
    ]  # fmt: skip
    assert [r["ratio"] for r in rows] == [1.5, 1.2, 1.2]
    assert set(Results.load(path).runs) == {"r1", "r2"}


def test_runs_without_rows_are_dropped(tmp_path: Path) -> None:
    results = filled(row(run="r2"))
    results.runs["r2"] = {"ceilings": {}}
    results.save(tmp_path / "x.json")
    assert set(Results.load(tmp_path / "x.json").runs) == {"r2"}


def test_resume_knows_the_rows_of_this_commit() -> None:
    results = filled(
        row(peer="fla"),
        row(peer="flex", commit="old"),
        row(peer="sdpa-flash", ratio=None, reason="peer: ModuleNotFoundError"),
        row(peer="sdpa-cudnn", ratio=None, wrong=True),
    )
    assert results.done("abc") == {("decode/B1", "fla"), ("decode/B1", "sdpa-cudnn")}


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h200.json"
    filled(row()).save(path)
    before = path.read_text()

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        filled(row(ratio=9.0)).save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_infinite_errors_stay_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    filled(row(error=float("inf"))).save(path)
    assert "Infinity" not in path.read_text()
    assert json.loads(path.read_text())["rows"][0]["error"] == "inf"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="not a result file"):
        Results.load(tmp_path / "x.json")


def test_the_table_has_a_part_for_each_group() -> None:
    text = table.markdown(
        filled(
            row(),
            row(peer="flashinfer", peer_ms=None, ratio=None, reason="peer: no | module"),
            row(
                "gdn_prefill/T8192",
                ours_ms=None,
                peer_ms=None,
                ratio=None,
                reason="wrong answer: o",
            ),
        )
    )
    assert "copy 4200 GB/s" in text and "commit abc" in text
    assert "| B1 | 0.05 ᵍ triton | fla | 0.06 | 1.20 | 63 % bytes | 0.001 / 0.01 |" in text
    assert "peer: no \\| module" in text and "wrong answer: o" in text
    assert text.index("**decode**") < text.index("**gdn_prefill**")


def test_the_marked_part_of_a_document_is_replaced() -> None:
    document = f"a\n{table.BEGIN}\nold\n{table.END}\nb\n"
    once = table.insert(document, "new\n")
    assert once == f"a\n{table.BEGIN}\nnew\n{table.END}\nb\n"
    assert table.insert(once, "new\n") == once
    for wrong in ("", table.BEGIN, f"{table.END}{table.BEGIN}", document + document):
        with pytest.raises(table.MarkerError):
            table.insert(wrong, "new\n")


def test_the_command_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, readme = tmp_path / "h200.json", tmp_path / "README.md"
    filled(row()).save(path)
    readme.write_text(f"# x\n{table.BEGIN}\n{table.END}\n")
    assert main(["table", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert main(["table", "--json", str(path), "--write", str(readme)]) == 0
    assert readme.read_text() == f"# x\n{table.BEGIN}\n{printed}{table.END}\n"
    readme.write_text("no markers")
    assert main(["table", "--json", str(path), "--write", str(readme)]) == 2
    assert main(["table", "--json", str(tmp_path / "none.json")]) == 2


def test_the_roofline_needs_matplotlib_or_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "h200.json"
    filled(row()).save(path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["roofline", "--json", str(path), "--folder", str(tmp_path)]) == 2
    assert "matplotlib" in capsys.readouterr().err


def test_the_roofline_shows_each_of_our_cases_once() -> None:
    shown = roofline.points(
        [row(), row(peer="flex", peer_ms=None), row("overhead/x", timing="host")]
    )
    assert shown["attncc"] == [(10.0, pytest.approx(20.0), "B1")]
    assert set(shown) == {"attncc", "fla"}


def test_every_group_loads_and_names_known_peers() -> None:
    cases = [case for group in GROUPS for case in load(group)]
    assert len({case.work for case in cases}) == len(cases)
    assert {case.group for case in cases} == set(GROUPS)
    assert {peer for case in cases for peer in case.peers} == set(DISTRIBUTIONS)


def test_sources_that_change_change_the_identity(tmp_path: Path) -> None:
    (tmp_path / "dsl").mkdir()
    (tmp_path / "dsl" / "a.py").write_text("1")
    before = identity.fingerprint(tmp_path)
    assert identity.fingerprint(tmp_path) == before
    (tmp_path / "dsl" / "a.py").write_text("2")
    assert identity.fingerprint(tmp_path) != before


@pytest.mark.parametrize(("args", "code"), [(["--help"], 0), (["--group", "decode"], 3)])
def test_without_a_gpu_help_works_and_a_run_says_why_not(args: list[str], code: int) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT / ".pkg"), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    if code:
        assert done.stderr == "benchmarks: no GPU: the benchmarks need a CUDA device\n"


def test_a_reader_that_has_read_enough_ends_it_quietly() -> None:
    gone, out = os.pipe()
    os.close(gone)
    path = os.pathsep.join(filter(None, (str(ROOT / ".pkg"), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks", "summary"]
    with os.fdopen(out, "wb") as stdout:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=stdout,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")


def test_the_summary_has_one_line_a_work_and_its_closest_peer_first() -> None:
    missing = {"peer_ms": None, "ratio": None, "reason": "peer: missing"}
    rows = (row("g/a", "slow", ratio=3.0), row("g/a", "fast", ratio=0.9), row("g/b", **missing))
    rows += (row("library_g/a", "slow", ratio=2.0),)  # of the whole table alone
    lines = [x for x in table.summary(filled(*rows)).splitlines() if x.startswith("| ")]
    assert len(lines) == 3 and lines[1].startswith("| ---")
    lines = lines[2:]
    assert lines[0].startswith("| g: a |") and "fast **0.90**, slow **3.00**" in lines[0]


def test_a_case_about_one_backend_runs_no_other():
    own = {c.work: c.backend for g in ("prefill", "gdn_prefill") for c in load(g) if c.backend}
    assert {name.rpartition(", ")[2]: backend for name, backend in own.items()} == {
        "Triton": "triton", "CuTe-DSL": "cutedsl",
    }  # fmt: skip
    from benchmarks import dialects

    assert dialects.cases() and not {c.work for c in dialects.cases()} & set(own)
