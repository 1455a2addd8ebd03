"""Windows row by row: sums over a window's axis are written out, so that no value has the axis.

A kernel keeps each row of a window in a variable of its own (widths are small and no powers of
two). Of a window ``win`` of W rows, ``Select(win, "W", j)`` is its stored row j, the oldest first;
the row that is pushed is an ordinary value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from attncc.codegen.forms import Refusal
from attncc.codegen.terms import add, number
from attncc.dsl.facts import window_axis
from attncc.dsl.graph import axes_of, rebuild
from attncc.dsl.ir import (
    Contract,
    Fn,
    Index,
    Input,
    Lifetime,
    Lit,
    Map,
    Node,
    Program,
    Push,
    Red,
    Reduce,
    Select,
)

_JOIN = {Red.SUM: Fn.ADD, Red.MAX: Fn.MAX, Red.MIN: Fn.MIN}


@dataclass(frozen=True, slots=True)
class Rows:
    """A window after the token.

    Attributes:
        name: the window.
        axis: the axis of its rows.
        old: the stored rows before the token, as nodes; the oldest first, W - 1 of them.
        new: the rows after it.
    """

    name: str
    axis: str
    old: tuple[Node, ...]
    new: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """A scan's body without pushes: its outputs, its states' new values, its windows' rows."""

    outputs: tuple[Node, ...]
    states: tuple[tuple[str, Node], ...]
    windows: tuple[Rows, ...]

    @property
    def roots(self) -> tuple[Node, ...]:
        """Every value that leaves the body."""
        rows = (n for w in self.windows for n in w.new)
        return (*self.outputs, *(n for _, n in self.states), *rows)


def expand_windows(program: Program, sizes: Mapping[str, int]) -> Body | Refusal:
    """A scan's body with its windows written out.

    Args:
        program: a scan.
        sizes: compiled-in sizes; of a window's axis, the rows in the body.

    Returns:
        The body, or what stands in the way.
    """
    held = [t for t in program.tensors if t.lifetime is Lifetime.WINDOW]
    axes = {t.name: window_axis(program, t.name) for t in held}
    for t in held:
        axis = axes[t.name]
        if axis not in sizes:
            return Refusal(f"the window's axis {axis} must be compiled in", t.loc)
        if any(axis in dim and len(dim) > 1 for dim in t.pattern.dims):
            return Refusal(f"the window's axis {axis} shares a memory axis", t.loc)
    expand = _Expand({a: sizes[a] for a in axes.values()})
    states, windows = [], []
    for update in program.states:
        if update.name not in axes:
            states.append((update.name, expand.visit(update.value)))
            continue
        t, axis = program.tensor(update.name), axes[update.name]
        window = Input(t.name, t.pattern.axes, t.lifetime, t.kind, loc=t.loc)
        old = tuple(Select(window, axis, j, loc=t.loc) for j in range(sizes[axis] - 1))
        new = tuple(expand.visit(expand.pick(update.value, axis, j + 1)) for j in range(len(old)))
        windows.append(Rows(t.name, axis, old, new))
    outputs = tuple(expand.visit(o.value) for o in program.outputs)
    return Body(outputs, tuple(states), tuple(windows))


class _Expand:
    """Rewrites values; ``sizes`` are those of the windows' axes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self._memo: dict[Node, Node] = {}
        self._picked: dict[tuple[Node, str, int], Node] = {}

    def visit(self, node: Node) -> Node:
        """The value with sums over windows written out."""
        if node not in self._memo:
            self._memo[node] = self._visit(node)
        return self._memo[node]

    def _visit(self, node: Node) -> Node:
        match node:
            case Contract(over=over) | Reduce(over=over) if set(over) & self.sizes.keys():
                axis = next(a for a in over if a in self.sizes)
                return self.visit(self._written(node, axis))
            case Select(arg=arg, over=axis, at=at):
                picked = self.pick(arg, axis, at)
                return node if picked == node else self.visit(picked)
            case _:
                return rebuild(node, self.visit)

    def _written(self, node: Contract | Reduce, axis: str) -> Node:
        """One sum as a sum of picked rows."""
        rest = tuple(a for a in node.over if a != axis)
        parts: list[Node] = []
        for j in range(self.sizes[axis]):
            if isinstance(node, Reduce):
                part = self.pick(node.arg, axis, j)
                parts.append(replace(node, arg=part, over=rest) if rest else part)
                continue
            args = tuple(self.pick(a, axis, j) for a in node.args)
            parts.append(Contract(args, rest, loc=node.loc) if rest else _product(args, node))
        return _joined(parts, Red.SUM if isinstance(node, Contract) else node.red, node)

    def pick(self, node: Node, axis: str, at: int) -> Node:
        """One position of an axis of a value, picked as deep inside it as can be."""
        key = (node, axis, at)
        if key not in self._picked:
            self._picked[key] = self._pick(node, axis, at)
        return self._picked[key]

    def _pick(self, node: Node, axis: str, at: int) -> Node:
        if axis not in axes_of(node):
            return node
        match node:
            case Input():
                return Select(node, axis, at, loc=node.loc)
            case Index():
                return Lit(at, loc=node.loc)
            case Push(window=window, row=row, over=over) if over == axis:
                last = self.sizes[axis] - 1
                return row if at == last else Select(window, axis, at, loc=node.loc)
            case Map() | Contract() | Reduce() | Push() | Select():
                return rebuild(node, lambda n: self.pick(n, axis, at))
            case _:
                return Select(node, axis, at, loc=node.loc)


def _product(args: Iterable[Node], node: Node) -> Node:
    first, *rest = args
    for arg in rest:
        first = Map(Fn.MUL, (first, arg), loc=node.loc)
    return first


def _joined(parts: list[Node], red: Red, node: Node) -> Node:
    if red is Red.SUM:
        return add(*parts) or number(0)
    first, *rest = parts
    for part in rest:
        first = Map(_JOIN[red], (first, part), loc=node.loc)
    return first
