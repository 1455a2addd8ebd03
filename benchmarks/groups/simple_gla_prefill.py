"""Gated linear attention with one decay a head, over a long prompt."""

from __future__ import annotations

from benchmarks.case import Case
from benchmarks.groups.recurrences import Recurrence
from benchmarks.peers import fla

PREFILL = Recurrence(
    "simple_gla_prefill", "gla", {"fla": fla.simple_gla}, gate=1, patterns={"g": "B T H"}
)


def cases() -> list[Case]:
    """One long sequence."""
    return [PREFILL.case()]
