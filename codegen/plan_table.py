"""Measured plans: free choices of kernels that a table fixes, found by nearest match.

A table belongs to a target. Each entry says what it was measured for and which choices won.
:func:`decide` takes the nearest entry, of the caller's own table first and then of the committed
one (``codegen/plans/<target>.json``); where nothing is near, the family's rule stays
(``tiles.py``, ``affine_choices.py``).

**Distance.** Facts of a request (dtype, head dims, phase, ...) have to equal those an entry names.
Sizes have a range in the entry; the distance is the number of doublings between a request's size
and the nearer end of the range, added up over the entry's sizes. Within ``NEAR`` doublings an entry
is near. The least distance wins, then the entry with more facts, then the larger sizes, then the
name: the choice never depends on the order of a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the tables' layout."""
NEAR = 2.0
"""Doublings (of all sizes together) up to which an entry is near."""
RULE = "rule"
"""Name of the choice where no entry is near."""
PLANS = Path(__file__).resolve().parent / "plans"

Value = int | bool | str


class Family(Enum):
    """Whose choices an entry fixes."""

    SOFTMAX = "softmax"
    WARP = "softmax_warp"
    AFFINE = "affine"
    WARP_STATE = "affine_warp"
    SEGMENTS = "segments"
    SCORES = "selected_scores"
    PICKED = "selected_fold"
    STEP = "step"


CHOICES: Mapping[Family, Mapping[str, type]] = {
    Family.SOFTMAX: {
        "block_m": int, "block_n": int, "num_warps": int, "num_stages": int, "ahead": bool,
    },
    Family.WARP: {
        "block_n": int, "stages": int, "packed_rows": bool, "dialect": str, "late": bool,
        "ahead": bool, "staged": bool, "shares": int,
    },
    Family.AFFINE: {
        "width": int, "transposed": bool, "stages": int, "warps": int, "system_warps": int,
    },
    Family.WARP_STATE: {
        "stages": int, "consumers": int, "summary_consumers": int, "reader": bool,
        "loaders": int, "columnwise": bool, "leaf": int, "chained": bool, "systems": bool,
        "blockwise": bool, "system_registers": int, "mixing": bool, "totals": bool,
        "resident": bool, "dialect": str,
    },
    Family.SEGMENTS: {"segments": int},
    Family.SCORES: {"block_n": int, "num_warps": int, "num_stages": int},
    Family.PICKED: {"block_m": int, "block_n": int, "num_warps": int, "num_stages": int},
    Family.STEP: {
        "columns": int, "num_warps": int, "registers": int, "narrow": bool, "states_first": bool,
        "joint": bool, "own_loads": bool,
    },
}  # fmt: skip
"""What an entry of a family may fix. One of ``softmax_warp`` or ``affine_warp`` makes Gluon (or the
``dialect`` that it names) the dialect of what it matches. Segments are cut when a call is launched,
not compiled in."""
NAMED: Mapping[str, tuple[Value, ...]] = {
    "dialect": ("gluon", "cutedsl"), "consumers": (1, 2), "summary_consumers": (1, 2, 3),
    "loaders": (1, 2, 3, 4), "shares": (1, 2, 4), "leaf": (16, 32),
    "system_registers": (128, 168),
}  # fmt: skip
"""What may be fixed of these; other numbers are at least 1."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a kernel is planned for.

    Attributes:
        family: the family.
        facts: what an entry must have equal, by name.
        sizes: what an entry should be near, by name.
    """

    family: Family
    facts: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Time:
    """A measurement behind an entry: ms of a work, and of what else was tried."""

    work: str
    ms: float
    tried: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """How an entry was measured.

    Attributes:
        gpu: the device's name.
        versions: of what compiled and ran the kernels, by name.
        commit: the sources.
        how: by which clock, and what a time covers.
        times: the measurements; there is at least one.
    """

    gpu: str
    versions: tuple[tuple[str, str], ...]
    commit: str
    how: str
    times: tuple[Time, ...]


@dataclass(frozen=True, slots=True)
class TableEntry:
    """Choices that were measured to be the best for what the entry matches.

    Attributes:
        id: its name; part of the text of every plan it decides.
        family: whose choices.
        facts: what a request must have.
        sizes: name, least and largest size of where it holds; the largest may be infinite.
        choose: the choices by name.
        measured: how it is known.
    """

    id: str
    family: Family
    facts: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[str, int, float], ...]
    choose: tuple[tuple[str, Value], ...]
    measured: Measured

    def distance(self, wanted: Wanted) -> float:
        """Doublings from a request's sizes; infinite where a fact differs or a size is missing."""
        if self.family is not wanted.family or not set(self.facts) <= set(wanted.facts):
            return math.inf
        held = dict(wanted.sizes)
        total = 0.0
        for name, least, largest in self.sizes:
            if name not in held:
                return math.inf
            size = max(held[name], 1)
            at = math.log2(size)
            total += max(math.log2(least) - at, at - math.log2(largest), 0.0)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class PlanTable:
    """The entries of one file. Tables are compared by identity: a spec that holds one is a key."""

    entries: tuple[TableEntry, ...] = field(repr=False)
    name: str = ""

    def nearest(self, wanted: Wanted) -> TableEntry | None:
        """The nearest entry that is near, or None."""
        near = [(e.distance(wanted), e) for e in self.entries]
        found = [(d, e) for d, e in near if d <= NEAR]
        if not found:
            return None
        return min(found, key=lambda f: _order(*f))[1]


def _order(distance: float, entry: TableEntry) -> tuple[float, int, float, str]:
    return distance, -len(entry.facts), -sum(math.log2(s[1]) for s in entry.sizes), entry.id


@lru_cache(maxsize=4096)
def decide(
    wanted: Wanted, target: str, tuned: PlanTable | None
) -> tuple[str, tuple[tuple[str, Value], ...]]:
    """Who decides a kernel's choices, and what it fixes.

    Args:
        wanted: what the kernel is planned for.
        target: ``sm_90`` and the like.
        tuned: the caller's own table, looked at first.

    Returns:
        The entry's id and its choices; ``rule`` and nothing where no entry is near.
    """
    for table in (tuned, committed(target)):
        entry = table.nearest(wanted) if table is not None else None
        if entry is not None:
            return entry.id, entry.choose
    return RULE, ()


@lru_cache(maxsize=16)
def committed(target: str) -> PlanTable | None:
    """The table that the package carries for a target, or None."""
    path = PLANS / f"{target}.json"
    if not path.is_file():
        return None
    return parse_table(path.read_text(encoding="utf-8"), f"{target}.json", target)


def find_entry(chosen: str, target: str, tuned: PlanTable | None) -> TableEntry | None:
    """The entry of an id, or None (the rule decided)."""
    tables = [t for t in (tuned, committed(target)) if t is not None]
    return next((e for t in tables for e in t.entries if e.id == chosen), None)


# --- files -----------------------------------------------------------------------------------


def parse_table(text: str, name: str, target: str) -> PlanTable:
    """Read a table.

    Args:
        text: JSON.
        name: named in errors.
        target: which target it must be for.

    Raises:
        ValueError: it is no table of that target; the message names the entry and the field.
    """
    try:
        data: Any = json.loads(text)
        if data["format"] != FORMAT or data["target"] != target:
            raise ValueError(f"format {data['format']} for {data['target']}")
        entries = tuple(_entry(e) for e in data["entries"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name} is no table of plans for {target}: {error}") from error
    ids = [e.id for e in entries]
    if len(set(ids)) < len(ids):
        raise ValueError(f"{name}: two entries have one id")
    return PlanTable(entries, name)


def _entry(data: Mapping[str, Any]) -> TableEntry:
    name, family = str(data["id"]), Family(data["family"])
    if name == RULE or not name:
        raise ValueError("an entry needs a name of its own")
    choose = tuple(sorted(data["choose"].items()))
    for key, value in choose:
        if type(value) is not CHOICES[family].get(key) or not _allowed(key, value):
            raise ValueError(f"{name}: {key} = {value!r} is no choice of {family.value}")
    held = data["measured"]
    times = tuple(
        Time(str(t["work"]), float(t["ms"]), tuple((k, float(v)) for k, v in t["tried"].items()))
        for t in held["times"]
    )
    if not choose or not times:
        raise ValueError(f"{name}: an entry fixes something, and was measured")
    versions = tuple(sorted((k, str(v)) for k, v in held["versions"].items()))
    return TableEntry(
        name, family, tuple(sorted((k, str(v)) for k, v in data["match"].items())),
        tuple(_range(name, k, *v) for k, v in sorted(data["sizes"].items())), choose,
        Measured(str(held["gpu"]), versions, str(held["commit"]), str(held["how"]), times),
    )  # fmt: skip


def _allowed(key: str, value: object) -> bool:
    """Whether a choice of the right type has a value that there is."""
    if key in NAMED:
        return value in NAMED[key]
    return isinstance(value, (bool, str)) or (isinstance(value, int) and value >= 1)


def _range(name: str, size: str, least: int, largest: int | None) -> tuple[str, int, float]:
    top = math.inf if largest is None else largest
    if not 1 <= least <= top:
        raise ValueError(f"{name}: {size} from {least} to {largest}")
    return size, int(least), top


def table_text(entries: tuple[TableEntry, ...], target: str) -> str:
    """A table as JSON, entries in the order of their names."""
    held = [_as_json(e) for e in sorted(entries, key=lambda e: e.id)]
    return json.dumps({"format": FORMAT, "target": target, "entries": held}, indent=1) + "\n"


def _as_json(entry: TableEntry) -> dict[str, Any]:
    m = entry.measured
    sizes = {n: [a, None if math.isinf(b) else int(b)] for n, a, b in entry.sizes}
    return {
        "id": entry.id,
        "family": entry.family.value,
        "match": dict(entry.facts),
        "sizes": sizes,
        "choose": dict(entry.choose),
        "measured": {
            "gpu": m.gpu,
            "versions": dict(m.versions),
            "commit": m.commit,
            "how": m.how,
            "times": [{"work": t.work, "ms": t.ms, "tried": dict(t.tried)} for t in m.times],
        },
    }


def describe(entry: TableEntry | None, target: str) -> str:
    """Who decided and why, on one line."""
    if entry is None:
        return f"by the rule: no entry of {target} is within {NEAR:g} doublings"
    fixed = " ".join(f"{k}={v}" for k, v in entry.choose)
    sizes = [f"{n} {a} to {b:g}" for n, a, b in entry.sizes]
    place = ", ".join([" ".join(f"{k}={v}" for k, v in entry.facts), *sizes])
    times = "; ".join(
        f"{t.work} {t.ms:g} ms" + "".join(f", {c} {ms:g}" for c, ms in t.tried)
        for t in entry.measured.times
    )
    return f"by entry {entry.id} ({fixed}) for {place}; {entry.measured.gpu}: {times}"
