"""What the user called the values of a body, read from the lines that made them."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Mapping
from functools import lru_cache

from attncc.dsl.graph import children
from attncc.dsl.ir import Node

_Place = tuple[int, int]


@lru_cache(maxsize=64)
def _assignments(file: str, text: str) -> Mapping[_Place, tuple[str, int]]:
    """Where each assigned expression starts: its variable, and the column where it ends.

    The end is 0 where the expression has several lines, as in :class:`attncc.dsl.loc.Loc`.
    """
    found: dict[_Place, tuple[str, int]] = {}
    try:
        tree = ast.parse(text, filename=file)
    except SyntaxError:
        return found
    lines = text.splitlines()
    for statement in ast.walk(tree):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                held: ast.stmt | ast.expr = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                held = value
            case ast.AugAssign(target=ast.Name(id=name)):
                held = statement
            case _:
                continue
        line = lines[held.lineno - 1]
        end = held.end_col_offset if held.end_lineno == held.lineno else None
        stop = 0 if end is None else _column(line, end)
        found[held.lineno, _column(line, held.col_offset)] = (name, stop)
    return found


def _column(line: str, offset: int) -> int:
    return len(line.encode()[:offset].decode(errors="ignore")) + 1


def variable(node: Node) -> str | None:
    """The variable that a node's line assigns it to; None where the line cannot be read."""
    loc = node.loc
    if not loc.line or not loc.col:
        return None
    text = "".join(linecache.getlines(loc.file))
    name, stop = _assignments(loc.file, text).get((loc.line, loc.col), (None, 0))
    return name if name is not None and stop == loc.end_col else None


def variables(nodes: Iterable[Node]) -> dict[Node, str]:
    """The variables of values.

    An assignment over several lines could mean any value that starts where it does: the outermost.
    """
    named = {n: v for n in nodes if (v := variable(n)) is not None}
    inner = {
        child
        for node in named
        for child in children(node)
        if child in named and child.loc == node.loc and not node.loc.end_col
    }
    return {n: v for n, v in named.items() if n not in inner}
