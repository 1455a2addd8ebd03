"""The command: ``python -m benchmarks [run] | table | summary | roofline | resources``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.groups import GROUPS
from benchmarks.peers import DISTRIBUTIONS
from benchmarks.results import FOLDER, Results, default_path

if TYPE_CHECKING:
    from benchmarks.case import Case
    from benchmarks.runner import Bench

GROUP_SECONDS = 330.0
"""Nothing is started after this much of a group's six minutes."""


def _run_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure attncc beside its peers on this GPU; the answer is checked first.",
        epilog="Also: `python -m benchmarks table|summary|resources [--write FILE]`, `roofline`.",
    )
    p.add_argument(
        "--group", nargs="+", action="extend", choices=GROUPS, metavar="G", help=" ".join(GROUPS)
    )
    p.add_argument("--resume", action="store_true", help="skip rows of this commit that are there")
    p.add_argument(
        "--peers", nargs="+", choices=DISTRIBUTIONS, metavar="NAME", help=" ".join(DISTRIBUTIONS)
    )
    p.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="cases whose name has one of these"
    )
    p.add_argument(
        "--peer-limit", type=float, metavar="SECONDS",
        help="of a peer's first call; a row without its time says so",
    )  # fmt: skip
    p.add_argument("--backend", nargs="+", default=["auto"], metavar="NAME", help="ours, to try")
    p.add_argument(
        "--out", type=Path, metavar="PATH", help="default: benchmarks/results/<gpu>.json"
    )
    p.add_argument("--quick", action="store_true", help="each group's first case, short timing")
    p.add_argument("--list", action="store_true", help="name the works and peers; needs no GPU")
    p.add_argument("--commit", metavar="ID", help="identity of the sources where git is missing")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code (2: it cannot be done here)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] in (["table"], ["summary"]):
        return _table(args[1:], args[0])
    if args[:1] == ["roofline"]:
        return _roofline(args[1:])
    if args[:1] == ["resources"]:
        return _resources(args[1:])
    return _run(args[1:] if args[:1] == ["run"] else args)


def _fail(text: str, code: int = 2) -> int:
    print(f"benchmarks: {text}", file=sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    options = _run_parser().parse_args(argv)
    groups = list(dict.fromkeys(options.group or GROUPS))
    if options.list:
        return _list(groups, options)
    import torch

    if not torch.cuda.is_available():
        return _fail("no GPU: the benchmarks need a CUDA device", 3)
    if len(groups) == 1:
        return _run_group(groups[0], options)
    # A process each: a kernel that faults, or a peer that leaks, stays with its group.
    rest = _without_groups(options)
    codes = [
        subprocess.run([sys.executable, "-m", "benchmarks", "--group", g, *rest]).returncode
        for g in groups
    ]
    return max(abs(c) for c in codes)


def _cases(group: str, options: argparse.Namespace) -> list[Case]:
    """The cases of a group that are asked for."""
    from benchmarks.groups import load

    return [c for c in load(group) if not options.only or any(t in c.work for t in options.only)]


def _list(groups: Sequence[str], options: argparse.Namespace) -> int:
    """Every work and its peers, a line each; nothing is built or run."""
    for group in groups:
        for case in _cases(group, options):
            names = [p for p in case.peers if not options.peers or p in options.peers]
            print(f"{case.work} | {', '.join(names)}")
    return 0


def _without_groups(options: argparse.Namespace) -> list[str]:
    """The options again, for a child that runs one group."""
    rest = ["--backend", *options.backend]
    rest += ["--peers", *options.peers] if options.peers else []
    rest += ["--only", *options.only] if options.only else []
    rest += ["--out", str(options.out)] if options.out else []
    rest += ["--commit", options.commit] if options.commit else []
    rest += ["--peer-limit", str(options.peer_limit)] if options.peer_limit else []
    return rest + [f"--{name}" for name in ("resume", "quick") if getattr(options, name)]


def _run_group(group: str, options: argparse.Namespace) -> int:
    """Measure one group, saving after every row; 1 if an answer of ours was wrong or missing.

    A kernel that faults ends the group: its own row says so, and the rows before are kept.
    """
    import torch

    from benchmarks import identity
    from benchmarks.runner import Bench, DeviceLostError
    from benchmarks.timing import GpuClock, measure_ceilings

    start = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu = torch.cuda.get_device_name()
    path = options.out or default_path(gpu)
    results = Results.load(path, gpu)
    commit = options.commit or identity.commit()
    run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{group}"
    bench = Bench(
        device=torch.device("cuda"),
        clock=GpuClock(10 if options.quick else 40),
        ceilings=measure_ceilings(),
        commit=commit,
        run=run,
        backends=tuple(options.backend),
        peers=frozenset(options.peers) if options.peers else None,
        done=results.done(commit) if options.resume else frozenset(),
        deadline=start + GROUP_SECONDS,
        peer_limit=options.peer_limit,
    )
    results.runs[run] = {"ceilings": bench.ceilings, "cuda": torch.version.cuda}
    print(f"{group} on {gpu}, {commit}: {bench.ceilings}", flush=True)
    cases = _cases(group, options)[: 1 if options.quick else None]
    try:
        failed = _measure(cases, bench, results, path)
    except DeviceLostError as error:
        print(f"{group}: stopped after {time.monotonic() - start:.0f} s: {error}", flush=True)
        return 1
    print(f"{group}: {time.monotonic() - start:.0f} s", flush=True)
    return int(failed)


def _measure(cases: Sequence[Case], bench: Bench, results: Results, path: Path) -> bool:
    """Rows of cases, saved one by one; whether one has no time of ours.

    Raises:
        DeviceLostError: a kernel has faulted.
    """
    from benchmarks.runner import release, run_case

    failed = False
    for case in cases:
        release(bench.device)
        for row in run_case(case, bench):
            failed |= row["ours_ms"] is None
            results.merge([row])
            results.save(path)
            print(_said(row), flush=True)
    return failed


def _said(row: dict[str, object]) -> str:
    shown = (
        "ours_ms",
        "peer_ms",
        "ratio",
        "share_of_ceiling",
        "timing",
        "error",
        "budget",
        "reason",
    )
    facts = " ".join(f"{n}={row[n]}" for n in shown if row.get(n) is not None)
    return f"  {row['work']} | {row['peer']}: {facts}"


def _source(
    argv: list[str], name: str, extra: str, text: str
) -> tuple[argparse.Namespace, Results]:
    p = argparse.ArgumentParser(prog=f"python -m benchmarks {name}")
    p.add_argument("--json", type=Path, metavar="PATH", help="default: the only file of results/")
    p.add_argument(extra, type=Path, metavar="PATH", help=text)
    options = p.parse_args(argv)
    path = options.json
    if path is None:
        files = sorted(FOLDER.glob("*.json"))
        if len(files) != 1:
            found = ", ".join(f.name for f in files) or "none"
            raise FileNotFoundError(f"name a result file with --json (there: {found})")
        path = files[0]
    if not path.exists():
        raise FileNotFoundError(f"no such result file: {path}")
    return options, Results.load(path)


def _table(argv: list[str], form: str) -> int:
    from benchmarks import table

    try:
        options, results = _source(argv, form, "--write", "document whose marked part to replace")
        text = table.summary(results) if form == "summary" else table.markdown(results)
        if options.write is not None:
            table.write(options.write, text)
    except (OSError, ValueError) as error:
        return _fail(str(error))
    if options.write is None:
        print(text, end="")
    return 0


def _roofline(argv: list[str]) -> int:
    from benchmarks import roofline

    try:
        options, results = _source(argv, "roofline", "--folder", "where the pictures go")
        for path in roofline.draw(results, options.folder or FOLDER / "roofline"):
            print(path.name)
    except ImportError:
        return _fail("roofline needs matplotlib: install attncc[report]")
    except (OSError, ValueError) as error:
        return _fail(str(error))
    return 0


def _resources(argv: list[str]) -> int:
    """Compile the kernels of the benchmarks, without a GPU, and tell what they need."""
    from benchmarks import resources, table

    p = argparse.ArgumentParser(prog="python -m benchmarks resources")
    p.add_argument("--op", nargs="+", metavar="NAME", help="only these ops of the library")
    p.add_argument("--write", type=Path, metavar="PATH", help="document whose marked part to fill")
    options = p.parse_args(argv)
    works = tuple(w for w in resources.WORKS if not options.op or w.op in options.op)
    text = resources.markdown(resources.rows(works))
    if options.write is None:
        print(text, end="")
        return 0
    try:
        table.write(options.write, text, table.RESOURCES)
    except (OSError, ValueError) as error:
        return _fail(str(error))
    return 0
