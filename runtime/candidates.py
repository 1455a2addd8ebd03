"""What ``attncc tune`` tries: choices around the rule's own, pruned by what a target can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from attncc.codegen.affine_choices import SHARED
from attncc.codegen.affine_plans import StatePlan
from attncc.codegen.plan import KernelPlan
from attncc.codegen.plan_gathered import GatherPlan
from attncc.codegen.plan_selected import ScorePlan
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.plan_table import (
    CHOICES,
    Family,
    Measured,
    PlanTable,
    TableEntry,
    Value,
    Wanted,
)

Choices = tuple[tuple[str, Value], ...]

ACCUMULATORS = 128
"""Registers a thread that accumulators may take; more of them spill."""
_SMALLEST = 99 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Asking(PlanTable):
    """A table that notes what kernels ask it for."""

    asked: list[Wanted] = field(default_factory=list)

    def nearest(self, wanted: Wanted) -> TableEntry | None:
        """As any table; the request is noted."""
        if wanted not in self.asked:
            self.asked.append(wanted)
        return PlanTable.nearest(self, wanted)


def name_of(wanted: Wanted, choices: Choices) -> str:
    """An entry's name: what it is for, where it was measured, and what it fixes."""
    parts = [wanted.family.value, *(v for _, v in sorted(wanted.facts))]
    parts += [f"{n}{size}" for n, size in sorted(wanted.sizes)]
    parts += [f"{k}{int(v) if isinstance(v, bool) else v}" for k, v in sorted(choices)]
    return "-".join(parts)


def table_of(wanted: Wanted, choices: Choices) -> PlanTable:
    """A table that gives one request these choices, whatever its sizes.

    The entry has the name that it keeps if it wins, so that its kernels are compiled once.
    """
    nothing = Measured("-", (), "-", "a candidate", ())
    fixed = tuple(sorted(choices))
    entry = TableEntry(name_of(wanted, choices), wanted.family, wanted.facts, (), fixed, nothing)
    return PlanTable((entry,), "candidate")


def rule_of(family: Family, plans: Sequence[KernelPlan]) -> dict[str, Value]:
    """What the rule chose, read off the plans of a call."""
    if family is Family.SOFTMAX:
        tile = next(p for p in plans if isinstance(p, TiledPlan))
        return {
            "block_m": tile.block_m, "block_n": tile.block_n, "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }  # fmt: skip
    if family in _SELECTED:
        own = next(p for p in plans if isinstance(p, _SELECTED[family]))
        return {name: getattr(own, name) for name in CHOICES[family]}
    state = next(p for p in plans if isinstance(p, StatePlan))
    found: dict[str, Value] = {
        "width": state.tile[-1].block, "transposed": state.transposed, "stages": state.num_stages,
        "warps": state.num_warps,
    }  # fmt: skip
    systems = [p for p in plans if p.phase == "prepare"] or [p for p in plans if p.phase == "mix"]
    if systems:
        found["system_warps"] = systems[0].num_warps
    return found


def candidates(
    family: Family, plans: Sequence[KernelPlan], target: str
) -> Iterator[dict[str, Value]]:
    """Choices that may be worth compiling, the rule's own first.

    Args:
        family: one of the keys of ``_SPACES``.
        plans: of the call, as the rule makes them.
        target: ``sm_90`` and the like.
    """
    rule = rule_of(family, plans)
    yield rule
    tried = {tuple(sorted(rule.items()))}
    for more in _SPACES[family](plans, rule, target):
        found = {**rule, **more}
        if (key := tuple(sorted(found.items()))) not in tried:
            tried.add(key)
            yield found


def _tiles(
    plans: Sequence[KernelPlan], rule: Mapping[str, Value], target: str
) -> Iterator[dict[str, Value]]:
    tile = next(p for p in plans if isinstance(p, TiledPlan))
    few = tile.block_m <= 64 and tile.phase.startswith("decode")
    rows = (tile.block_m,) if few else (64, 128)
    element = 4 if tile.precision != "ieee" else 2
    query = sum(tile.blocks_k)
    values = sum(c.block for p in tile.passes for c in p.columns)
    keys = query + sum(c.block for p in tile.passes for c in p.columns if c.shared < 0)
    for m, n, warps, stages in product(rows, (32, 64, 128), (4, 8), (1, 2, 3, 4)):
        shared = element * (m * query + stages * n * keys)
        held = m * (values + n * len(tile.blocks_k)) // (32 * warps)
        if shared <= SHARED.get(target, _SMALLEST) and held <= ACCUMULATORS:
            yield {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": stages}


def _chunks(
    plans: Sequence[KernelPlan], rule: Mapping[str, Value], target: str
) -> Iterator[dict[str, Value]]:
    """The carrying kernel's choices all together; the others' each alone, beside the rule's."""
    state = next(p for p in plans if isinstance(p, StatePlan))
    key, value = state.tile
    for width, transposed, stages, warps in product(
        (16, 32, 64, 128), (False, True), (1, 2, 3), (4, 8)
    ):
        held = key.block * width // (32 * warps)
        if width <= max(value.size, 16) and held <= ACCUMULATORS:
            yield {"width": width, "transposed": transposed, "stages": stages, "warps": warps}
    for system_warps in (1, 2, 4) if "system_warps" in rule else ():
        yield {"system_warps": system_warps}


def _scores(
    plans: Sequence[KernelPlan], rule: Mapping[str, Value], target: str
) -> Iterator[dict[str, Value]]:
    """Of the scores of a selection; a tile's columns are the call's tokens and heads."""
    own = next(p for p in plans if isinstance(p, ScorePlan))
    element, width = 4 if own.precision != "ieee" else 2, sum(own.blocks_k)
    for n, warps, stages in product((32, 64, 128, 256), (4, 8), (1, 2, 3, 4)):
        shared = element * width * (own.block_m + stages * n)
        held = n * own.block_m * len(own.blocks_k) // (32 * warps)
        if shared <= SHARED.get(target, _SMALLEST) and held <= ACCUMULATORS:
            yield {"block_n": n, "num_warps": warps, "num_stages": stages}


def _picked(
    plans: Sequence[KernelPlan], rule: Mapping[str, Value], target: str
) -> Iterator[dict[str, Value]]:
    """Of the fold over picked rows: a row's place is loaded a stage before the row."""
    own = next(p for p in plans if isinstance(p, GatherPlan))
    element, query = 4 if own.precision != "ieee" else 2, sum(own.blocks_k)
    columns = [c for p in own.passes for c in p.columns]
    keys = query + sum(c.block for c in columns if c.shared < 0)
    values = sum(c.block for c in columns)
    for m, n, warps, stages in product((16, 32, 64), (16, 32, 64), (4, 8), (1, 3, 5)):
        shared = element * (m * query + (stages // 2 + 1) * n * keys)
        held = m * (values + n * len(own.blocks_k)) // (32 * warps)
        if shared <= SHARED.get(target, _SMALLEST) and held <= ACCUMULATORS:
            yield {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": stages}


_SELECTED: Mapping[Family, type[KernelPlan]] = {
    Family.SCORES: ScorePlan, Family.PICKED: GatherPlan,
}  # fmt: skip
_SPACES = {
    Family.SOFTMAX: _tiles, Family.AFFINE: _chunks, Family.SCORES: _scores, Family.PICKED: _picked,
}  # fmt: skip
