"""Rows of a token that share an expression, but for the position that each of them picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attncc.dsl.graph import rebuild, walk
from attncc.dsl.ir import Lit, Node, Select


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows with one expression.

    Attributes:
        node: the expression; without its picks where there are several rows.
        rows: their numbers within the token, ascending.
        axes: the axes that were picked along.
        shift: a row's number less the position that it picks.
    """

    node: Node
    rows: tuple[int, ...]
    axes: tuple[str, ...] = ()
    shift: int = 0


def unpicked(node: Node, at: int) -> Node:
    """The expression without its picks of position ``at``."""
    if isinstance(node, Select) and node.at == at:
        return unpicked(node.arg, at)
    return rebuild(node, lambda n: unpicked(n, at))


def row_groups(nodes: Sequence[Node | None]) -> tuple[RowGroup, ...]:
    """The rows of a token by expression, in the order of their first rows; None is 0."""
    found: dict[tuple[Node, tuple[str, ...], int], list[int]] = {}
    for i, node in enumerate(Lit(0.0) if n is None else n for n in nodes):
        picks = [n for n in walk(node) if isinstance(n, Select)]
        at = {n.at for n in picks}
        key: tuple[Node, tuple[str, ...], int] = (node, (), 0)
        if len(at) == 1:
            [position] = at
            axes = tuple(sorted({n.over for n in picks}))
            key = (unpicked(node, position), axes, i - position)
        found.setdefault(key, []).append(i)
    return tuple(
        RowGroup(node, tuple(rows), axes, shift) if len(rows) > 1 else _alone(nodes, rows[0])
        for (node, axes, shift), rows in found.items()
    )


def _alone(nodes: Sequence[Node | None], row: int) -> RowGroup:
    node = nodes[row]
    return RowGroup(Lit(0.0) if node is None else node, (row,))
