"""Times each kernel of a chunked gated delta rule alone, in both dialects, on one GPU.

    PYTHONPATH=.pkg python -m benchmarks.affine_parts [--only TEXT] [--ways NAME ...] [--out PATH]

Every way is checked against the fp64 oracle on short calls before it is timed. A way of the Gluon
form is what an entry of family ``affine_warp`` in ``codegen/plans/sm_90.json`` may fix.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from attncc import ops
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Dialect
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time, Value
from attncc.runtime import affine
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.timing import events_ms
from benchmarks import tune_gdn
from benchmarks.groups import recur

SHAPES = {
    "T8192": (8192, 16, 32, 1), "T32768": (32768, 16, 32, 1), "T131072": (131072, 16, 32, 1),
    "16 x 2048": (32768, 16, 32, 16), "few heads": (32768, 4, 8, 1),
}  # fmt: skip
WAYS: Mapping[str, dict[str, Value] | None] = {
    "triton": None,
    "gluon": {},
    "gluon, Triton systems": {"systems": False},
    "gluon, 1 warpgroup": {"consumers": 1},
    "gluon, 2 warpgroups": {"consumers": 2},
    "gluon, 2 stages": {"stages": 2},
    "gluon, reader": {"consumers": 1, "reader": True},
    "gluon, by columns": {"columnwise": True},
    "gluon, by columns, leaf 16": {"columnwise": True, "leaf": 16},
    "gluon, 4 loaders": {"loaders": 4},
    "gluon, chained": {"chained": True},
    "gluon, all of these": {
        "reader": True,
        "summary_consumers": 2,
        "columnwise": True,
        "leaf": 16,
        "loaders": 4,
        "chained": True,
    },
}
"""Choices of the Gluon form by name; None is Triton."""
SEGMENTS = (4, 8, 16)
"""Cuts to try where heads are few; the rule's own is tried everywhere."""

Run = Callable[[], None]


def table(choose: Mapping[str, Value]) -> PlanTable | None:
    """A table that makes the Gluon form take a choice."""
    if not choose:
        return None
    measured = Measured("being measured", (), "", "", (Time("none", 0.0),))
    entry = TableEntry("trial", Family.WARP_STATE, (), (), tuple(choose.items()), measured)
    return PlanTable((entry,), "trial")


class Prepared:
    """A call of a shape; ``run`` makes it by a way."""

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        tokens, hq, hv, sequences = shape
        device = torch.device(tune_gdn.DEVICE)
        x = recur.inputs_of(1, tokens, hq, hv, 128, 128, device)
        packed = sequences > 1
        args = [x[n][0] if packed else x[n] for n in recur.NAMES]
        extra = {"s": torch.zeros(sequences, hv, 128, 128, device=device)}
        if packed:
            cu = torch.arange(sequences + 1, device=device, dtype=torch.int32)
            extra["cu_seqlens"] = cu * (tokens // sequences)
        self.call, _ = bind(ops.gated_delta_rule.declaration, tuple(args), extra)
        self.results = {**self.call.outputs, **self.call.final_states}
        self.inputs = x | {"s": extra["s"]}

    def runner(self, way: str, segments: int | None = None) -> Run:
        """The call by a way; its kernels are those of one table."""
        choose = WAYS[way]
        dialect = Dialect.TRITON if choose is None else Dialect.GLUON
        spec = replace(spec_of(self.call), dialect=dialect, tuned=table(choose or {}))
        analysis = analyse(self.call.program)
        return partial(affine.run, self.call, analysis, spec, "prefill", segments=segments)


def wrong(way: str, segments: int | None) -> str:
    """What is wrong with a way's answer; empty if it is right."""
    for shape in [(320, 2, 4, 1), (640, 2, 4, 5)]:
        held = Prepared(shape)
        for tensor in held.results.values():
            tensor.fill_(torch.nan)
        held.runner(way, segments)()
        problem = tune_gdn.unlike(held.results, held.inputs)
        if problem:
            return f"{shape}: {problem}"
    return ""


def measure(name: str, ways: Sequence[str]) -> list[dict[str, object]]:
    """A row per way: the whole call, then each kernel alone, in ms."""
    held, rows = Prepared(SHAPES[name]), []
    for way in ways:
        for segments in (None, *(SEGMENTS if name == "few heads" else ())):
            run = held.runner(way, segments)
            run()
            torch.cuda.synchronize()
            whole = events_ms(run, 60)
            parts = tune_gdn.kernel_times(run)
            row = {"shape": name, "way": way, "segments": segments, "ms": round(whole, 4)}
            rows.append(row | {k: round(v, 4) for k, v in parts.items()})
            shown = " ".join(f"{k} {v:.3f}" for k, v in parts.items())
            cut = f", {segments} segments" if segments else ""
            print(f"{name:10} {way + cut:32} {whole:.3f} ms: {shown}", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if an answer was wrong."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.affine_parts", description=__doc__)
    p.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    p.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    p.add_argument("--out", type=Path, metavar="PATH", help="rows as JSON")
    options = p.parse_args(sys.argv[1:] if argv is None else argv)
    if not torch.cuda.is_available():
        print("benchmarks.affine_parts: no GPU", file=sys.stderr)
        return 3
    right, rows = [], []
    for way in options.ways:
        problem = wrong(way, None) or wrong(way, 3)
        print(f"{way:32} {problem or 'right'}", flush=True)
        right += [] if problem else [way]
    for name in options.only:
        rows += measure(name, right)
        torch.cuda.empty_cache()
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(len(right) < len(options.ways))


if __name__ == "__main__":
    sys.exit(main())
