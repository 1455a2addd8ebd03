"""Plans of warp-specialised tiles whose keys are their values too (Gluon).

Many query rows on one wide key: the sum of 64 rows with 512 columns is 128 KB, the registers of two
warpgroups. So two of them share a tile. The first multiplies the scores of a block, finds its
weights and the sum of the value's first half; the second finds the other half's sum with the
weights that the first leaves in shared memory. A loading warp keeps blocks of keys on their way;
each is there once, and each half of its columns has a place and barriers of its own, so that the
next block's half comes as soon as its reader is done.

Calls that want an lse are refused. The score has one accumulator, there being no registers for a
second one, and tensor cores truncate in each of its steps of 16 columns. A 16-bit output does not
show that; the lse over one key is the score itself.

The division of labour between the products is that of FlashMLA (DeepSeek, 2025): two warpgroups on
one tile of 64 rows, each with half the columns of the output.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from attncc.codegen.forms import Dot, Refusal
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_parts import first_part
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.plan_table import RULE
from attncc.codegen.softmax_checks import betweens, inner_sums
from attncc.codegen.target import shared_limit
from attncc.codegen.tiles import Tiles
from attncc.codegen.warp_forms import above
from attncc.dsl.axes import PAGE, PAGES
from attncc.dsl.graph import walk
from attncc.dsl.ir import (
    AtQuery,
    Fn,
    Index,
    Input,
    Lit,
    Map,
    Node,
    Select,
    Size,
    Take,
)

if TYPE_CHECKING:
    from attncc.codegen.plan_gathered import GatherPlan

TARGETS = ("sm_90",)
ROWS = 64
"""Rows of a tile, which are one instruction's."""
HALF = 256
"""Columns of the value that one warpgroup sums up: 128 registers a thread."""
KEYS = 64
"""Keys of a block."""
IN_PLACE = 128
"""Keys in shared memory."""
LATE, AHEAD = False, False
"""The rule's answers for :attr:`SharedPlan.late` and ``ahead``."""
REGISTERS, LOADING = 216, 56
"""32-bit registers of a thread that sums up values, and of one that loads."""
RELEASED = True
"""The same for ``released``, of kernels of partials, where the GPU can."""
LSE = (
    "it writes no lse: a score of hundreds of columns has one accumulator, in which tensor cores "
    "truncate at every step, and over few keys an lse would be further off than the contract allows"
)
"""Why a call that wants its lse is left to the Triton tile."""
MORE = (16, 32, 64)
"""Widths of further products of the score; their keys come in one piece each."""
ELEMENT_WISE = (Map, Input, Index, Lit, Size, Select, AtQuery, Take)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan(TiledPlan):
    """A tile of 64 rows whose value's columns two warpgroups share.

    ``num_warps`` counts the warps of one warpgroup, ``num_stages`` the blocks of keys in shared
    memory.

    Attributes:
        part_e: columns of the value a warpgroup.
        consumers: warpgroups that multiply.
        consumer_registers: 32-bit registers of the second one's threads.
        producer_registers: of the threads of the warp that loads.
        copied: keys that one copy brings: a block's, or those of a shorter page.
        late: the second warpgroup multiplies when the next block's scores are there, while the
            first finds their weights; else as soon as the block's weights are.
        released: the merge may be launched while this kernel runs; it waits for its end.
    """

    part_e: int
    consumers: int
    consumer_registers: int
    producer_registers: int
    copied: int
    late: bool
    released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedChoice:
    """What may be chosen freely; None leaves it to the rule.

    Attributes:
        block_n: keys of a block.
        stages: blocks of keys in shared memory.
        late: see :class:`SharedPlan`.
        ahead: a block's scores are multiplied before the values of the one before it.
        staged: of partials over picked rows, see
            :class:`~attncc.codegen.plan_picked.PickedPlan`.
        shares: of the same, ``idle_shares``.
    """

    block_n: int | None = None
    stages: int | None = None
    late: bool | None = None
    ahead: bool | None = None
    staged: bool | None = None
    shares: int | None = None


def shared_plan(
    whole: TiledPlan, spec: Spec, chosen: str = RULE, choice: SharedChoice | None = None
) -> SharedPlan | Refusal:
    """The warp-specialised form of a tile whose keys are its values too.

    Args:
        whole: the plan of the Triton tile: all of a fold, or a range of its keys as partials.
        spec: of the call.
        chosen: who chose it.
        choice: what may be chosen freely.

    Returns:
        The plan, or why the tile has no such form.
    """
    choice = choice or SharedChoice()
    tiles = tiles_of(choice)
    reason = _problem(whole, spec, tiles)
    if reason is not None:
        return Refusal(reason, whole.fold.node.loc)
    return SharedPlan(**carried(whole, spec, tiles, chosen) | {
        "template": "gluon/softmax_shared.py.jinja",
        "first_part": first_part(whole.fold, tiles, {*whole.grid_axes, "B"}),
        "copied": min(tiles.block_n, whole.page or tiles.block_n),
        "late": LATE if choice.late is None else choice.late,
        "ahead": AHEAD if choice.ahead is None else choice.ahead,
    })  # fmt: skip


def tiles_of(choice: SharedChoice) -> Tiles:
    """The tile of a choice: as many blocks of keys as fit, where it does not say."""
    block_n = choice.block_n or KEYS
    return Tiles(ROWS, block_n, 4, choice.stages or IN_PLACE // block_n)


def carried(whole: TiledPlan | GatherPlan, spec: Spec, tiles: Tiles, chosen: str) -> dict[str, Any]:
    """What a form by two warpgroups has of Triton's plan, and what all such forms have."""
    held: dict[str, Any] = {f.name: getattr(whole, f.name) for f in fields(whole)}
    return held | {
        "block_m": ROWS, "block_n": tiles.block_n, "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages, "chosen": chosen, "turned": False, "chained": False,
        "part_e": HALF, "consumers": 2, "consumer_registers": REGISTERS,
        "producer_registers": LOADING, "released": RELEASED and whole.split and spec.chained,
    }  # fmt: skip


def has_parts(whole: TiledPlan | None, spec: Spec) -> bool:
    """Whether ranges of a fold's keys have kernels in the call's dialect."""
    return spec.dialect in (None, Dialect.TRITON) or isinstance(whole, SharedPlan)


def parts_like(
    whole: TiledPlan | None, parts: tuple[TiledPlan, ...], spec: Spec
) -> tuple[TiledPlan, ...]:
    """A fold's partials in the form of its whole, which is a form of partials too or is Triton's.

    Args:
        whole: the plan of the whole fold, None where it has several passes.
        parts: the plans of Triton's partials.
        spec: of the call.
    """
    if not isinstance(whole, SharedPlan):
        return parts
    choice = SharedChoice(
        block_n=whole.block_n, stages=whole.num_stages, late=whole.late, ahead=whole.ahead
    )
    found = [shared_plan(part, spec, whole.chosen, choice) for part in parts]
    return tuple(p for p in found if isinstance(p, SharedPlan))


def product_sum(score: Node, dots: tuple[Dot, ...]) -> Node | None:
    """The node that adds up a score's products, which one accumulator then holds.

    It is the product itself where there is one; None where they do not meet in a single addition.
    """
    products = [d.node for d in dots]
    if len(products) == 1:
        return products[0]
    sums = [n for n in walk(score) if isinstance(n, Map) and n.fn is Fn.ADD]
    return next((n for n in sums if sorted(map(id, n.args)) == sorted(map(id, products))), None)


# --- what the skeleton does not cover --------------------------------------------------------


def _problem(whole: TiledPlan, spec: Spec, tiles: Tiles) -> str | None:
    """The first reason why a tile has no such form."""
    fold = whole.fold
    [own] = whole.passes
    checks = (
        (spec.target not in TARGETS, f"it is written for {', '.join(TARGETS)}, not {spec.target}"),
        (spec.return_lse, LSE),
        (whole.packed, "sequences lie end to end"),
        (whole.tighten, "predicates over the history tighten the loop"),
        (bool(whole.quantised), "the history is quantised"),
        (whole.plain, "a plain sum carries no maximum"),
        (len(own.columns) != 1 or bool(fold.beside), "several folds"),
        (bool(betweens(fold)), "sums between positions go from the last block to the first"),
        (bool(inner_sums(fold)), "a sum over products"),
        (whole.fused is not None, "partials are merged by the program that comes last"),
        (not _pages_fit(whole.page, tiles.block_n), f"a page of {whole.page} keys"),
    )
    found = next((reason for failed, reason in checks if failed), None)
    return found or _operand_problem(whole, spec, tiles) or _score_problem(whole)


def _pages_fit(page: int, block_n: int) -> bool:
    """Whether blocks lie within pages, or pages of whole swizzle patterns within blocks."""
    return page % block_n == 0 or (block_n % page == 0 and page % 8 == 0)


def _operand_problem(whole: TiledPlan, spec: Spec, tiles: Tiles) -> str | None:
    [columns] = whole.passes[0].columns
    if columns.shared != 0 or columns.width != 2 * HALF:
        return f"values of {columns.width} columns that are not the first product's keys"
    if any(w not in MORE for w in whole.widths_k[1:]):
        return f"further products of {whole.widths_k[1:]}, not of {MORE}"
    types = {*whole.operand, columns.type}
    if len(types) != 1 or not types <= {"bf16", "fp16"}:
        return f"operands of {', '.join(sorted(types))}, not of one 16-bit type"
    if shared_bytes(whole.widths_k, tiles) > shared_limit(spec.target):
        return f"keys of {sum(whole.widths_k)} columns: blocks do not fit"
    for dot in whole.fold.dots:
        reason = _map_problem(whole, dot.key, dot.over)
        if reason is not None:
            return reason
    return None


def shared_bytes(widths: tuple[int, ...], tiles: Tiles) -> int:
    """Shared memory of queries, blocks of keys, weights, and what is known of rows."""
    rows = ROWS + tiles.num_stages * tiles.block_n
    return 2 * rows * sum(widths) + 2 * ROWS * tiles.block_n + 12 * ROWS + 1024


def _map_problem(whole: TiledPlan, key: tuple[Node, ...], axes: tuple[str, ...]) -> str | None:
    """Why no tensor map brings a block of keys: rows along the history, columns of a product."""
    [node, *more] = key
    if more or not isinstance(node, Input):
        return "keys are computed, so that no tensor map can load them"
    arg = whole.tensor(node.name)
    rows = (PAGES, PAGE) if whole.page else (whole.fold.over,)
    if not arg.aligned:
        return f"{node.name} is not aligned to 16 bytes"
    if arg.pattern.dims[-1] != axes or any((axis,) not in arg.pattern.dims for axis in rows):
        return f"no tensor map for {node.name} [{arg.pattern}]"
    return None


def _score_problem(whole: TiledPlan) -> str | None:
    """Products have to be added first; all else has to be element by element."""
    fold = whole.fold
    if product_sum(fold.score, fold.dots) is None:
        return "products that are not added to each other"
    dots = frozenset(d.node for d in fold.dots)
    roots = [(root, dots) for root in (fold.score, fold.where, fold.sink) if root is not None]
    roots += [(out.value, frozenset({fold.node})) for out in whole.program.outputs]
    for root, closed in roots:
        for node in above(root, closed):
            if not isinstance(node, ELEMENT_WISE):
                return f"{type(node).__name__.lower()} in the score or around it"
    return None
