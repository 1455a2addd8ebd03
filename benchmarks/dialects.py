"""``python -m benchmarks.dialects``: the dialects of tiled prefill beside their peers.

Per case: the Triton tile, the warp-specialised kernels in Gluon and CuTe-DSL with each choice that
a table of plans may fix, and the peers of the case, by events in turns after the answer was
checked. The fastest choice is what an entry of family ``softmax_warp`` in
``codegen/plans/sm_90.json`` should fix.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attncc.codegen.plan import Dialect
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.dsl.errors import RefusedError
from attncc.runtime import backends
from attncc.runtime.recording import KEPT
from attncc.runtime.timing import events_ms
from benchmarks.answers import run_and_judge
from benchmarks.case import Case, Inputs, Work
from benchmarks.groups import load

GROUPS = ("prefill", "prefill_mods")
CHOICES: Mapping[str, dict[str, int | bool]] = {
    "128 x 2": {"block_n": 128, "stages": 2},
    "128 x 3": {"block_n": 128, "stages": 3},
    "64 x 4": {"block_n": 64, "stages": 4},
    "128 x 2, a head a tile": {"block_n": 128, "stages": 2, "packed_rows": False},
}
"""Keys of a block and blocks in flight; rows of all heads of a group in a tile, or of one."""
DIALECTS = (Dialect.GLUON.value, Dialect.CUTEDSL.value)
ROUNDS = 3


def cases(*groups: str) -> list[Case]:
    """The cases that are about no one dialect."""
    return [c for g in groups or GROUPS for c in load(g) if not c.backend]


class Chooser:
    """Makes every call of this process plan such kernels by one choice, until the next."""

    def __init__(self) -> None:
        self._current = ""
        self._table: PlanTable | None = None
        spec_of = backends.spec_of
        backends.spec_of = lambda call: replace(spec_of(call), tuned=self._table)

    def choose(self, name: str) -> None:
        """Take a choice of ``CHOICES``; what was recorded of calls is forgotten if it is new."""
        if name != self._current:
            measured = Measured("being measured", (), "", "", (Time("none", 0.0),))
            facts, fixed = (("phase", "prefill"),), tuple(CHOICES[name].items())
            entry = TableEntry("trial", Family.WARP, facts, (), fixed, measured)
            self._current, self._table = name, PlanTable((entry,), "trial")
            KEPT.choose_again()

    def with_choice(self, name: str, fn: Callable[[], Any]) -> Callable[[], Any]:
        """The call under a choice."""

        def run() -> Any:
            self.choose(name)
            return fn()

        return run


def _works(
    case: Case, inputs: Inputs, chooser: Chooser, choices: Sequence[str], dialects: Sequence[str]
) -> dict[str, Work]:
    """Every way to do a case's work, by name."""
    found = {"triton": case.ours(inputs, "triton")}
    for dialect, name in product(dialects, choices):
        work = case.ours(inputs, dialect)
        found[f"{dialect} {name}"] = replace(work, fn=chooser.with_choice(name, work.fn))
    for name, peer in case.peers.items():
        try:
            found[name] = peer(inputs)
        except Exception as error:  # a peer that is not there or cannot: its row says why
            print(f"  {name}: {type(error).__name__}: {error}", flush=True)
    return found


def measure(
    case: Case, chooser: Chooser, choices: Sequence[str], dialects: Sequence[str], rep: int
) -> list[dict[str, Any]]:
    """One row a way: median ms, TFLOP/s, error and budget; a wrong answer has no time."""
    inputs = case.build(torch.device("cuda"))
    works, rows = _works(case, inputs, chooser, choices, dialects), []
    parts = list(case.parts(inputs))
    right: dict[str, Work] = {}
    for name, work in works.items():
        row: dict[str, Any] = {"work": case.work, "way": name}
        rows.append(row)
        try:
            answer = run_and_judge(work, parts)
        except (RefusedError, RuntimeError, NotImplementedError) as error:
            row["reason"] = f"{type(error).__name__}: {error}"
            continue
        row |= {"error": answer.error, "budget": answer.budget}
        if answer.right:
            right[name] = work
    times: dict[str, list[float]] = {name: [] for name in right}
    for _ in range(ROUNDS):
        for name, work in right.items():
            times[name].append(events_ms(work.fn, rep))
    for row in rows:
        if row["way"] in times:
            ms = median(times[row["way"]])
            row |= {"ms": round(ms, 4), "tflops": round(case.flops / ms / 1e9, 1)}
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if an answer was wrong or a kernel could not run."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.dialects", description=__doc__)
    p.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    p.add_argument("--only", metavar="TEXT", default="", help="cases whose name has it")
    p.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES)[:2])
    p.add_argument("--dialects", nargs="+", choices=DIALECTS, default=list(DIALECTS))
    p.add_argument("--rep", type=int, default=25, help="ms of repetitions a round")
    p.add_argument("--out", type=Path, metavar="PATH", help="rows as JSON")
    options = p.parse_args(sys.argv[1:] if argv is None else argv)
    if not torch.cuda.is_available():
        print("benchmarks.dialects: no GPU", file=sys.stderr)
        return 3
    start, rows, chooser = time.monotonic(), [], Chooser()
    for case in (c for c in cases(*options.group) if options.only in c.work):
        print(case.work, flush=True)
        for row in measure(case, chooser, options.choices, options.dialects, options.rep):
            rows.append(row)
            facts = " ".join(f"{k}={v}" for k, v in row.items() if k not in ("work", "way"))
            print(f"  {row['way']}: {facts}", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - start:.0f} s", flush=True)
    ours = ("triton", *DIALECTS)
    return int(any("ms" not in r for r in rows if r["way"].startswith(ours)))


if __name__ == "__main__":
    sys.exit(main())
