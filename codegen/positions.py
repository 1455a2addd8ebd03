"""Values at one position of an axis that is short enough to be written out."""

from __future__ import annotations

from collections.abc import Iterable

from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, rebuild, walk
from attncc.dsl.ir import Contract, Fn, Index, Input, Lit, Map, Node, Reduce, Select, Take

SHORT = (2, 4)
"""Sizes of axes that are written out position by position."""
_COMPARE = {
    Fn.EQ: lambda a, b: a == b, Fn.NE: lambda a, b: a != b, Fn.LT: lambda a, b: a < b,
    Fn.LE: lambda a, b: a <= b, Fn.GT: lambda a, b: a > b, Fn.GE: lambda a, b: a >= b,
}  # fmt: skip


def at_position(node: Node, axis: str, at: int) -> Node:
    """The value at one position of an axis; a choice that the position decides is made.

    Args:
        node: a value, with the axis or without.
        axis: the axis.
        at: the position.
    """
    if axis not in axes_of(node):
        return node
    match node:
        case Index(axis=own) if own == axis:
            return Lit(at, loc=node.loc)
        case Input():
            return Select(node, axis, at, loc=node.loc)
    new = rebuild(node, lambda n: at_position(n, axis, at))
    match new:
        case Map(fn=fn, args=(Lit(value=a), Lit(value=b))) if fn in _COMPARE:
            return Lit(_COMPARE[fn](a, b), loc=node.loc)
        case Map(fn=Fn.WHERE, args=(Lit(value=bool() as taken), yes, no)):
            return yes if taken else no
        case _:
            return new


def written_out(nodes: Iterable[Node], sizes: dict[str, int]) -> str:
    """The short axis whose positions inputs are picked at, or "" for none.

    What is summed or looked up along has to lie in a tile, so such an axis is not written out.
    """
    found = tuple(walk(*nodes))
    bound = union(*(n.over for n in found if isinstance(n, (Contract, Reduce))))
    bound += tuple(n.over for n in found if isinstance(n, Take))
    picked = (n.over for n in found if isinstance(n, Select) and isinstance(n.arg, Input))
    return next((a for a in picked if a not in bound and sizes.get(a) in SHORT), "")


def inputs_with(axis: str, nodes: Iterable[Node]) -> tuple[Input, ...]:
    """The inputs that have an axis, each once."""
    found = dict.fromkeys(n for n in walk(*nodes) if isinstance(n, Input) and axis in n.axes)
    return tuple(found)
