"""Contractions of several operands whose order is open."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attncc.codegen.passes.find_softmax import histories
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, rebuild, walk
from attncc.dsl.ir import Contract, Node, Program, Softmax


@dataclass(frozen=True, slots=True)
class Loose:
    """A contraction whose order is open.

    Attributes:
        node: it, with the operands of nested contractions as its own.
        over: the history that it closes, or whose scores it gives.
        leaves: operands; factors of the probabilities are one.
        closes: it closes the history; ``leaves[0]`` are the probabilities then.
    """

    node: Contract
    over: str
    leaves: tuple[tuple[Node, ...], ...]
    closes: bool


def flat(program: Program) -> Program:
    """Nested contractions as one, where the order between them is free.

    A contraction inside another one is part of it if it holds no history, or closes one: scores
    stay together. A summed axis whose name the outer one uses keeps them apart.
    """
    known = histories(program) | {n.over for n in walk(*program.roots) if isinstance(n, Softmax)}
    memo: dict[Node, Node] = {}

    def visit(node: Node) -> Node:
        if node not in memo:
            below = rebuild(node, visit)
            memo[node] = _merged(below, known) if isinstance(below, Contract) else below
        return memo[node]

    outputs = tuple(replace(o, value=visit(o.value)) for o in program.outputs)
    same = all(a.value is b.value for a, b in zip(outputs, program.outputs, strict=True))
    return program if same else replace(program, outputs=outputs)


def _merged(node: Contract, known: frozenset[str]) -> Contract:
    args: list[Node] = []
    over = list(node.over)
    for arg in node.args:
        others = {a for n in node.args if n is not arg for a in axes_of(n)}
        inner = arg.over if isinstance(arg, Contract) else ()
        free = not set(inner) & (others | set(over)) and not known & set(axes_of(arg))
        if isinstance(arg, Contract) and free:
            args += arg.args
            over += inner
        else:
            args.append(arg)
    return node if len(args) == len(node.args) else Contract(tuple(args), tuple(over), loc=node.loc)


def find_loose(program: Program) -> list[Loose]:
    """The open contractions of a flat program, operands before those that use them."""
    known = histories(program)
    softmaxes = {n.over for n in walk(*program.roots) if isinstance(n, Softmax)}
    found = []
    for node in walk(*program.roots):
        if not isinstance(node, Contract) or len(node.args) < 3:
            continue
        loose = _open(node, known | softmaxes)
        if loose is not None:
            found.append(loose)
    return found


def _open(node: Contract, known: frozenset[str]) -> Loose | None:
    closed = [a for a in node.over if a in known]
    if closed:
        over = closed[0]
        weights = tuple(n for n in node.args if {"T", over} <= set(axes_of(n)))
        rest = tuple((n,) for n in node.args if n not in weights)
        if len(node.over) == 1 or len(rest) < 2 or not weights:
            return None
        return Loose(node, over, (weights, *rest), True)
    for over in (a for a in axes_of(node) if a in known):
        key = union(*(axes_of(n) for n in node.args if over in axes_of(n)))
        query = union(*(axes_of(n) for n in node.args if over not in axes_of(n)))
        if not set(node.over) <= set(key) & set(query):
            return Loose(node, over, tuple((n,) for n in node.args), False)
    return None
