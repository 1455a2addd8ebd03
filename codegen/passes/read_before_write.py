"""Reads a state before its last write: both sums of a step side by side.

A token that reads its state, corrects it by the outer product a (x) u and reads it again sums over
the state twice, one sum behind the other. But b . (P + a (x) u) = b . P + (b . a) u: the read-out
can be of P, beside the read that u comes from, and one sum of vectors more.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.passes.expand_windows import Body
from attncc.codegen.terms import depends_on_state, factors, mul, product, split
from attncc.dsl.graph import rebuild
from attncc.dsl.ir import Contract, Fn, Map, Node


def read_before_write(body: Body) -> Body:
    """The body, with outputs that read the states before the last outer product is added to them.

    What cannot be read so stays as it is. Sums are rounded otherwise: not for outputs that hold
    more than 16 bits.
    """
    states = tuple(value for _, value in body.states)
    memo: dict[Node, Node] = {}

    def visit(node: Node) -> Node:
        if node not in memo:
            found = _apart(node, states) if isinstance(node, Contract) else None
            memo[node] = rebuild(node, visit) if found is None else found
        return memo[node]

    return replace(body, outputs=tuple(visit(o) for o in body.outputs))


def _apart(read: Contract, states: tuple[Node, ...]) -> Node | None:
    """A read of a state after the token, by what it was before the last write; or None."""
    new = [a for a in read.args if a in states]
    vectors = [a for a in read.args if a not in states]
    if len(new) != 1 or any(depends_on_state(v) for v in vectors):
        return None
    [state] = new
    if not isinstance(state, Map) or state.fn is not Fn.ADD:
        return None
    for kept, added in (state.args, state.args[::-1]):
        along, row = split(factors(added), read.over)
        if along and row and not any(depends_on_state(a) for a in along):
            before = Contract((kept, *vectors), read.over, loc=read.loc)
            weight = Contract((*along, *vectors), read.over, loc=read.loc)
            u = product(row)
            # of an infinite u the state has infinities of both signs: a NaN where they are added
            spoilt = Map(Fn.SUB, (u, u), loc=read.loc)
            write = Map(Fn.ADD, (mul(weight, u), spoilt), loc=read.loc)
            return Map(Fn.ADD, (before, write), loc=read.loc)
    return None
