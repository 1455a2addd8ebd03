"""Contractions over a history, expanded until each closes exactly one softmax.

``dot(a - c * b, v, "S")`` of two softmaxes a, b is ``dot(a, v, "S") - c * dot(b, v, "S")``: two
folds and element-wise code over them. Factors without the history axis leave the sum.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.forms import Refusal
from attncc.codegen.terms import number, product
from attncc.dsl.graph import axes_of, rebuild
from attncc.dsl.ir import Contract, Fn, Map, Node, Program, Softmax

Term = list[Node]


class Stop(Exception):
    """Ends the search for a score form."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


def expand_folds(program: Program) -> Program:
    """The same program with its folds one by one.

    Raises:
        Stop: probabilities are used otherwise than in a sum that is linear in them.
    """
    memo: dict[Node, Node] = {}

    def visit(node: Node) -> Node:
        if node not in memo:
            below = rebuild(node, visit)
            memo[node] = _expanded(below) if isinstance(below, Contract) else below
        return memo[node]

    outputs = tuple(replace(o, value=visit(o.value)) for o in program.outputs)
    if all(a.value is b.value for a, b in zip(outputs, program.outputs, strict=True)):
        return program
    return replace(program, outputs=outputs)


def holds_softmax(node: Node, over: str) -> bool:
    """Whether a value that still has the history axis is made from probabilities of it."""
    return over in axes_of(node) and any(
        isinstance(n, Softmax) and n.over == over for n in _open(node, over)
    )


def _open(node: Node, over: str) -> list[Node]:
    """Nodes below that still have the axis: what was closed further down does not count."""
    found, stack, seen = [], [node], {node}
    while stack:
        n = stack.pop()
        found.append(n)
        if isinstance(n, (Map, Contract)):
            below = [c for c in n.args if over in axes_of(c) and c not in seen]
            seen.update(below)
            stack.extend(below)
    return found


def _expanded(node: Contract) -> Node:
    """The contraction as a sum of contractions of one softmax each."""
    if len(node.over) != 1 or not any(holds_softmax(a, node.over[0]) for a in node.args):
        return node
    over = node.over[0]
    terms: list[Term] = [[]]
    for arg in node.args:
        terms = [left + right for left in terms for right in _terms(arg, over)]
    if len(terms) == 1 and all(over in axes_of(f) for f in terms[0]):
        return node
    total: Node | None = None
    for term in terms:
        value = _closed(term, over, node)
        total = value if total is None else Map(Fn.ADD, (total, value), loc=node.loc)
    assert total is not None
    return total


def _closed(term: Term, over: str, node: Contract) -> Node:
    inside = [f for f in term if over in axes_of(f)]
    outside = [f for f in term if over not in axes_of(f)]
    if len(inside) < 2:
        raise Stop(Refusal("probabilities are summed without a value", node.loc))
    closed = Contract(tuple(inside), (over,), loc=node.loc)
    return product([*outside, closed])


def _terms(node: Node, over: str) -> list[Term]:
    """A factor as a sum of products; what holds no probabilities stays whole."""
    if isinstance(node, Softmax) or not holds_softmax(node, over):
        return [[node]]
    match node:
        case Map(fn=Fn.MUL, args=(a, b)):
            return [x + y for x in _terms(a, over) for y in _terms(b, over)]
        case Map(fn=Fn.ADD, args=(a, b)):
            return _terms(a, over) + _terms(b, over)
        case Map(fn=Fn.SUB, args=(a, b)):
            return _terms(a, over) + [[number(-1), *t] for t in _terms(b, over)]
        case Map(fn=Fn.NEG, args=(a,)):
            return [[number(-1), *t] for t in _terms(a, over)]
        case Map(fn=Fn.DIV, args=(a, b)) if not holds_softmax(b, over):
            inverse = Map(Fn.DIV, (number(1), b), loc=node.loc)
            return [[*t, inverse] for t in _terms(a, over)]
        case _:
            raise Stop(Refusal("probabilities are used non-linearly", node.loc))
