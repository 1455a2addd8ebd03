"""What a mask shows of a whole block, from intervals: none, some or all of its elements.

One evaluation serves numbers (:func:`classify`) and printed code (:mod:`attncc.codegen.emit.skip`):
values are intervals, truth values are pairs "for some element" and "for all elements". It never
claims too little of the first and never too much of the second. A real number may be NaN, which no
comparison but != holds for; an interval that may hold one is (-inf, inf), and real numbers are not
computed with, since -inf + inf would lose it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from attncc.codegen.emit.functions import literal
from attncc.codegen.forms import SoftmaxFold
from attncc.codegen.plan import Spec
from attncc.codegen.softmax_checks import tensor_pattern
from attncc.dsl.graph import axes_of, kind_of, walk
from attncc.dsl.ir import Fn, Index, Input, Kind, Lifetime, Lit, Map, Node, Program

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Interval(Generic[V]):
    """The least and the largest value in a block."""

    lo: V
    hi: V


@dataclass(frozen=True, slots=True)
class Truth(Generic[V]):
    """Whether a predicate may hold for some element, and whether it holds for all."""

    some: V
    all: V


class Algebra(Protocol[V]):
    """How values are computed with: as numbers, or as text."""

    def number(self, value: float) -> V:
        """A literal."""

    def truth(self, value: bool) -> V:
        """A truth value."""

    def add(self, a: V, b: V) -> V:
        """A sum."""

    def neg(self, a: V) -> V:
        """A negation."""

    def mul(self, a: V, b: V) -> V:
        """A product."""

    def least(self, a: V, b: V) -> V:
        """The smaller."""

    def most(self, a: V, b: V) -> V:
        """The larger."""

    def less(self, a: V, b: V) -> V:
        """A comparison."""

    def both(self, a: V, b: V) -> V:
        """A conjunction."""

    def no(self, a: V) -> V:
        """A negation of a truth value."""


Leaf = Callable[[Node], Interval[V] | None]


def value(node: Node, leaf: Leaf[V], on: Algebra[V]) -> Interval[V] | None:
    """The interval of a number, or None where nothing is known.

    Args:
        node: the expression.
        leaf: intervals of what the caller knows; asked first, for every node.
        on: what the bounds are.
    """
    known = leaf(node)
    if known is not None:
        return known
    if isinstance(node, Lit):
        return Interval(on.number(node.value), on.number(node.value))
    if not isinstance(node, Map) or kind_of(node) is not Kind.INT:
        return _negated(node, leaf, on)
    args = [value(a, leaf, on) for a in node.args]
    if node.fn is Fn.MOD:
        by = node.args[1]
        whole = isinstance(by, Lit) and by.value > 0
        return Interval(on.number(0), on.number(by.value - 1)) if whole else None  # type: ignore[union-attr]
    if any(a is None for a in args):
        return None
    return _whole(node.fn, [a for a in args if a is not None], on)


def _negated(node: Node, leaf: Leaf[V], on: Algebra[V]) -> Interval[V] | None:
    if not isinstance(node, Map) or node.fn is not Fn.NEG:
        return None
    x = value(node.args[0], leaf, on)
    return None if x is None else Interval(on.neg(x.hi), on.neg(x.lo))


def _whole(fn: Fn, args: list[Interval[V]], on: Algebra[V]) -> Interval[V] | None:
    x, y = args[0], args[-1]
    match fn:
        case Fn.ADD:
            return Interval(on.add(x.lo, y.lo), on.add(x.hi, y.hi))
        case Fn.SUB:
            return Interval(on.add(x.lo, on.neg(y.hi)), on.add(x.hi, on.neg(y.lo)))
        case Fn.NEG:
            return Interval(on.neg(x.hi), on.neg(x.lo))
        case Fn.MIN:
            return Interval(on.least(x.lo, y.lo), on.least(x.hi, y.hi))
        case Fn.MAX:
            return Interval(on.most(x.lo, y.lo), on.most(x.hi, y.hi))
        case Fn.MUL:
            corners = [on.mul(a, b) for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
            lo, hi = corners[0], corners[0]
            for corner in corners[1:]:
                lo, hi = on.least(lo, corner), on.most(hi, corner)
            return Interval(lo, hi)
        case _:
            return None


def truth(node: Node, leaf: Leaf[V], on: Algebra[V]) -> Truth[V]:
    """What is known of a predicate; nothing is "may hold for some, need not hold for all"."""
    unknown = Truth(on.truth(True), on.truth(False))
    match node:
        case Lit(value=bool(fixed)):
            return Truth(on.truth(fixed), on.truth(fixed))
        case Map(fn=Fn.NOT, args=(a,)):
            x = truth(a, leaf, on)
            return Truth(on.no(x.all), on.no(x.some))
        case Map(fn=Fn.AND, args=(a, b)):
            x, y = truth(a, leaf, on), truth(b, leaf, on)
            return Truth(on.both(x.some, y.some), on.both(x.all, y.all))
        case Map(fn=Fn.OR, args=(a, b)):
            x, y = truth(a, leaf, on), truth(b, leaf, on)
            return Truth(_either(x.some, y.some, on), _either(x.all, y.all, on))
        case Map(fn=fn, args=(a, b)) if fn in _COMPARED:
            p, q = value(a, leaf, on), value(b, leaf, on)
            whole = kind_of(a) is Kind.INT and kind_of(b) is Kind.INT
            return unknown if p is None or q is None else _compare(fn, p, q, whole, on)
        case _:
            return unknown


_COMPARED = frozenset({Fn.LT, Fn.LE, Fn.GT, Fn.GE, Fn.EQ, Fn.NE})


def _either(a: V, b: V, on: Algebra[V]) -> V:
    return on.no(on.both(on.no(a), on.no(b)))


def _at_most(a: V, b: V, on: Algebra[V]) -> V:
    return on.no(on.less(b, a))


def _compare(fn: Fn, x: Interval[V], y: Interval[V], whole: bool, on: Algebra[V]) -> Truth[V]:
    match fn:
        case Fn.GT | Fn.GE:
            return _compare(Fn.LT if fn is Fn.GT else Fn.LE, y, x, whole, on)
        case Fn.LT:
            return Truth(on.less(x.lo, y.hi), on.less(x.hi, y.lo))
        case Fn.LE:  # of reals, two infinite ends may hide a NaN
            sure = _at_most(x.hi, y.lo, on) if whole else on.less(x.hi, y.lo)
            return Truth(_at_most(x.lo, y.hi, on), sure)
        case _:
            meet = on.both(_at_most(x.lo, y.hi, on), _at_most(y.lo, x.hi, on))
            # every end the same: x.hi <= y.lo and y.hi <= x.lo
            same = on.both(_at_most(x.hi, y.lo, on), _at_most(y.hi, x.lo, on))
            return Truth(meet, same) if fn is Fn.EQ else Truth(on.no(same), on.no(meet))


# --- numbers ---------------------------------------------------------------------------------


class Numbers:
    """Python's numbers."""

    def number(self, value: float) -> float:
        """A literal."""
        return value

    def truth(self, value: bool) -> float:
        """A truth value."""
        return value

    def add(self, a: float, b: float) -> float:
        """A sum."""
        return a + b

    def neg(self, a: float) -> float:
        """A negation."""
        return -a

    def mul(self, a: float, b: float) -> float:
        """A product."""
        return a * b

    def least(self, a: float, b: float) -> float:
        """The smaller."""
        return min(a, b)

    def most(self, a: float, b: float) -> float:
        """The larger."""
        return max(a, b)

    def less(self, a: float, b: float) -> float:
        """A comparison."""
        return a < b

    def both(self, a: float, b: float) -> float:
        """A conjunction."""
        return bool(a) and bool(b)

    def no(self, a: float) -> float:
        """A negation of a truth value."""
        return not a


class Shows(enum.Enum):
    """What a mask shows of a block."""

    NONE = "none"
    SOME = "some"
    ALL = "all"


def classify(mask: Node, leaf: Leaf[float]) -> Shows:
    """Whether a mask surely shows none or all of a block.

    Args:
        mask: the predicate.
        leaf: intervals of positions and inputs over the block; one that may hold a NaN is
            (-inf, inf).

    Returns:
        ``NONE`` and ``ALL`` are certain; ``SOME`` is everything else.
    """
    found = truth(mask, leaf, Numbers())
    if not found.some:
        return Shows.NONE
    return Shows.ALL if found.all else Shows.SOME


# --- text ------------------------------------------------------------------------------------


class Text:
    """Bounds as Triton text."""

    def number(self, value: float) -> str:
        """A literal."""
        return literal(value)

    def truth(self, value: bool) -> str:
        """``True`` or ``False``, which fold away."""
        return str(value)

    def add(self, a: str, b: str) -> str:
        """A sum."""
        return f"({a} + {b})"

    def neg(self, a: str) -> str:
        """A negation."""
        return f"(-{a})"

    def mul(self, a: str, b: str) -> str:
        """A product."""
        return f"({a} * {b})"

    def least(self, a: str, b: str) -> str:
        """The smaller."""
        return f"tl.minimum({a}, {b})"

    def most(self, a: str, b: str) -> str:
        """The larger."""
        return f"tl.maximum({a}, {b})"

    def less(self, a: str, b: str) -> str:
        """A comparison."""
        return f"({a} < {b})"

    def both(self, a: str, b: str) -> str:
        """A conjunction."""
        if "False" in (a, b):
            return "False"
        return b if a == "True" else a if b == "True" else f"({a} & {b})"

    def no(self, a: str) -> str:
        """A negation of a truth value."""
        fixed = {"True": "False", "False": "True"}
        return fixed.get(a) or (a[2:-1] if a.startswith("~(") else f"~({a})")


# --- what a kernel can use -------------------------------------------------------------------


def tightened_by(program: Program, fold: SoftmaxFold, spec: Spec) -> tuple[str, ...] | None:
    """What tightens the loop over keys beyond the bands of a mask.

    Returns:
        History inputs whose least and largest values per block of keys are asked for: those that a
        residual predicate compares as they are, with a history axis of their own in memory, and
        none where the history lies in pages. None where no residual predicate can hide a block.
    """
    if fold.mask is None:
        return None
    residual = [n for c in fold.mask.clauses for n in c.residual]
    inputs = {n for n in walk(*residual) if isinstance(n, Input) and _by_key(n, fold)}
    found = {}
    for node in inputs if not spec.pages else ():
        pattern = tensor_pattern(program, spec, program.tensor(node.name))
        if (fold.over,) in pattern.dims:
            found[node] = Interval("lo", "hi")

    def leaf(node: Node) -> Interval[str] | None:
        if node in found or isinstance(node, Index):
            return Interval("lo", "hi")
        hidden = fold.over in axes_of(node) or isinstance(node, Lit) or positions_only(node)
        return None if hidden else Interval("lo", "hi")

    if all(truth(n, leaf, Text()).some == "True" for n in residual):
        return None
    return tuple(sorted(n.name for n in found))


def positions_only(node: Node) -> bool:
    """Whole-number code over positions and host numbers, whose bounds follow from theirs."""
    whole = isinstance(node, Map) and kind_of(node) is Kind.INT
    return whole and not any(isinstance(n, Input) and n.axes for n in walk(node))


def _by_key(node: Input, fold: SoftmaxFold) -> bool:
    """Whether an input has one value a key for all rows of a tile."""
    held = node.lifetime in (Lifetime.CACHE, Lifetime.MEMORY)
    return held and fold.over in node.axes and not set(axes_of(node)) & set(fold.row_axes)
