"""Small algebra on nodes: products and sums as flat lists, and back."""

from __future__ import annotations

from collections.abc import Iterable

from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Fn, Input, Lifetime, Lit, Map, Node


def number(value: float) -> Lit:
    """A real literal."""
    return Lit(float(value))


def is_number(node: Node | None, value: float) -> bool:
    """Whether a node is the literal ``value``."""
    return isinstance(node, Lit) and not isinstance(node.value, bool) and node.value == value


def mul(*nodes: Node | None) -> Node:
    """Product; None and 1 are neutral, an empty product is 1."""
    result: Node | None = None
    for node in nodes:
        if node is None or is_number(node, 1):
            continue
        result = node if result is None else Map(Fn.MUL, (result, node), loc=node.loc)
    return number(1) if result is None else result


def add(*nodes: Node | None) -> Node | None:
    """Sum; None is 0, an empty sum is None."""
    result: Node | None = None
    for node in nodes:
        if node is None or is_number(node, 0):
            continue
        result = node if result is None else Map(Fn.ADD, (result, node), loc=node.loc)
    return result


def neg(node: Node) -> Node:
    """Negation, with literals and double negation folded."""
    if isinstance(node, Lit):
        return Lit(-node.value, loc=node.loc)
    if isinstance(node, Map) and node.fn is Fn.NEG:
        return node.args[0]
    return Map(Fn.NEG, (node,), loc=node.loc)


def factors(node: Node) -> list[Node]:
    """Factors of a product, nested products opened; signs gathered into one -1."""
    found: list[Node] = []
    sign = 1.0
    stack = [node]
    while stack:
        n = stack.pop()
        if isinstance(n, Map) and n.fn is Fn.MUL:
            stack.extend(reversed(n.args))
        elif isinstance(n, Map) and n.fn is Fn.NEG:
            sign = -sign
            stack.append(n.args[0])
        elif is_number(n, -1):
            sign = -sign
        elif not is_number(n, 1):
            found.append(n)
    if sign < 0:
        found.insert(0, number(-1))
    return found


def product(nodes: Iterable[Node]) -> Node:
    """Product of factors; a factor of -1 becomes a negation of the rest."""
    rest = list(nodes)
    sign = sum(1 for n in rest if is_number(n, -1)) % 2
    value = mul(*(n for n in rest if not is_number(n, -1)))
    return neg(value) if sign else value


def split(nodes: Iterable[Node], axes: Iterable[str]) -> tuple[list[Node], list[Node]]:
    """Factors that have one of the axes, and the others."""
    wanted = set(axes)
    having = [n for n in nodes]
    return (
        [n for n in having if wanted & set(axes_of(n))],
        [n for n in having if not wanted & set(axes_of(n))],
    )


def depends_on_state(node: Node) -> bool:
    """Whether a value reads a carried state or window."""
    held = (Lifetime.STATE, Lifetime.WINDOW)
    return any(isinstance(n, Input) and n.lifetime in held for n in walk(node))


def depends_on(node: Node, names: frozenset[str]) -> bool:
    """Whether a value reads one of these carried objects."""
    held = (Lifetime.STATE, Lifetime.WINDOW)
    return any(isinstance(n, Input) and n.lifetime in held and n.name in names for n in walk(node))
