"""Groups of cases. A new group is one module with ``cases()`` and one entry here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.case import Case

GROUPS = {
    "decode": "benchmarks.groups.decode",
    "prefill": "benchmarks.groups.prefill",
    "prefill_mods": "benchmarks.groups.prefill_mods",
    "gdn_prefill": "benchmarks.groups.gdn_prefill",
    "gdn_decode": "benchmarks.groups.gdn_decode",
    "gdp": "benchmarks.groups.gdp",
    "kda_prefill": "benchmarks.groups.kda_prefill",
    "gla_prefill": "benchmarks.groups.gla_prefill",
    "simple_gla_prefill": "benchmarks.groups.simple_gla_prefill",
    "delta_rule_prefill": "benchmarks.groups.delta_rule_prefill",
    "mla_decode": "benchmarks.groups.mla_decode",
    "dsa_index": "benchmarks.groups.dsa_index",
    "dsa_mla": "benchmarks.groups.dsa_mla",
    "short_conv": "benchmarks.groups.short_conv",
    "overhead": "benchmarks.groups.overhead",
    "library_prefill": "benchmarks.groups.library_prefill",
    "library_decode": "benchmarks.groups.library_decode",
}

OPS: dict[str, tuple[str, ...]] = {
    "decode": ("attention",),
    "gdn_prefill": ("gated_delta_rule",),
    "gdp": ("gated_delta_product",),
    "kda_prefill": ("kda",),
    "gla_prefill": ("gla",),
    "delta_rule_prefill": ("delta_rule",),
    "mla_decode": ("mla",),
    "dsa_index": ("lightning_indexer",),
    "dsa_mla": ("sparse_mla",),
    "short_conv": ("short_conv",),
}
"""Library ops that a group is about; the two of the library name an op in each case."""


def load(group: str) -> list[Case]:
    """The cases of a group, in order."""
    found: list[Case] = import_module(GROUPS[group]).cases()
    return found
