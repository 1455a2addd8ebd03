"""One softmax over several histories: a shared prefix and an own suffix, for instance.

    p = ac.softmax({"P": a, "S": b}, where={"S": ac.causal})
    o = ac.dot(p, {"P": values_of_the_prefix, "S": values})

Each history keeps its own axis; the exponentials of all of them share one sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attncc.dsl.errors import SymbolicError, UnknownAxisError
from attncc.dsl.ir import Contract, Fn, Map, Node, Softmax
from attncc.dsl.loc import Loc
from attncc.dsl.types import Value, current, lift, make


@dataclass(frozen=True, slots=True)
class Cascade:
    """The probabilities of a softmax over several histories, by history axis."""

    parts: Mapping[str, Value]

    def __getitem__(self, axis: str) -> Value:
        """The probabilities of one history."""
        return self.parts[axis]


def _op() -> str | None:
    trace = current()
    return trace.op if trace else None


def _axes(given: Mapping[str, Any], wanted: Mapping[str, Any], what: str, loc: Loc) -> None:
    extra = [a for a in given if a not in wanted]
    if extra:
        raise UnknownAxisError(
            f"{what} of a history that the cascade does not have", op=_op(), axis=extra[0],
            expected=" ".join(wanted), found=extra[0], loc=loc,
        )  # fmt: skip


def cascade(scores: Mapping[str, Any], where: Any, sink: Any, loc: Loc) -> Cascade:
    """The softmax over the histories together.

    Args:
        scores: logits by history axis, two or more.
        where: truth values by history axis; a history that is not there is seen as a whole.
        sink: one more logit in the sum, without a value.
        loc: where it was written.

    Raises:
        SymbolicError: fewer than two histories, or ``where`` is not given by history.
        UnknownAxisError: ``where`` names an axis that is none of the histories.
    """
    masks: Mapping[str, Any] = {} if where is None else where
    if len(scores) < 2 or not isinstance(masks, Mapping):
        raise SymbolicError(
            "a softmax over several histories takes scores and masks by axis", op=_op(), loc=loc,
            expected='ac.softmax({"P": a, "S": b}, where={"S": mask})', found=repr(where)[:40],
        )  # fmt: skip
    _axes(masks, scores, "a mask", loc)
    alone = {}
    for axis, score in scores.items():
        mask = lift(masks[axis], loc).node if axis in masks else None
        node = make(Softmax(lift(score, loc).node, axis, mask, loc=loc)).node
        assert isinstance(node, Softmax)
        alone[axis] = node
    sunk = None if sink is None else lift(sink, loc).node
    parts = {}
    for axis, own in alone.items():
        others = tuple(n for a, n in alone.items() if a != axis)
        parts[axis] = make(Softmax(own.score, axis, own.where, sunk, others, loc=loc))
    return Cascade(parts)


def contract(p: Cascade, values: Mapping[str, Any], loc: Loc) -> Value:
    """The weighted sum over all histories of a cascade.

    Raises:
        UnknownAxisError: the values are not those of exactly the cascade's histories.
    """
    _axes(values, p.parts, "a value", loc)
    _axes(p.parts, values, "a score", loc)
    total: Node | None = None
    for axis, part in p.parts.items():
        term = make(Contract((part.node, lift(values[axis], loc).node), (axis,), loc=loc)).node
        total = term if total is None else make(Map(Fn.ADD, (total, term), loc=loc)).node
    assert total is not None
    return make(total)
