"""Plans of warp-specialised softmax prefill (Gluon), made from the plan of the Triton tile.

A program lives as long as the device has work: one warp loads blocks through tensor maps into rings
in shared memory, two warpgroups of 64 rows each multiply, and the score of the next block is
already being multiplied while the weights of this one are computed. The fold, the rows and the
expressions are those of the tile; only who does what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from attncc.codegen.forms import Refusal, SoftmaxFold
from attncc.codegen.plan import Dialect, ScalarArg, Spec
from attncc.codegen.plan_choices import softmax_wanted
from attncc.codegen.plan_parts import first_part, rows_of, score_tiles
from attncc.codegen.plan_shared import SharedChoice, shared_plan
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.plan_table import RULE, Family, decide
from attncc.codegen.softmax_checks import TOKENS, betweens, inner_sums
from attncc.codegen.target import shared_limit
from attncc.codegen.tiles import Tiles
from attncc.codegen.warp_forms import RULED, Forms, Tanh, above, crowded, fitted
from attncc.dsl.axes import Pattern
from attncc.dsl.graph import walk
from attncc.dsl.ir import (
    AtQuery,
    Fn,
    Index,
    Input,
    Lit,
    Map,
    Program,
    Select,
    Size,
    Take,
)

TARGETS = ("sm_90",)
WIDTHS = (64, 128)
"""Head dims whose accumulators fit beside two tiles of scores in registers."""
WARPS = (Dialect.GLUON, Dialect.CUTEDSL)
"""Dialects of warp-specialised kernels."""
CONSUMERS = 2
PART = 64
"""Rows of one warpgroup: what one instruction multiplies."""
EXACT = frozenset({Fn.EXP, Fn.TANH, Fn.SIGMOID, Fn.SILU, Fn.SOFTPLUS})
"""Functions with an exact form, which is printed where the lse is written too."""
ELEMENT_WISE = (Map, Input, Index, Lit, Size, Select, AtQuery, Take)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpPlan(TiledPlan):
    """A tile of two warpgroups' rows, worked on by programs that stay resident.

    ``num_warps`` counts the warps of one warpgroup, ``num_stages`` the blocks of keys (and of
    values) in flight.

    Attributes:
        query: name of the query tensor.
        key: name of the key tensor.
        value: name of the value tensor.
        width_e: columns of the value.
        part: rows of one consumer.
        consumers: warpgroups that multiply.
        consumer_registers: 32-bit registers of their threads.
        producer_registers: of the threads of the warp that loads.
        query_places: tiles of queries in shared memory; with two, the next piece of work's come
            while this one's are in use.
        wide_stores: outputs change their layout, so that a thread stores 16 bytes at once.
        edges: a row's first and last key are found once, instead of a comparison per band, key
            and query; predicates over the history are evaluated only in blocks that need them.
        linear: what a score has that is linear in the key's position costs one fused addition a
            key and query; what it has a row is added to the row's maximum.
        tanh: how the score's tanh is computed.
    """

    query: str
    key: str
    value: str
    width_e: int
    part: int
    consumers: int
    consumer_registers: int
    producer_registers: int
    query_places: int
    wide_stores: bool
    edges: bool
    linear: bool
    tanh: Tanh


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpChoice:
    """What may be chosen freely; None leaves it to the rule.

    Attributes:
        block_n: keys of a block.
        stages: blocks in flight.
        packed_rows: the heads of a group lie in one tile, where they divide its rows.
        dialect: where the call names none.
        forms: of the tile's parts.
        late: of a tile whose keys are its values, see
            :class:`~attncc.codegen.plan_shared.SharedChoice`.
        ahead: of the same.
    """

    block_n: int | None = None
    stages: int | None = None
    packed_rows: bool = True
    dialect: Dialect = Dialect.GLUON
    forms: Forms = RULED
    late: bool | None = None
    ahead: bool | None = None


def in_dialect(whole: TiledPlan | None, spec: Spec) -> TiledPlan | Refusal | None:
    """The plan in the dialect that the call names, or that the table of measured plans names.

    Args:
        whole: the plan of the Triton tile; None where there are several passes.
        spec: of the call.

    Returns:
        The given plan, its warp-specialised form, or the reason why a dialect that was asked for
        by name cannot have it.
    """
    if whole is None and spec.dialect in WARPS:
        return Refusal("several passes over a history")
    if whole is None or spec.dialect is Dialect.TRITON:
        return whole
    choice, chosen = _chosen(whole, spec)
    if spec.dialect is None and chosen == RULE:
        return whole
    found = _written(whole, spec, choice, chosen)
    return whole if isinstance(found, Refusal) and spec.dialect is None else found


def _written(whole: TiledPlan, spec: Spec, choice: WarpChoice, chosen: str) -> TiledPlan | Refusal:
    """The warp-specialised form in the call's dialect, or in the entry's."""
    from attncc.codegen.plan_cutedsl import cute_plan  # its plans extend those of this module

    dialect = spec.dialect or choice.dialect
    if dialect is Dialect.GLUON and whole.passes[0].columns[0].shared >= 0:
        own = SharedChoice(
            block_n=choice.block_n, stages=choice.stages, late=choice.late, ahead=choice.ahead
        )
        return shared_plan(whole, spec, chosen, own)
    make = cute_plan if dialect is Dialect.CUTEDSL else warp_plan
    return make(whole, spec, choice, chosen)


def _chosen(whole: TiledPlan, spec: Spec) -> tuple[WarpChoice, str]:
    """The nearest entry's choice, and its name: an entry makes the dialect the default."""
    [own] = whole.passes
    values = "+".join("key" if c.shared >= 0 else str(c.block) for c in own.columns)
    dtype = whole.operand[0] if whole.operand else "fp32"
    fold = whole.fold
    wanted = softmax_wanted(
        spec, whole.phase, dtype, whole.blocks_k, values,
        rows_of(whole.tile_axes, spec, whole.phase),
        score_tiles(fold) + len(inner_sums(fold)) + crowded(whole),
    )  # fmt: skip
    chosen, fixed = decide(replace(wanted, family=Family.WARP), spec.target, spec.tuned)
    held: dict[str, Any] = dict(fixed)
    dialect = Dialect(held.pop("dialect", Dialect.GLUON.value))
    return WarpChoice(**held, dialect=dialect), chosen


def warp_plan(
    whole: TiledPlan, spec: Spec, choice: WarpChoice | None = None, chosen: str = RULE
) -> WarpPlan | Refusal:
    """The warp-specialised form of a tile.

    Args:
        whole: the plan of the Triton tile.
        spec: of the call.
        choice: what may be chosen freely.
        chosen: who chose it.

    Returns:
        The plan, or why the tile has no such form.
    """
    reason = _problem(whole, spec)
    if reason is not None:
        return Refusal(reason, whole.fold.node.loc)
    choice = choice or WarpChoice()
    query, key, value = (name for name, _ in operands(whole))
    grid, tile_axes = _rows(whole, query, choice)
    [columns] = whole.passes[0].columns
    tiles = _tiles(whole, columns.block, choice, spec.target)
    part = first_part(whole.fold, tiles, {*grid, "B"}) if not whole.tighten else 0
    room = (ScalarArg("n_T", "i32"), ScalarArg("n_S", "i32")) if whole.packed else ()
    held: dict[str, Any] = {f.name: getattr(whole, f.name) for f in fields(whole)}
    held |= {
        "template": "gluon/softmax_prefill.py.jinja", "args": (*whole.args, *room),
        "grid_axes": grid, "tile_axes": tile_axes, "block_m": tiles.block_m,
        "block_n": tiles.block_n, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        "first_part": part, "chosen": chosen, "ahead": False,
    }  # fmt: skip
    forms = fitted(
        whole, CONSUMERS * PART, columns.block, tiles, choice.forms, spec.target,
        roomy=not crowded(whole),
    )  # fmt: skip
    held |= {f.name: getattr(forms, f.name) for f in fields(forms)}
    return WarpPlan(
        **held, query=query, key=key, value=value, width_e=columns.block, part=PART,
        consumers=CONSUMERS, consumer_registers=232, producer_registers=40,
    )  # fmt: skip


def _tiles(whole: TiledPlan, width_e: int, choice: WarpChoice, target: str) -> Tiles:
    """Keys of a block, and as many blocks in flight as shared memory holds (four at most)."""
    width_k = whole.blocks_k[0]
    # With an lse these functions keep fp32's accuracy: polynomials, whose terms need registers.
    wide = whole.lse and any(isinstance(n, Map) and n.fn in EXACT for n in walk(whole.fold.score))
    block_n = choice.block_n or (64 if wide or crowded(whole) else 128)
    query = CONSUMERS * PART * width_k * 2
    stage = block_n * (width_k + width_e) * 2
    # Three stages of 128 x (128 + 128) leave 3 KiB: the measured form has two.
    fits = (shared_limit(target) - query - (32 << 10)) // stage
    return Tiles(CONSUMERS * PART, block_n, 4, choice.stages or max(1, min(4, fits)))


def _rows(
    whole: TiledPlan, query: str, choice: WarpChoice
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Grid axes and tile axes: heads of a group share a tile where a box can hold them."""
    inner = whole.tile_axes[1:]
    if choice.packed_rows and _boxed(whole, whole.tensor(query).pattern):
        return whole.grid_axes, whole.tile_axes
    return (*whole.grid_axes, *inner), (TOKENS,)


def _boxed(whole: TiledPlan, pattern: Pattern) -> bool:
    """Whether memory has the tile's axes in its rows' order, and a warpgroup whole tokens."""
    static = dict(whole.static)
    inner = whole.tile_axes[1:]
    if any(a not in static for a in inner) or PART % prod(static[a] for a in inner):
        return False
    if [a for a in pattern.axes if a in whole.tile_axes] != list(whole.tile_axes):
        return False
    # within one memory axis those of the grid have to vary slower
    held = ([a in whole.tile_axes for a in dim] for dim in pattern.dims)
    return all(own == sorted(own) for own in held)


def operands(plan: TiledPlan) -> list[tuple[str, tuple[str, ...]]]:
    """Query, key and value: the inputs' names and the axes of their rows."""
    [dot], [columns] = plan.fold.dots, plan.passes[0].columns
    nodes = (dot.query[0], dot.key[0], columns.fold.value[0])
    axes = (dot.over, dot.over, columns.fold.value_axes)
    names = [n.name for n in nodes if isinstance(n, Input)]
    return list(zip(names, axes, strict=True))


# --- what the skeleton does not cover --------------------------------------------------------


def _problem(whole: TiledPlan, spec: Spec) -> str | None:
    """The first reason why a tile has no warp-specialised form."""
    fold = whole.fold
    [own] = whole.passes
    checks = (
        (spec.target not in TARGETS, f"it is written for {', '.join(TARGETS)}, not {spec.target}"),
        (whole.phase != "prefill", f"{whole.phase} is bound by bandwidth"),
        (whole.split, "ranges of keys are merged by the Triton kernels"),
        (whole.lengths or bool(whole.page), "the history lies in a cache"),
        (bool(whole.quantised), "the history is quantised"),
        (whole.plain, "a plain sum carries no maximum"),
        (len(own.columns) != 1 or bool(fold.beside), "several folds"),
        (bool(betweens(fold)), "sums between positions go from the last block to the first"),
        (bool(inner_sums(fold)) or len(fold.dots) != 1, "a score of several products"),
    )
    found = next((reason for failed, reason in checks if failed), None)
    return found or _operand_problem(whole) or _node_problem(whole.program, fold)


def _operand_problem(whole: TiledPlan) -> str | None:
    fold = whole.fold
    [dot], [columns] = fold.dots, whole.passes[0].columns
    if columns.shared >= 0:
        return "the keys are the values too"
    if whole.operand[0] not in ("bf16", "fp16") or columns.type != whole.operand[0]:
        return f"operands of {whole.operand[0]} and {columns.type}, not of one 16-bit type"
    sides = (dot.query, dot.key, columns.fold.value)
    if any(len(nodes) != 1 or not isinstance(nodes[0], Input) for nodes in sides):
        return "an operand is computed, so that no tensor map can load it"
    rows = (TOKENS, fold.over, fold.over)
    found = (_map_problem(whole, o, along) for o, along in zip(operands(whole), rows, strict=True))
    return next((reason for reason in found if reason is not None), None)


def _map_problem(whole: TiledPlan, operand: tuple[str, tuple[str, ...]], along: str) -> str | None:
    """Why no tensor map brings a tile of an operand: rows along an axis, columns of others."""
    name, axes = operand
    arg, width = whole.tensor(name), prod(dict(whole.static)[a] for a in axes)
    if width not in WIDTHS:
        return f"{name} has rows of {width}, not of {' or '.join(map(str, WIDTHS))}"
    if along not in arg.pattern.axes:
        return f"{name} has no axis {along}"
    if not arg.aligned:
        return f"{name} is not aligned to 16 bytes"
    if arg.pattern.dims[-1] != axes or not 2 <= arg.pattern.rank <= 5:
        return f"no tensor map for {name} [{arg.pattern}]"
    for axis in {TOKENS, whole.fold.over} & set(arg.pattern.axes):
        if arg.pattern.dims[arg.pattern.dim_of(axis)] != (axis,):
            return f"{axis} shares a memory axis of {name}"
    return None


def _node_problem(program: Program, fold: SoftmaxFold) -> str | None:
    """Score, mask, sink and epilogue have to be element by element."""
    dots = frozenset(d.node for d in fold.dots)
    roots = [(root, dots) for root in (fold.score, fold.where, fold.sink) if root is not None]
    roots += [(out.value, frozenset({fold.node})) for out in program.outputs]
    for root, closed in roots:
        for node in above(root, closed):
            if not isinstance(node, ELEMENT_WISE):
                return f"{type(node).__name__.lower()} in the score or around it"
    return None
