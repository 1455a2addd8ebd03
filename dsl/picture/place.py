"""A layered layout: ranks from top to bottom, few crossings, nothing on top of anything else.

The steps are those of Sugiyama, Tagawa and Toda (1981): ranks by longest path, a chain of points
for every edge that passes ranks, an order within ranks by barycentres, then positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attncc.dsl.picture.figure import Figure, Mark, Vertex

CHAR, SMALL = 7.0, 6.1
"""Width of a character of a label and of a detail, in pixels (upper bounds of the fonts' means)."""

BOX_HEIGHT, RADIUS = 26.0, 7.0
RANK, GAP, BEND, LANE = 52.0, 22.0, 14.0, 14.0
"""Distance of ranks, between neighbours, and the width that a passing and a returning edge take."""

_SWEEPS, _PULLS = 16, 80
_BEND = "bend "
_WEIGHT = {(True, True): 8.0, (True, False): 1.0, (False, True): 0.4, (False, False): 1.0}
"""How strongly neighbours pull: by whether the one, and the other, is a point of a long edge."""


@dataclass(slots=True)
class Placed:
    """A figure with positions.

    Attributes:
        figure: what is drawn.
        at: centre of the mark of each vertex.
        span: left and right end of each vertex, its label included, relative to the mark's centre.
        bends: points that each edge passes, by index in the figure's edges.
        width: of the panel.
        height: of the panel.
        lanes: where edges that lead far back go up, by index.
    """

    figure: Figure
    at: dict[str, tuple[float, float]]
    span: dict[str, tuple[float, float]]
    bends: dict[int, list[tuple[float, float]]]
    width: float = 0.0
    height: float = 0.0
    lanes: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Grid:
    """Ranks of vertices and passing points, and who is connected to whom in the next rank."""

    ranks: list[list[str]]
    up: dict[str, list[str]] = field(default_factory=dict)
    down: dict[str, list[str]] = field(default_factory=dict)
    span: dict[str, tuple[float, float]] = field(default_factory=dict)

    def join(self, above: str, below: str) -> None:
        self.down.setdefault(above, []).append(below)
        self.up.setdefault(below, []).append(above)


def route(placed: Placed, index: int) -> list[tuple[float, float]]:
    """The points of an edge, from mark to mark.

    It is upright beside marks and turns only between ranks, so that it crosses no box. An edge back
    to the rank above goes up in the gap left of its target, one further back in a lane at the
    right.
    """
    edge, half = placed.figure.edges[index], BOX_HEIGHT / 2
    (x, y), (u, v) = placed.at[edge.source], placed.at[edge.target]
    if edge.back and index in placed.lanes:
        lane, below, above = placed.lanes[index], y + half + 7, v - RADIUS - 10
        corners = [(x, below), (lane, below), (lane, above), (u, above)]
        return [(x, y + half), *corners, (u, v - RADIUS - 1)]
    if edge.back:
        side = u - RADIUS - 3 - GAP / 2
        left, right = placed.span[edge.source]
        start = min(max(side, x + left + 5), x + right - 5)
        return [(start, y - half), (side, v + half + 1), (side, v), (u - RADIUS - 2, v)]
    points = [(x, y + reach(placed.figure, edge.source)), (x, y + half + 1)]
    for a, b in placed.bends.get(index, []):
        points += [(a, b - half - 1), (a, b + half + 1)]
    return [*points, (u, v - half - 1), (u, v - reach(placed.figure, edge.target) - 1)]


def reach(figure: Figure, name: str) -> float:
    """How far a mark reaches above and below its centre."""
    return BOX_HEIGHT / 2 if figure.vertex(name).mark is Mark.BOX else RADIUS


def extent(vertex: Vertex) -> tuple[float, float]:
    """Left and right end of a vertex, relative to the centre of its mark."""
    if vertex.mark is Mark.BOX:
        half = max(18.0, len(vertex.label) * CHAR / 2 + 9)
        return -half, half
    label = max(len(vertex.label) * CHAR, len(vertex.detail) * SMALL)
    return -RADIUS - 3, RADIUS + 7 + label


def place(figure: Figure) -> Placed:
    """Positions for every vertex of a figure."""
    rank = _ranks(figure)
    grid, chains = _grid(figure, rank)
    _order(grid)
    xs = _columns(grid)
    left = min(xs[n] + grid.span[n][0] for row in grid.ranks for n in row) - GAP
    at = {n: (xs[n] - left, r * RANK + RANK) for r, row in enumerate(grid.ranks) for n in row}
    names = {v.name for v in figure.vertices}
    placed = Placed(
        figure, {n: p for n, p in at.items() if n in names},
        {n: s for n, s in grid.span.items() if n in names},
        {i: [at[n] for n in chain] for i, chain in chains.items()},
    )  # fmt: skip
    placed.width = max(at[n][0] + grid.span[n][1] for n in at) + GAP
    placed.height = RANK * (len(grid.ranks) + 1)
    for i, e in enumerate(figure.edges):
        if e.back and rank[e.source] - rank[e.target] > 1:
            placed.lanes[i] = placed.width
            placed.width += LANE
    return placed


def _ranks(figure: Figure) -> dict[str, int]:
    """Longest path from a vertex without predecessor; sources come down to their first reader."""
    forward = [e for e in figure.edges if not e.back]
    rank = {v.name: 0 for v in figure.vertices}
    for _ in figure.vertices:
        changed = False
        for e in forward:
            if rank[e.target] <= rank[e.source]:
                rank[e.target] = rank[e.source] + 1
                changed = True
        if not changed:
            break
    fed = {e.target for e in forward}
    for v in figure.vertices:
        readers = [rank[e.target] for e in forward if e.source == v.name]
        if v.name not in fed and readers:
            rank[v.name] = min(readers) - 1
    return rank


def _grid(figure: Figure, rank: Mapping[str, int]) -> tuple[_Grid, dict[int, list[str]]]:
    grid = _Grid([[] for _ in range(max(rank.values(), default=0) + 1)])
    for v in figure.vertices:
        grid.ranks[rank[v.name]].append(v.name)
        grid.span[v.name] = extent(v)
    chains: dict[int, list[str]] = {}
    for i, e in enumerate(figure.edges):
        if e.back:
            continue
        above = e.source
        for r in range(rank[e.source] + 1, rank[e.target]):
            name = f"{_BEND}{i} {r}"
            grid.ranks[r].append(name)
            grid.span[name] = (-BEND / 2, BEND / 2)
            chains.setdefault(i, []).append(name)
            grid.join(above, name)
            above = name
        grid.join(above, e.target)
    return grid, chains


def _order(grid: _Grid) -> None:
    """Sort each rank by the mean place of its neighbours, down and up in turn; keep the best."""
    best, least = [list(r) for r in grid.ranks], _crossings(grid)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        ranks = range(1, len(grid.ranks)) if down else range(len(grid.ranks) - 2, -1, -1)
        for r in ranks:
            beside = grid.ranks[r - 1 if down else r + 1]
            place_of = {n: i for i, n in enumerate(beside)}
            links = grid.up if down else grid.down
            own = {n: i for i, n in enumerate(grid.ranks[r])}
            key = {n: _mean([place_of[m] for m in links.get(n, ())], own[n]) for n in own}
            grid.ranks[r].sort(key=lambda n: (key[n], own[n]))
        count = _crossings(grid)
        if count < least:
            best, least = [list(row) for row in grid.ranks], count
    grid.ranks = best


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(grid: _Grid) -> int:
    total = 0
    for above, below in zip(grid.ranks, grid.ranks[1:], strict=False):
        place_of = {n: i for i, n in enumerate(below)}
        ends = [(i, place_of[m]) for i, n in enumerate(above) for m in grid.down.get(n, ())]
        total += sum(
            (a - c) * (b - d) < 0 for k, (a, b) in enumerate(ends) for c, d in ends[k + 1 :]
        )
    return total


def _columns(grid: _Grid) -> dict[str, float]:
    """Positions within ranks: pulled towards neighbours, never closer than the gap."""
    xs: dict[str, float] = {}
    for row in grid.ranks:
        _pack(row, {n: 0.0 for n in row}, grid.span, xs)
    for step in range(_PULLS):
        rows = grid.ranks if step % 2 == 0 else grid.ranks[::-1]
        for row in rows:
            _pack(row, {n: _wished(grid, n, xs) for n in row}, grid.span, xs)
    return xs


def _wished(grid: _Grid, name: str, xs: Mapping[str, float]) -> float:
    """Where a vertex would like to be: by its neighbours, passing edges straight first."""
    total = weights = 0.0
    for other in (*grid.up.get(name, ()), *grid.down.get(name, ())):
        weight = _WEIGHT[_passes(name), _passes(other)]
        total, weights = total + weight * xs[other], weights + weight
    return total / weights if weights else xs[name]


def _passes(name: str) -> bool:
    return name.startswith(_BEND)


def _pack(
    row: Sequence[str], wish: Mapping[str, float], span: Mapping[str, tuple[float, float]],
    xs: dict[str, float],
) -> None:  # fmt: skip
    """The nearest positions to those wished for that keep the order and the gaps.

    Neighbours that would overlap form a block at the mean of what they wish (the pool-adjacent-
    violators algorithm of isotonic regression, exact for squared distances).
    """
    offset = 0.0
    offsets = []
    for i, n in enumerate(row):
        if i:
            offset += span[row[i - 1]][1] + GAP - span[n][0]
        offsets.append(offset)
    blocks: list[tuple[float, int]] = []  # mean of wish less offset, how many
    for n, o in zip(row, offsets, strict=True):
        mean, count = wish[n] - o, 1
        while blocks and blocks[-1][0] > mean:
            above, many = blocks.pop()
            mean, count = (above * many + mean * count) / (many + count), many + count
        blocks.append((mean, count))
    values: Iterable[float] = (mean for mean, count in blocks for _ in range(count))
    for n, o, value in zip(row, offsets, values, strict=True):
        xs[n] = value + o
