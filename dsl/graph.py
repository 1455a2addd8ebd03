"""Facts about nodes: operands, axes, kinds, and walks over shared expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from attncc.dsl.axes import union
from attncc.dsl.ir import (
    COMPARISONS,
    LOGIC,
    AtQuery,
    Between,
    Contract,
    Cumulative,
    Fn,
    Gather,
    Index,
    Input,
    Kind,
    Lit,
    Map,
    Node,
    NodeBase,
    Push,
    Reduce,
    Select,
    Size,
    Softmax,
    Take,
    TopK,
)

_T = TypeVar("_T")


def children(node: Node) -> tuple[Node, ...]:
    """The operands of a node, in a fixed order."""
    match node:
        case Map(args=args) | Contract(args=args):
            return args
        case Softmax(score=score, where=where, sink=sink, beside=beside):
            return (*(n for n in (score, where, sink) if n is not None), *beside)
        case TopK(score=score, where=where):
            return (score,) if where is None else (score, where)
        case Gather(arg=arg, index=index):
            return (arg, index)
        case Take(table=table, index=index):
            return (table, index)
        case Push(window=window, row=row):
            return (window, row)
        case Reduce(arg=arg) | Cumulative(arg=arg) | Select(arg=arg):
            return (arg,)
        case AtQuery(arg=arg) | Between(arg=arg):
            return (arg,)
        case Input() | Lit() | Size() | Index():
            return ()


def rebuild(node: Node, visit: Callable[[Node], Node]) -> Node:
    """The node with each operand replaced by ``visit(operand)``; itself if nothing changed."""
    changed: dict[str, Any] = {}
    for f in fields(node):
        value = getattr(node, f.name)
        if isinstance(value, NodeBase):
            new = visit(cast(Node, value))
            if new is not value:
                changed[f.name] = new
        elif f.name in ("args", "beside"):
            args = tuple(visit(a) for a in value)
            if any(a is not b for a, b in zip(args, value, strict=True)):
                changed[f.name] = args
    return replace(node, **changed) if changed else node


def axes_of(node: Node, _memo: dict[Node, tuple[str, ...]] | None = None) -> tuple[str, ...]:
    """The axes of a value, in order of first appearance."""
    memo: dict[Node, tuple[str, ...]] = {} if _memo is None else _memo
    return _remembered(node, memo, _axes)


def _remembered(
    node: Node, memo: dict[Node, _T], rule: Callable[[Node, Callable[[Node], _T]], _T]
) -> _T:
    """A fact about a node that follows from its operands', without a deep stack."""
    stack = [node]
    while stack:
        top = stack[-1]
        missing = [c for c in children(top) if c not in memo]
        stack.extend(missing)
        if not missing:
            memo[stack.pop()] = rule(top, memo.__getitem__)
    return memo[node]


def _axes(  # noqa: C901 - one arm a node kind
    node: Node, of: Callable[[Node], tuple[str, ...]]
) -> tuple[str, ...]:
    match node:
        case Input(axes=axes):
            return axes
        case Lit() | Size():
            return ()
        case Index(axis=axis, scalar=scalar):
            return () if scalar else (axis,)
        case Map(args=args):
            return union(*map(of, args))
        case Contract(args=args, over=over):
            return tuple(a for a in union(*map(of, args)) if a not in over)
        case Reduce(arg=arg, over=over):
            return tuple(a for a in of(arg) if a not in over)
        case Softmax(over=axis, beside=beside):
            own = (of(n) for n in (node.where, node.sink) if n is not None)
            rows = ((a for a in of(n) if a != n.over) for n in beside)
            return union(of(node.score), (axis,), *own, *rows)
        case Cumulative(arg=arg):
            return of(arg)
        case TopK(score=score, over=axis, axis=new, where=where):
            seen = union(of(score), () if where is None else of(where))
            return (*(a for a in seen if a != axis), new)
        case Gather(arg=arg, index=index, over=axis):
            return union(of(index), (a for a in of(arg) if a != axis))
        case Take(table=table, over=axis, index=index):
            return union(of(index), (a for a in of(table) if a != axis))
        case Select(arg=arg, over=axis):
            return tuple(a for a in of(arg) if a != axis)
        case AtQuery(arg=arg, over=axis):
            return union("T" if a == axis else a for a in of(arg))
        case Between(arg=arg):
            return union(of(arg), ("T",))
        case Push(window=window, row=row):
            return union(of(window), of(row))


def kind_of(node: Node, _memo: dict[Node, Kind] | None = None) -> Kind:
    """Whether a value is a number, a whole number or a truth value."""
    memo: dict[Node, Kind] = {} if _memo is None else _memo
    return _remembered(node, memo, _kind)


_KEEPS_WHOLE = frozenset({Fn.ADD, Fn.SUB, Fn.MUL, Fn.MOD, Fn.NEG, Fn.ABS, Fn.MIN, Fn.MAX, Fn.WHERE})


def _kind(node: Node, of: Callable[[Node], Kind]) -> Kind:
    match node:
        case Input(kind=kind):
            return kind
        case Lit(value=value):
            if isinstance(value, bool):
                return Kind.BOOL
            return Kind.INT if isinstance(value, int) else Kind.REAL
        case Size() | Index() | TopK():
            return Kind.INT
        case Map(fn=fn, args=args):
            if fn in COMPARISONS or fn in LOGIC:
                return Kind.BOOL
            kinds = {of(a) for a in (args[1:] if fn is Fn.WHERE else args)}
            return kinds.pop() if len(kinds) == 1 and fn in _KEEPS_WHOLE else Kind.REAL
        case Select(arg=arg) | AtQuery(arg=arg) | Gather(arg=arg) | Take(table=arg):
            return of(arg)
        case _:
            return Kind.REAL


def walk(*roots: Node) -> Iterator[Node]:
    """Every node below the roots once, operands before the nodes that use them."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children(node)))
