"""Prints the pieces of warp-specialised softmax prefill in CuTe-DSL.

The lines are those of the Triton tile, as for Gluon, translated to scalar code of one thread
(:mod:`attncc.codegen.emit.cutedsl`). A thread of a multiplying warpgroup holds two rows, eight
apart, and of each row the columns 8 i + 2 (lane % 4) and the one after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attncc.codegen.emit.cutedsl import Scalars
from attncc.codegen.emit.cutedsl_maps import MAP_BYTES, CuteMap, cute_map, room_of
from attncc.codegen.emit.cutedsl_place import place_lines
from attncc.codegen.emit.cutedsl_types import (
    ELEMENT_TYPES,
    NUMBERS,
    Function,
    Known,
    Step,
    Stored,
    host_type,
    listed,
    plain,
    wrapped,
)
from attncc.codegen.emit.gluon_maps import map_codes
from attncc.codegen.emit.gluon_softmax import WarpTexts, masked_blocks, warp_texts
from attncc.codegen.emit.softmax_finish import group_of
from attncc.codegen.emit.softmax_rows import Texts, about, points, row_lines
from attncc.codegen.plan_cutedsl import CutePlan

_M, _N, _E = (frozenset({d}) for d in "mne")


@dataclass(frozen=True, slots=True)
class CuteCode:
    """Printed pieces of the CuTe-DSL tile.

    Attributes:
        about: the file's docstring.
        dtype: element type of the operands.
        element_type: the same, as tensor maps number it.
        given: the parameters' names, in lines.
        typed: the same with their types.
        items: number of pieces of work.
        group: rows a token.
        place: where a piece of work lies, and which keys [lo, hi) some row of it may see.
        placed: what is known of a piece of work, and its type.
        placed_names: the names in one line.
        maps: of query, key and value.
        rows: what each of a thread's rows has.
        masked: condition that a block needs its mask, empty where all do.
        score: the score of each query and key of a block.
        mask: whether it is visible.
        scale: factor from the score to base-2 logits, or empty.
        finish: what follows the loop.
        paired: neighbouring columns are stored together.
        stored: the stores of an element of the output.
        query_bytes: of the tile's queries.
        key_bytes: of a block of keys.
        value_bytes: of a block of values.
        key_at: where the ring of keys lies in shared memory, in bytes.
        value_at: the ring of values.
        map_at: room for a tensor map.
        work_at: what is known of a piece of work.
        barriers_at: the barriers.
        barriers: their names, and how many there are of each, and how many arrivals end a phase.
        shared_bytes: of all.
        scratch_bytes: global scratch of a program.
        warps: of a program.
        arrivals: warps that release a place of a ring.
        pieces: elements of a vector that a lane of the loading warp looks at.
        keys_each: keys of a block that a thread has, in each of its rows.
        columns_each: columns of the output of a thread, and row.
    """

    about: Texts
    dtype: str
    element_type: int
    given: Texts
    typed: Texts
    items: str
    group: str
    place: Texts
    placed: tuple[tuple[str, str], ...]
    placed_names: str
    maps: tuple[CuteMap, ...]
    rows: Texts
    masked: str
    score: Function
    mask: Function
    scale: str
    finish: Function
    paired: bool
    stored: tuple[Stored, ...]
    query_bytes: int
    key_bytes: int
    value_bytes: int
    key_at: int
    value_at: int
    map_at: int
    work_at: int
    barriers: tuple[tuple[str, int, int, int], ...]
    shared_bytes: int
    scratch_bytes: int
    warps: int
    pieces: str
    keys_each: int
    columns_each: int


def cute_code(plan: CutePlan) -> CuteCode:
    """Print the CuTe-DSL tile.

    Raises:
        RefusedError: an expression has no text in CuTe-DSL.
    """
    texts = warp_texts(plan)
    known = _parameters(plan)
    place, placed = place_lines(plan, texts, dict(known))
    known |= {name: Known(kind) for name, kind in placed}
    rows, score, mask = _block(plan, texts, dict(known))
    finish, stored = _finish(plan, texts, dict(known))
    sizes, room = room_of(plan, len(placed))
    return CuteCode(
        about=about(plan),
        dtype=NUMBERS[plan.operand[0]],
        element_type=ELEMENT_TYPES[plan.operand[0]],
        given=wrapped(p.name for p in plan.parameters),
        typed=wrapped(f"{p.name}: {host_type(p.type)}" for p in plan.parameters),
        items=f"tiles * {points(plan)}",
        group=group_of(plan),
        place=place,
        placed=tuple((name, NUMBERS[kind]) for name, kind in placed),
        placed_names=", ".join(name for name, _ in placed),
        maps=tuple(cute_map(plan, m, known) for m in map_codes(plan)),
        rows=rows,
        masked=_text(masked_blocks(plan), known),
        score=score,
        mask=mask,
        scale=texts.scale,
        finish=finish,
        paired=_paired(plan),
        stored=stored,
        scratch_bytes=MAP_BYTES * (4 if plan.packed else 3),
        warps=plan.num_warps * (plan.consumers + 1),
        pieces=repr(tuple(range(plan.block_m // 32))),
        keys_each=plan.block_n // 4,
        columns_each=plan.width_e // 4,
        **sizes,
        **room,
    )


def _parameters(plan: CutePlan) -> dict[str, Known]:
    """The kernel's parameters: pointers are addresses."""
    return {p.name: Known(p.type) for p in plan.parameters}


def _text(text: str, known: dict[str, Known]) -> str:
    """A condition over numbers of a piece of work."""
    return Scalars(known | {"n0": Known("i32")}, {}).expression(text)[0] if text else ""


# --- a block of keys -------------------------------------------------------------------------


def _block(
    plan: CutePlan, texts: WarpTexts, known: dict[str, Known]
) -> tuple[Texts, Function, Function]:
    """What the rows have; the score of an element, and whether it is visible."""
    own = {"n0": Known("i32"), "key": Known("i32", _N), "s0": Known("fp32", _M | _N)}
    known |= {"row": Known("i32", _M), **own}
    scalars = Scalars(known, {"m": "r"})
    lines = [f"row_valid = row < T * {group_of(plan)}", *row_lines(plan), *texts.setup]
    rows = scalars.steps(lines)
    keys = ["key_valid = key < S"]
    keys += ["key_row = first_key + key  # row of memory"] if plan.packed else []
    steps = scalars.steps([*keys, *texts.scores, *texts.mask])
    inside, outside = _by_block(steps, {*own})
    given = {*known} - {*own} - {s.name for s in inside}
    return (
        listed([*rows, *outside], "r", "(0, 1)"),
        _function(inside, "x", given),
        _function(inside, "visible", given),
    )


def _by_block(steps: Sequence[Step], varying: set[str]) -> tuple[list[Step], list[Step]]:
    """The statements that differ between blocks, and those that need be run once."""
    inside, outside = list[Step](), list[Step]()
    for step in steps:
        if step.used & varying or not step.known.dims <= _M:
            varying.add(step.name)
            inside.append(step)
        else:
            outside.append(step)
    return inside, outside


def _function(steps: Sequence[Step], result: str, given: set[str]) -> Function:
    """The statements that a result needs, as a function over the elements of a tile."""
    own = _needed(steps, result)
    used = sorted({n for s in own for n in s.used} & given)
    rows = [s for s in own if s.known.dims <= _M]
    outer = [s for s in own if s.known.dims == _N]
    inner = [s for s in own if s.known.dims >= _M | _N]
    return Function(wrapped(used), listed(rows, "r", "(0, 1)"), plain(outer), plain(inner))


def _needed(steps: Sequence[Step], result: str) -> list[Step]:
    """The statements behind a name, in order; of two that define it, both."""
    wanted, own = {result}, list[Step]()
    for step in reversed(steps):
        if step.name in wanted:
            wanted |= step.used
            own.append(step)
    return own[::-1]


# --- what leaves -----------------------------------------------------------------------------


def _finish(
    plan: CutePlan, texts: WarpTexts, known: dict[str, Known]
) -> tuple[Function, tuple[Stored, ...]]:
    """Sink, division, epilogue and stores of a thread's rows and columns."""
    vectors = {"row": "i32", "m": "fp32", "l": "fp32"}
    known |= {name: Known(kind, _M) for name, kind in vectors.items()}
    known["acc"] = Known("fp32", _M | _E)
    scalars = Scalars(known, {"m": "r"}, {"e": ("element", "e")})
    rows = scalars.steps([f"row_valid = row < T * {group_of(plan)}", *row_lines(plan)])
    before = {*known}
    steps = scalars.steps([*texts.columns, *texts.finish])
    used = sorted({n for s in (*rows, *steps) for n in s.used} & (before - {"row", "m", "l", "acc"}
                  - {s.name for s in rows}))  # fmt: skip
    lines: list[str] = [*listed(rows, "r", "(0, 1)")]
    for step in (s for s in steps if s.known.dims <= _M):
        own = scalars.stores.get(step.text) if not step.name else None
        if own is None:
            lines += listed([step], "r", "(0, 1)")
        else:
            seen = f"({own.mask}) & (column == 0)"  # four lanes have one row
            args = f"{NUMBERS[own.type]}, {own.address}, {own.value}, {seen}"
            lines += ["for r in (0, 1):", f"    store({args})"]
    stored = tuple(scalars.stores[s.text] for s in steps if not s.name and not s.known.dims <= _M)
    tiled = [s for s in steps if s.name and not s.known.dims <= _M]
    outer = [s for s in tiled if s.known.dims == _E]
    inner = [s for s in tiled if s.known.dims != _E]
    return Function(wrapped(used), tuple(lines), plain(outer), plain(inner)), tuple(
        Stored(NUMBERS[s.type], s.address, s.value, s.mask) for s in stored
    )


def _paired(plan: CutePlan) -> bool:
    """Whether neighbouring columns of every output lie side by side in memory, and together."""
    axes = plan.passes[0].columns[0].fold.value_axes
    outs = [plan.tensor(f"out_{o.name}") for o in plan.program.outputs]
    return all(
        a.pattern.dims[-1] == axes and a.aligned and a.dtype in ("bf16", "fp16") for a in outs
    )
