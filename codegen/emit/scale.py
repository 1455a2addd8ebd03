"""Constants of a score gathered into one factor, which the exponential then absorbs."""

from __future__ import annotations

from collections.abc import Mapping

from attncc.codegen.emit.functions import constant
from attncc.codegen.terms import mul, number
from attncc.dsl.graph import axes_of, kind_of, rebuild
from attncc.dsl.ir import Fn, Kind, Map, Node


def gather(node: Node, sizes: Mapping[str, str]) -> tuple[float, list[Node]]:
    """A real value as a constant times factors."""
    value = constant(node, sizes)
    if value is not None:
        return float(value), []
    if isinstance(node, Map) and kind_of(node) is Kind.REAL:
        if node.fn is Fn.NEG:
            factor, rest = gather(node.args[0], sizes)
            return -factor, rest
        if node.fn is Fn.MUL:
            (a, x), (b, y) = (gather(n, sizes) for n in node.args)
            return a * b, x + y
        if node.fn is Fn.DIV:
            by = constant(node.args[1], sizes)
            factor, rest = gather(node.args[0], sizes)
            if by is not None and by != 0:
                return factor / by, rest
            below = fold_constants(node.args[1], sizes)
            return factor, [*rest, Map(Fn.DIV, (number(1), below), loc=node.loc)]
    return 1.0, [_rewrite(node, sizes)]


def _rewrite(node: Node, sizes: Mapping[str, str]) -> Node:
    if isinstance(node, Map) and kind_of(node) is Kind.REAL:
        return rebuild(node, lambda child: fold_constants(child, sizes))
    return node


def fold_constants(node: Node, sizes: Mapping[str, str]) -> Node:
    """The same value with the constants of each product gathered into one factor."""
    if kind_of(node) is not Kind.REAL or not isinstance(node, Map):
        return node
    factor, rest = gather(node, sizes)
    if not rest:
        return number(factor)
    return _times(rest, factor, node)


def _times(rest: list[Node], factor: float, like: Node) -> Node:
    """The product, what has few axes first: that is one number, or one a row, for a whole tile."""
    ordered = sorted(rest, key=lambda n: len(axes_of(n)))
    if factor == 1.0:
        return mul(*ordered)
    first = Map(Fn.MUL, (ordered[0], number(factor)), loc=like.loc)
    return mul(first, *ordered[1:])
