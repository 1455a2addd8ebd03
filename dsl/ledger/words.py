"""Formulas of values in words of a layer's objects."""

from __future__ import annotations

from collections.abc import Mapping

from attncc.dsl.graph import children
from attncc.dsl.ir import (
    AtQuery,
    Between,
    Contract,
    Cumulative,
    Fn,
    Gather,
    Index,
    Input,
    Lifetime,
    Lit,
    Map,
    Node,
    Push,
    Reduce,
    Select,
    Size,
    Softmax,
    Take,
    TopK,
)
from attncc.dsl.text import INFIX

_TIGHT = frozenset({Fn.MUL, Fn.DIV, Fn.MOD})


def formula(node: Node, names: Mapping[Node, str]) -> str:
    """A value's own operation; operands that have a name stand there by name."""
    return _text(node, {n: v for n, v in names.items() if n is not node and n != node})


def _text(  # noqa: C901 - one arm a node kind
    node: Node, names: Mapping[Node, str]
) -> str:
    if node in names:
        return names[node]

    def of(operand: Node) -> str:
        return _text(operand, names)

    def tight(operand: Node) -> str:
        loose = operand not in names and isinstance(operand, Map) and operand.fn in INFIX
        return f"({of(operand)})" if loose else of(operand)

    match node:
        case Input(name=name):
            return name
        case Lit(value=value):
            return f"{value:g}" if isinstance(value, float) else str(value)
        case Size(axis=axis):
            return f"|{axis}|"
        case Index(axis=axis):
            return axis.lower()
        case Map(fn=Fn.NEG, args=(a,)):
            return f"-{tight(a)}"
        case Map(fn=Fn.NOT, args=(a,)):
            return f"~{tight(a)}"
        case Map(fn=fn, args=args) if fn in INFIX:
            wrap = of if fn in (Fn.ADD,) else tight
            return f" {INFIX[fn]} ".join(_product(a, fn, wrap(a), of(a), names) for a in args)
        case Map(fn=fn, args=args):
            return f"{fn.value}({', '.join(map(of, args))})"
        case Contract(args=args, over=over):
            return f"{' · '.join(map(tight, args))} over {' '.join(over)}"
        case Reduce(red=red, arg=arg, over=over):
            return f"{red.value} of {tight(arg)} over {' '.join(over)}"
        case Softmax(score=score, over=over):
            return f"softmax({of(score)}, {over})"
        case TopK(score=score, over=over, k=k):
            return f"topk({of(score)}, {over}, {k})"
        case Gather(arg=arg, index=index):
            return f"{tight(arg)}[{of(index)}]"
        case Take(table=table, index=index):
            return f"{tight(table)}[{of(index)}]"
        case Select(arg=arg, over=over, at=at):
            return f"{tight(arg)}[{over}={at}]"
        case AtQuery(arg=arg):
            return f"{tight(arg)} at the query"
        case Between(arg=arg):
            return f"{tight(arg)} between key and query"
        case Cumulative(arg=arg, over=over):
            return f"cumsum({of(arg)}, {over})"
        case Push(window=window, row=row):
            return f"push({of(window)}, {of(row)})"


def _product(operand: Node, parent: Fn, wrapped: str, bare: str, names: Mapping[Node, str]) -> str:
    """An operand without the parentheses that precedence makes unnecessary."""
    if operand in names or not isinstance(operand, Map):
        return wrapped
    plain = parent in (Fn.ADD, Fn.SUB) and operand.fn in _TIGHT
    return bare if plain else wrapped


def constant(node: Node) -> bool:
    """Whether a value depends on no tensor: literals, sizes and host numbers."""
    if isinstance(node, Input):
        return not node.axes and node.lifetime is Lifetime.PARAMETER
    return not isinstance(node, Index) and all(map(constant, children(node)))


_NAMES = {Fn.MUL: "multiply", Fn.DIV: "divide", Fn.SUB: "subtract", Fn.NEG: "negate"}


def functions(node: Node, stop: Mapping[Node, object]) -> tuple[str, ...]:
    """Element-wise functions from the named values below up to a value, each once.

    A product with literals, sizes and host numbers is ``scale``; constants have no functions.
    """
    found: dict[str, None] = {}

    def visit(top: Node) -> None:
        if not isinstance(top, Map) or constant(top) or (top is not node and top in stop):
            return
        for operand in top.args:
            visit(operand)
        by_constant = any(map(constant, top.args)) and top.fn in (Fn.MUL, Fn.DIV)
        found["scale" if by_constant else _NAMES.get(top.fn, top.fn.value)] = None

    visit(node)
    return tuple(found)
