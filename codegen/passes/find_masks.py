"""Masks as bands that bound loops plus predicates evaluated per element."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.forms import Band, Clause, MaskForm
from attncc.dsl.graph import axes_of, kind_of
from attncc.dsl.ir import Fn, Index, Kind, Lit, Map, Node

_LIMIT = 8  # clauses of a disjunction; beyond it the mask is one residual predicate


@dataclass(frozen=True, slots=True)
class _Linear:
    t: int
    s: int
    offset: Node

    def plus(self, other: _Linear, sign: int) -> _Linear:
        fn = Fn.ADD if sign > 0 else Fn.SUB
        return _Linear(
            self.t + sign * other.t, self.s + sign * other.s, _whole(fn, self.offset, other.offset)
        )


def _whole(fn: Fn, a: Node, b: Node) -> Node:
    if isinstance(a, Lit) and isinstance(b, Lit):
        x, y = int(a.value), int(b.value)
        return Lit(x + y if fn is Fn.ADD else x - y if fn is Fn.SUB else x * y)
    return Map(fn, (a, b))


def linear(node: Node, query: str, key: str) -> _Linear | None:
    """A whole-number expression as ``t * T + s * S + offset``, or None."""
    if kind_of(node) is not Kind.INT:
        return None
    match node:
        case Index(axis=axis) if axis in (query, key):
            return _Linear(int(axis == query), int(axis == key), Lit(0))
        case Map(fn=Fn.ADD | Fn.SUB as fn, args=(a, b)):
            x, y = linear(a, query, key), linear(b, query, key)
            return x.plus(y, 1 if fn is Fn.ADD else -1) if x and y else None
        case Map(fn=Fn.NEG, args=(a,)):
            x = linear(a, query, key)
            return _Linear(0, 0, Lit(0)).plus(x, -1) if x else None
        case (
            Map(fn=Fn.MUL, args=(Lit(value=value), a)) | Map(fn=Fn.MUL, args=(a, Lit(value=value)))
        ):
            x, n = linear(a, query, key), int(value)
            return _Linear(x.t * n, x.s * n, _whole(Fn.MUL, x.offset, Lit(n))) if x else None
        case _:
            return None if {query, key} & set(axes_of(node)) else _Linear(0, 0, node)


def _band(node: Map, query: str, key: str) -> Band | None:
    """A comparison of linear expressions as one band."""
    a, b = node.args
    if node.fn in (Fn.LT, Fn.LE):
        a, b = b, a  # b >= a
    elif node.fn not in (Fn.GT, Fn.GE):
        return None
    x, y = linear(a, query, key), linear(b, query, key)
    if x is None or y is None:
        return None
    d = x.plus(y, -1)
    if node.fn in (Fn.LT, Fn.GT):
        d = d.plus(_Linear(0, 0, Lit(1)), -1)
    return Band(d.t, d.s, d.offset) if d.s else None


_NEGATED = {
    Fn.LT: Fn.GE, Fn.LE: Fn.GT, Fn.GT: Fn.LE, Fn.GE: Fn.LT, Fn.EQ: Fn.NE, Fn.NE: Fn.EQ,
}  # fmt: skip


def _negate(node: Node) -> Node:
    if isinstance(node, Map):
        if node.fn in _NEGATED:
            # exact for whole numbers; of reals a NaN would change sides, so those stay negated
            if all(kind_of(a) is Kind.INT for a in node.args):
                return Map(_NEGATED[node.fn], node.args, loc=node.loc)
        elif node.fn is Fn.NOT:
            return node.args[0]
        elif node.fn in (Fn.AND, Fn.OR):
            fn = Fn.OR if node.fn is Fn.AND else Fn.AND
            return Map(fn, tuple(_negate(a) for a in node.args), loc=node.loc)
    return Map(Fn.NOT, (node,), loc=node.loc)


def _clauses(node: Node, query: str, key: str) -> list[Clause]:
    if isinstance(node, Lit) and isinstance(node.value, bool):
        return [Clause((), ())] if node.value else []
    if isinstance(node, Map):
        if node.fn is Fn.AND:
            left, right = (_clauses(a, query, key) for a in node.args)
            return [Clause(x.bands + y.bands, x.residual + y.residual) for x in left for y in right]
        if node.fn is Fn.OR:
            return [c for a in node.args for c in _clauses(a, query, key)]
        if node.fn is Fn.NOT:
            inner = _negate(node.args[0])
            if inner != node:
                return _clauses(inner, query, key)
        band = _band(node, query, key) if len(node.args) == 2 else None
        if band is not None:
            return [Clause((band,), ())]
    return [Clause((), (node,))]


def find_mask(node: Node, *, query: str = "T", key: str = "S") -> MaskForm:
    """Clauses of a mask; their disjunction is the mask itself, whatever was recognised."""
    clauses = _clauses(node, query, key)
    if len(clauses) > _LIMIT:
        clauses = [Clause((), (node,))]
    return MaskForm(node, tuple(clauses))
