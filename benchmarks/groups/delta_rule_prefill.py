"""The delta rule (DeltaNet) over a long prompt: a correction and no decay."""

from __future__ import annotations

from benchmarks.case import Case
from benchmarks.groups.recurrences import Recurrence
from benchmarks.peers import fla

PREFILL = Recurrence("delta_rule_prefill", "delta_rule", {"fla": fla.delta_rule}, rate=True)


def cases() -> list[Case]:
    """One long sequence."""
    return [PREFILL.case()]
