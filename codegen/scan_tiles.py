"""Tiles of bodies that run as they are: which axes a program holds, and which it is cut along.

A body is affine or not, of one token or of many: what one of its values spans decides how much of
the state one program can hold. Bodies with a node or a layout that no kernel prints are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attncc.codegen.forms import Refusal
from attncc.codegen.passes.expand_windows import Body, expand_windows
from attncc.codegen.plan import Spec
from attncc.codegen.terms import depends_on_state
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, children, walk
from attncc.dsl.ir import (
    Contract,
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
    Size,
    Tensor,
)


@dataclass(frozen=True, slots=True)
class TileAxis:
    """An axis inside a program's tile: its size, and the power of two the tile spans."""

    axis: str
    size: int
    block: int

    @property
    def partial(self) -> bool:
        """Whether some places of a tile lie past the end."""
        return self.size % self.block != 0

    @property
    def blocks(self) -> int:
        """Tiles that cover the axis."""
        return -(-self.size // self.block)


@dataclass(frozen=True, slots=True)
class TiledBody:
    """A body and the tile of it that one program holds.

    Attributes:
        body: what a token does, its windows row by row.
        tile: axes inside the tile, whole.
        blocked: the axis that may be cut into blocks, or "" for none.
        grid: axes with one program per point.
        narrow: elements of the largest value, without the blocked axis.
    """

    body: Body
    tile: tuple[TileAxis, ...]
    blocked: str
    grid: tuple[str, ...]
    narrow: int

    def cut(self, width: int) -> tuple[TileAxis, ...]:
        """The tile with blocks of that width."""
        return tuple(
            TileAxis(t.axis, t.size, width) if t.axis == self.blocked else t for t in self.tile
        )


def tile_body(program: Program, spec: Spec) -> TiledBody | Refusal:
    """The body of a scan and its tile, or why no program can run it.

    Args:
        program: a scan.
        spec: of the call, with the static sizes.
    """
    body = expand_windows(program, dict(spec.static))
    refused = body if isinstance(body, Refusal) else unprintable(body.roots, program)
    if refused is not None:
        return refused
    assert isinstance(body, Body)
    whole, blocked, grid = _axes(program, body, spec)
    if "B" in summed_axes(walk(*body.roots)):
        return Refusal("a sum over the batch", program.loc)
    tile = tile_axes([*whole, *([blocked] if blocked else [])], spec)
    if isinstance(tile, Refusal):
        return Refusal(tile.reason, program.loc)
    narrow = largest(body.roots, {t.axis: t.block for t in tile if t.axis != blocked})
    return TiledBody(body, tile, blocked, grid, narrow)


def power(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(1 << max(n - 1, 0).bit_length(), least)


def summed_axes(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Axes that a contraction or sum goes over."""
    return union(*(n.over for n in nodes if isinstance(n, (Contract, Reduce))))


def _layouts(program: Program) -> Refusal | None:
    """The first layout that index arithmetic does not cover."""
    layouts = [(t.pattern, t.loc) for t in program.tensors]
    for pattern, loc in (*layouts, *((o.pattern, program.loc) for o in program.outputs)):
        if any({"B", program.scan} & set(dim[1:]) for dim in pattern.dims):
            return Refusal(f"B and {program.scan} must come first in a group of axes", loc)
    return None


def unprintable(roots: Iterable[Node], program: Program) -> Refusal | None:
    """The first node or layout that no kernel of this family can print."""
    refused = _layouts(program)
    if refused is not None:
        return refused
    for node in walk(*roots):
        match node:
            case Push():
                return Refusal("a window inside the chunk", node.loc)
            case Select(arg=Input(lifetime=Lifetime.WINDOW)):
                continue
            case Select(arg=arg) if depends_on_state(arg):
                return Refusal("one position of a state is picked", node.loc)
            case Size(axis=axis) if axis in ("B", program.scan):
                return Refusal(f"the number of {axis} is not known inside a kernel", node.loc)
            case Index(axis="B"):
                return Refusal("the place in the batch is not known inside a kernel", node.loc)
            case Input() | Lit() | Size() | Index() | Map() | Contract() | Select():
                continue
            case Reduce(red=Red.SUM):
                continue
            case _:
                return Refusal(f"no kernel code for {type(node).__name__.lower()}", node.loc)
    return None


def states_of(program: Program) -> tuple[Tensor, ...]:
    """The states of a scan as they are declared."""
    return tuple(program.tensor(n) for n in program.state_names)


def _common(program: Program) -> tuple[str, ...]:
    """Axes that every state has, but not B, in the order of the first."""
    first, *rest = (t.pattern.axes for t in states_of(program))
    return tuple(a for a in first if a != "B" and all(a in other for other in rest))


def _axes(program: Program, body: Body, spec: Spec) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Axes whole in the tile, the axis cut into blocks ("" for none), axes on the grid."""
    summed = set(summed_axes(walk(*body.roots)))
    rows = {w.axis for w in body.windows}
    free = [a for a in _common(program) if a not in summed and a not in rows]
    blocked = free[-1] if free and free[-1] in dict(spec.static) else ""
    axes = {a for root in body.roots for a in _inside(root, frozenset())} | summed
    axes -= {"B", program.scan, *free}
    order = union(*(t.pattern.axes for t in states_of(program)), sorted(axes))
    return tuple(a for a in order if a in axes), blocked, tuple(a for a in free if a != blocked)


def _inside(node: Node, picked: frozenset[str]) -> set[str]:
    """Axes that values below a node have, but for those of which one position is picked."""
    if isinstance(node, Select):
        return _inside(node.arg, picked | {node.over})
    found = set(axes_of(node)) - picked
    return found.union(*(_inside(child, picked) for child in children(node)))


def tile_axes(axes: Iterable[str], spec: Spec, least: int = 1) -> tuple[TileAxis, ...] | Refusal:
    """Whole axes inside a tile, padded to a power of two from ``least``."""
    found = []
    for a in axes:
        if a not in dict(spec.static):
            return Refusal(f"axis {a} is inside the tile, so its size must be compiled in")
        found.append(TileAxis(a, spec.size(a), power(spec.size(a), least)))
    return tuple(found)


def largest(roots: Iterable[Node], blocks: dict[str, int]) -> int:
    """Elements of the largest value of a body."""
    most = 1
    for node in walk(*roots):
        n = 1
        args = node.args if isinstance(node, Contract) else (node,)
        for axis in union(*(axes_of(a) for a in args)):
            n *= blocks.get(axis, 1)
        most = max(most, n)
    return most
