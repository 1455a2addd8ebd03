"""What comes of tuning: entries of a table, and how candidates are shown."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from attncc.codegen.plan_table import Measured, TableEntry, Time, Value, Wanted
from attncc.runtime.candidates import Choices, name_of
from attncc.runtime.key import fingerprint, triton_version
from attncc.runtime.tune import Tuning, ranked


def entry_of(tuning: Tuning, gpu: str) -> TableEntry:
    """The winner as an entry of a table: it holds near the sizes it was measured at.

    Raises:
        IndexError: no candidate was right.
    """
    (ms, best), *others = ranked(tuning)
    tried = tuple((text_of(c.choices), round(t, 5)) for t, c in others)
    how = "events" if best.graph_ms is None else "CUDA graphs, in turns"
    time = _time(tuning, ms, tried)
    return _entry(tuning, tuning.wanted, best.choices, time, gpu, how)


def _time(tuning: Tuning, ms: float, tried: tuple[tuple[str, float], ...]) -> Time:
    work = " ".join(f"{a}{n}" for a, n in sorted(tuning.call.sizes.items()))
    return Time(f"{tuning.call.program.name} {tuning.phase} {work}", round(ms, 5), tried)


def _entry(
    tuning: Tuning, wanted: Wanted, choices: Choices, time: Time, gpu: str, how: str
) -> TableEntry:
    versions = {
        "python": platform.python_version(), "torch": torch.__version__, "triton": triton_version(),
    }  # fmt: skip
    measured = Measured(
        gpu, tuple(sorted(versions.items())), f"sources-{fingerprint()[:12]}",
        f"attncc tune: whole calls by {how}; answers checked first",
        (time,),
    )  # fmt: skip
    sizes = tuple((n, size, float(size)) for n, size in wanted.sizes)
    name, facts = name_of(wanted, choices), tuple(sorted(wanted.facts))
    return TableEntry(name, wanted.family, facts, sizes, choices, measured)


def text_of(choices: Sequence[tuple[str, Value]]) -> str:
    """Choices on one line."""
    return " ".join(f"{k}={v}" for k, v in choices)


def segments_entry(
    tuning: Tuning, wanted: Wanted, times: Sequence[tuple[int, float]], gpu: str
) -> TableEntry:
    """The fastest number of segments as an entry of a table."""
    best, ms = min(times, key=lambda t: t[1])
    tried = tuple((f"segments={n}", round(t, 5)) for n, t in times if n != best)
    choices: Choices = (("segments", best),)
    return _entry(tuning, wanted, choices, _time(tuning, ms, tried), gpu, "events")


def as_dict(tuning: Tuning) -> dict[str, object]:
    """A tuning as JSON shows it."""
    return {
        "op": tuning.call.program.name, "phase": tuning.phase, "target": tuning.target,
        "family": tuning.wanted.family.value, "match": dict(tuning.wanted.facts),
        "sizes": dict(tuning.wanted.sizes),
        "candidates": [
            {
                "choices": dict(c.choices), "kernels": [s.entry for s in c.sources],
                "registers": c.registers, "spill_bytes": c.spill_bytes,
                "shared_bytes": c.shared_bytes, "problem": c.problem, "ms": c.ms,
                "graph_ms": c.graph_ms,
            }
            for c in tuning.candidates
        ],
    }  # fmt: skip
