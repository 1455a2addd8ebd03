"""How much of a history a query can see, where a mask bounds it (a sliding window)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.dsl.graph import walk
from attncc.dsl.ir import (
    Contract,
    Fn,
    Index,
    Input,
    Lit,
    Map,
    Node,
    Program,
    Reduce,
    Softmax,
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
    """The most rows of a history that one query sees, or None where any number may be seen.

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
                inside = walk(*args)
                if not any(isinstance(n, Softmax) and n.over == axis for n in inside):
                    yield None
            case Reduce(over=over) if axis in over:
                yield None


def _rows(where: Node | None, axis: str) -> int | str | None:
    band = _Band() if where is None else _band(where, axis)
    if band.back is None or band.ahead is None:
        return None
    total = _sum(band.back, band.ahead, {"": 1})
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
