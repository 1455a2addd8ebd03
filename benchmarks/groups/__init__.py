"""Groups of cases. A new group is one module with ``cases()`` and one entry here."""

from __future__ import annotations

from importlib import import_module

from benchmarks.case import Case

GROUPS = {
    "decode": "benchmarks.groups.decode",
    "prefill": "benchmarks.groups.prefill",
    "prefill_mods": "benchmarks.groups.prefill_mods",
    "gdn_prefill": "benchmarks.groups.gdn_prefill",
    "gdn_decode": "benchmarks.groups.gdn_decode",
    "overhead": "benchmarks.groups.overhead",
}


def load(group: str) -> list[Case]:
    """The cases of a group, in order."""
    found: list[Case] = import_module(GROUPS[group]).cases()
    return found
