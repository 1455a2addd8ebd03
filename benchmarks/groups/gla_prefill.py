"""Gated linear attention over a long prompt: a decay for each key element."""

from __future__ import annotations

from benchmarks.case import Case
from benchmarks.groups.recurrences import K, Recurrence
from benchmarks.peers import fla

PREFILL = Recurrence("gla_prefill", "gla", {"fla": fla.gla}, gate=K)


def cases() -> list[Case]:
    """One long sequence."""
    return [PREFILL.case()]
