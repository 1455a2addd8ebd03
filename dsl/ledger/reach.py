"""How far back in a history a query can see, where a mask bounds it (a sliding window)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.dsl.graph import walk
from attncc.dsl.ir import (
    Contract,
    Cumulative,
    Fn,
    Index,
    Input,
    Lit,
    Map,
    Node,
    Program,
    Reduce,
    Softmax,
    Take,
    TopK,
)

Linear = dict[str, int]
"""A whole number as a sum: coefficients by name of an index or host number, "" the constant."""


@dataclass(frozen=True, slots=True)
class _Band:
    """``t - s <= back`` and ``s - t <= ahead``, None where nothing bounds it."""

    back: Linear | None = None
    ahead: Linear | None = None


def reach(program: Program, axis: str) -> int | str | None:
    """The last rows of a history among which are all that one query sees, or None for any number.

    A band that ends before the query counts up to the query: older rows than these can go, the rows
    between the band and the query cannot.

    Args:
        program: the traced declaration.
        axis: of the history.

    Returns:
        A number, a sum of host numbers and numbers such as ``window + 1``, or None.
    """
    found = {_rows(fold, axis) for fold in _folds(program, axis)}
    if len(found) == 1:
        return found.pop()
    numbers = [f for f in found if isinstance(f, int)]
    return max(numbers) if numbers and len(numbers) == len(found) else None


def _folds(program: Program, axis: str) -> Iterator[Node | None]:
    """The mask of every fold that closes the axis; None for one without a mask of its own."""
    for node in walk(*program.roots):
        match node:
            case Softmax(over=over, where=where) | TopK(over=over, where=where) if over == axis:
                yield where
            case Contract(over=over, args=args) if axis in over:
                if not any(_weighs(a, axis) for a in args):
                    yield None
            case Reduce(over=over) if axis in over:
                yield None
            case Cumulative(over=over) | Take(over=over) if over == axis:
                yield None


def _weighs(node: Node, axis: str) -> bool:
    """Whether a value is 0 wherever the mask of a softmax over the axis is: its rows are masked."""
    match node:
        case Softmax(over=over):
            return over == axis
        case Map(fn=Fn.MUL, args=args):
            return any(_weighs(a, axis) for a in args)
        case Map(fn=Fn.DIV | Fn.NEG, args=(a, *_)):
            return _weighs(a, axis)
        case Map(fn=Fn.ADD | Fn.SUB, args=args) | Map(fn=Fn.WHERE, args=(_, *args)):
            return all(_weighs(a, axis) for a in args)
        case _:
            return False


def _rows(where: Node | None, axis: str) -> int | str | None:
    band = _Band() if where is None else _band(where, axis)
    if band.back is None or band.ahead is None:
        return None
    beyond = {n: c for n, c in band.ahead.items() if c > 0}  # host numbers are widths
    total = _sum(band.back, beyond, {"": 1})
    names = [f"{n}" if c == 1 else f"{c}*{n}" for n, c in sorted(total.items()) if n and c]
    if not names:
        return max(0, total.get("", 0))
    number = total.get("", 0)
    return " + ".join([*names, *([str(number)] if number else [])])


def _band(node: Node, axis: str) -> _Band:
    match node:
        case Map(fn=Fn.AND, args=(a, b)):
            one, two = _band(a, axis), _band(b, axis)
            return _Band(_nearer(one.back, two.back), _nearer(one.ahead, two.ahead))
        case Map(fn=Fn.OR, args=(a, b)):
            one, two = _band(a, axis), _band(b, axis)
            back = one.back if one.back == two.back else None
            return _Band(back, one.ahead if one.ahead == two.ahead else None)
        case Map(fn=Fn.LT | Fn.LE | Fn.GT | Fn.GE as fn, args=(a, b)):
            flipped = fn in (Fn.GT, Fn.GE)
            small, large = (b, a) if flipped else (a, b)
            return _compared(_linear(small), _linear(large), fn in (Fn.LT, Fn.GT), axis)
        case _:
            return _Band()


def _compared(small: Linear | None, large: Linear | None, strict: bool, axis: str) -> _Band:
    """``small <= large`` (or ``<``) as a bound of ``t - s`` or ``s - t``."""
    if small is None or large is None:
        return _Band()
    gap = _sum(large, {n: -c for n, c in small.items()}, {"": -1 if strict else 0})
    t, s = gap.pop("@T", 0), gap.pop(f"@{axis}", 0)
    if any(n.startswith("@") for n in gap):
        return _Band()
    if (t, s) == (-1, 1):
        return _Band(back=gap)
    return _Band(ahead=gap) if (t, s) == (1, -1) else _Band()


def _nearer(one: Linear | None, two: Linear | None) -> Linear | None:
    """The tighter of two bounds; either is right where they cannot be compared."""
    if one is None or two is None:
        return two if one is None else one
    plain = set(one) <= {""} and set(two) <= {""}
    return min(one, two, key=lambda b: b.get("", 0)) if plain else one


def _linear(node: Node) -> Linear | None:
    """A sum of positions, host numbers and whole numbers; None for anything else."""
    match node:
        case Index(axis=axis):
            return {f"@{axis}": 1}
        case Lit(value=int(value)):
            return {"": int(value)}
        case Input(name=name, axes=()):
            return {name: 1}
        case Map(fn=Fn.ADD | Fn.SUB as fn, args=(a, b)):
            one, two = _linear(a), _linear(b)
            if one is None or two is None:
                return None
            return _sum(one, two if fn is Fn.ADD else {n: -c for n, c in two.items()})
        case _:
            return None


def _sum(*terms: Linear) -> Linear:
    total: Linear = {}
    for term in terms:
        for name, count in term.items():
            total[name] = total.get(name, 0) + count
    return {n: c for n, c in total.items() if c}
