"""Which forms of its parts a warp-specialised tile takes, as registers and shared memory allow."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.target import shared_limit
from attncc.codegen.tiles import Tiles
from attncc.dsl.graph import axes_of, children
from attncc.dsl.ir import COMPARISONS, AtQuery, Index, Input, Map, Node

NUMBERS = 1 << 10
"""Bytes of shared memory for barriers and what is known of pieces of work, at most."""


class Tanh(enum.Enum):
    """How a score's tanh is computed; the special-function unit is what a soft cap waits for.

    ``QUOTIENT`` is exact to fp32 where it is not small, with two special functions; ``SERIES`` a
    polynomial in exp(-2 |x|), within 5.2e-5 of the value, with one. The machine's own
    instruction is within 2^-11, more than the contract allows where scores near a cap of 40 or more
    are common.
    """

    QUOTIENT = "quotient"
    SERIES = "series"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """Forms of a tile's parts; None leaves one to the rule.

    The rule takes the newer form of each where no lse is written and blocks have 128 keys:
    elsewhere polynomials and values a key leave no registers.

    Attributes:
        query_places: tiles of queries in shared memory, 1 or 2.
        wide_stores: outputs change their layout on their way.
        edges: rows' first and last keys, where a mask is one clause of bands of one key each.
        linear: the form of scores linear in the key's position; never with an lse.
        tanh: of a bf16 score; with an lse, or for fp16, always ``QUOTIENT``.
    """

    query_places: int | None = None
    wide_stores: bool | None = None
    edges: bool | None = None
    linear: bool | None = None
    tanh: Tanh | None = None


RULED = Forms()
"""Everything is left to the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The forms of a plan; see :class:`~attncc.codegen.plan_gluon.WarpPlan`."""

    query_places: int
    wide_stores: bool
    edges: bool
    linear: bool
    tanh: Tanh


PLAIN = Fitted(query_places=1, wide_stores=False, edges=False, linear=False, tanh=Tanh.QUOTIENT)
"""None of the newer ones."""


def fitted(
    whole: TiledPlan,
    rows: int,
    width_e: int,
    tiles: Tiles,
    given: Forms,
    target: str,
    *,
    roomy: bool,
) -> Fitted:
    """The forms of a tile.

    Args:
        whole: the plan of the Triton tile.
        rows: of the tile.
        width_e: columns of the value.
        tiles: keys of a block, and blocks in flight.
        given: what is fixed.
        target: ``sm_90``, whose shared memory has to hold two tiles of queries and the outputs.
        roomy: blocks need not be small for their values' sake.
    """
    newer = roomy and not whole.lse
    width_k = whole.blocks_k[0]
    rings = tiles.num_stages * tiles.block_n * (width_k + width_e) * 2
    room = shared_limit(target) - rings - NUMBERS
    wide = _else(given.wide_stores, newer) and rows * (width_k + width_e) * 2 <= room
    room -= rows * width_e * 2 if wide else 0
    places = given.query_places or (2 if newer else 1)
    short = not whole.lse and whole.operand[0] == "bf16"
    tanh = given.tanh or (Tanh.SERIES if newer else Tanh.QUOTIENT)
    return Fitted(
        query_places=max(1, min(places, room // (rows * width_k * 2))),
        wide_stores=wide,
        edges=_else(given.edges, newer) and _edged(whole),
        linear=_else(given.linear, newer) and not whole.lse,
        tanh=tanh if short else Tanh.QUOTIENT,
    )


def _else(given: bool | None, rule: bool) -> bool:
    return rule if given is None else given


def _edged(whole: TiledPlan) -> bool:
    """Whether a row sees the keys between its first and its last one, but for predicates."""
    mask = whole.fold.mask
    if mask is None or len(mask.clauses) != 1:
        return False
    bands = mask.clauses[0].bands
    return bool(bands) and all(abs(band.s) == 1 for band in bands)


def crowded(whole: TiledPlan) -> bool:
    """Whether a block of 128 keys needs more registers than a thread has.

    A value a key takes 32 of them beside the score's 64 and the sum's, and one a query and key 64.
    Declarations whose kernels spill for sm_90 under Triton 3.6 have two or more such values, where
    positions of keys in the score, a tensor in the epilogue and every comparison of queries with
    keys after the second count as one.
    """
    fold, row = whole.fold, set(whole.tile_axes)
    dots = frozenset(d.node for d in fold.dots)
    masks = () if fold.where is None else above(fold.where, dots, (AtQuery,))
    score, mask = set(above(fold.score, dots, (AtQuery,))), set(masks)
    values = sum(_keyed(whole, n) for n in mask)
    values += 2 * sum(_keyed(whole, n) for n in score)
    values += any(isinstance(n, Index) and n.axis == fold.over for n in score)
    compared = (set(axes_of(n)) for n in mask if isinstance(n, Map) and n.fn in COMPARISONS)
    values += max(0, sum(fold.over in axes and bool(row & axes) for axes in compared) - 2)
    ends = {n for o in whole.program.outputs for n in above(o.value, frozenset({fold.node}))}
    columns = set(fold.value_axes)
    values += sum(isinstance(n, Input) and bool(columns & set(n.axes)) for n in ends)
    return values > 1


def _keyed(whole: TiledPlan, node: Node) -> int:
    """Values of 32 bits that a load keeps for each key of a block; two for one a query and key."""
    if not isinstance(node, Input) or whole.fold.over not in node.axes:
        return 0
    words = 2 if whole.tensor(node.name).dtype == "i64" else 1
    return 2 * words if set(whole.tile_axes) & set(node.axes) else words


def above(root: Node, closed: frozenset[Node], leaves: tuple[type, ...] = ()) -> Iterator[Node]:
    """Nodes below a root, down to closed ones and without them; nothing below leaves."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node not in closed:
            yield node
            stack.extend(() if isinstance(node, leaves) else children(node))
