"""Kimi delta attention over a long prompt: a decay for each key element, and a correction."""

from __future__ import annotations

from benchmarks.case import Case
from benchmarks.groups.recurrences import K, Recurrence
from benchmarks.peers import fla

PREFILL = Recurrence("kda_prefill", "kda", {"fla": fla.kda}, gate=K, rate=True)


def cases() -> list[Case]:
    """One long sequence."""
    return [PREFILL.case()]
