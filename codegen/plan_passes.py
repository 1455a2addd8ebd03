"""Which folds share a pass over the history, and the columns each of them has there."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from attncc.codegen.forms import FoldKind, SoftmaxFold
from attncc.codegen.plan import Spec
from attncc.codegen.plan_parts import stored
from attncc.codegen.quantised import pieces, quantised_input
from attncc.codegen.tiles import padded


@dataclass(frozen=True, slots=True)
class Columns:
    """The value side of one fold of a pass.

    Attributes:
        fold: the weighted sum.
        first: its first column in a row of partials.
        width: columns.
        block: the same, padded to a power of two.
        type: element type of the value tile.
        shared: the dot whose key tile is also the value tile, or -1.
    """

    fold: SoftmaxFold
    first: int
    width: int
    block: int
    type: str
    shared: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a history: every fold that has this weight.

    Attributes:
        index: its place among the passes.
        plain: a plain sum, which carries no maximum and no sum of weights.
        columns: its folds.
        width: columns of all its folds together.
    """

    index: int
    plain: bool
    columns: tuple[Columns, ...]
    width: int

    @property
    def lead(self) -> SoftmaxFold:
        """The first fold: all have its score, mask and sink."""
        return self.columns[0].fold


def passes_of(folds: tuple[SoftmaxFold, ...], spec: Spec) -> tuple[Pass, ...]:
    """Folds with the same weight, together."""
    grouped: dict[object, list[SoftmaxFold]] = {}
    for fold in folds:
        grouped.setdefault(fold.weight, []).append(fold)
    found = []
    for index, own in enumerate(grouped.values()):
        columns, first = [], 0
        for fold in own:
            width = prod(spec.size(a) for a in fold.value_axes)
            columns.append(_columns(fold, first, width, spec))
            first += width
        found.append(Pass(index, own[0].kind is FoldKind.SUM, tuple(columns), first))
    return tuple(found)


def _columns(fold: SoftmaxFold, first: int, width: int, spec: Spec) -> Columns:
    held = quantised_input(spec.quantised, fold.value[0]) if len(fold.value) == 1 else None
    value_type = stored(fold.value, spec) if held is None else held.value
    if fold.kind is FoldKind.SUM and value_type == "fp16":
        value_type = "fp32"  # the weights of a plain sum may pass fp16's largest number
    shared = -1
    for i, dot in enumerate(fold.dots):
        same = dot.key == fold.value and dot.over == fold.value_axes
        if held is not None and same and pieces(held, width) == 1:
            shared, value_type = i, stored((*dot.query, *dot.key), spec)
        elif held is None and same and value_type == stored((*dot.query, *dot.key), spec):
            shared = i
    return Columns(fold, first, width, padded(width), value_type, shared)
