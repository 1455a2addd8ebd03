"""Prints what a tile whose keys are its values holds of its operands: pieces, maps and layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap

from attncc.codegen.emit.gluon import gluon_lines
from attncc.codegen.emit.softmax_rows import Texts, printer, section, sizes_of, spread
from attncc.codegen.emit.softmax_scores import operand
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.forms import Dot
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_picked import PickedPlan
from attncc.codegen.plan_shared import SharedPlan
from attncc.dsl.axes import PAGE, PAGES
from attncc.dsl.ir import Input

LINE = 64
"""Columns of 16 bits in a swizzled line of shared memory: what one copy of a short page brings."""
BEYOND = 1 << 30
"""A page that no pool has: what is copied from there is zeros."""


@dataclass(frozen=True, slots=True)
class PieceCode:
    """Some columns of a product's operands; a block of its keys has a ring of its own.

    Attributes:
        name: ends the names of its variables.
        product: of which product it is.
        map: the tensor map that brings its keys.
        first: its first column.
        width: its columns.
        owner: the warpgroup that takes its keys as values, or -1.
        bytes: of a block of its keys.
        chunk: columns that one copy of a short page brings.
        copies: first column of each such copy, and its place among a block's.
        a_block: places of copies that make up a block.
        places: of all blocks.
        lines: the queries of it, as lines that define ``queries`` [m, k].
    """

    name: str
    product: int
    map: str
    first: str
    width: int
    owner: int
    bytes: int
    chunk: int
    copies: tuple[tuple[int, int], ...]
    a_block: int
    places: int
    lines: Texts


@dataclass(frozen=True, slots=True)
class KeyMap:
    """A tensor map of keys and the box of it that one copy brings.

    Attributes:
        name: of the map.
        pointer: where the sequence's (or the pool's) first key lies.
        shape: sizes of its memory axes.
        tail: the same, the page's rows ending with the sequence; empty where ``shape`` does.
        strides: of each, in elements.
        box: what one copy brings.
        width: columns of that.
    """

    name: str
    pointer: str
    shape: str
    tail: str
    strides: str
    box: str
    width: int


@dataclass(frozen=True, slots=True)
class LayoutCode:
    """How so many columns of 16 bits lie in shared memory, and which thread loads what of them.

    Attributes:
        width: the columns.
        swizzle: bytes of the pattern that rows are shifted by.
        down: rows of a warp's threads.
        across: threads of a row, with 16 bytes each.
    """

    width: int
    swizzle: int
    down: int
    across: int


@dataclass(frozen=True, slots=True)
class ConsumerCode:
    """What leaves a warpgroup.

    Attributes:
        columns: its columns of the value.
        finish: what follows the loop.
    """

    columns: Texts
    finish: Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldCode:
    """Printed pieces of a tile whose keys are its values too, wherever its keys come from.

    Attributes:
        about: the file's docstring.
        loading: a sentence of it: who brings keys.
        imports: the language.
        helpers: functions that Gluon lacks.
        dtype: element type of the operands.
        grid: axes and sizes, fastest first.
        points: number of points of the grid axes.
        group: rows a token.
        given: the parameters' names, in lines.
        placed: names of what is known of a program's work.
        masked: condition that a block needs its mask, empty where all do.
        pieces: of the products' columns, in the order in which they are multiplied.
        halves: names of those that are the value's halves.
        layouts: of the pieces' widths.
        weight_swizzle: that of the weights' rows.
        rank: memory axes of a place in a ring.
        parts: pages of a block; 1 where a block is copied at once.
        loaders: warps that copy.
        arrivals: at a ring's barrier, for a piece of a block: one by a tensor map's copy, or each
            copying thread's.
        row_valid: condition on rows.
        rows: row indices taken apart.
        setup: values that do not depend on keys.
        early: lines ahead of a block's products.
        positions: what is known of a block's keys.
        scores: the score ``x`` [m, n] from the products' sum ``s0``.
        mask: ``visible``.
        logits: base-2 logits from ``x``.
        highest: the largest of each row.
        consumer: what leaves each warpgroup.
        rings: names of the rings, of the barriers beside them, and of the queries, in lines.
        staged: sums pass through the place of their keys before they leave.
    """

    about: Texts
    loading: str
    imports: Texts
    helpers: Texts
    dtype: str
    grid: tuple[tuple[str, str], ...]
    points: str
    group: str
    given: Texts
    placed: str
    masked: str
    pieces: tuple[PieceCode, ...]
    halves: Texts
    layouts: tuple[LayoutCode, ...]
    weight_swizzle: int
    rank: int
    parts: int
    loaders: int
    arrivals: int
    row_valid: str
    rows: Texts
    setup: Texts
    early: Texts
    positions: Texts
    scores: Texts
    mask: Texts
    logits: str
    highest: str
    consumer: tuple[ConsumerCode, ...]
    rings: Texts
    staged: bool


def key_map(plan: SharedPlan, i: int, dot: Dot) -> KeyMap:
    """The map of a product's keys: all axes but the history and the columns are in its base."""
    [node] = dot.key
    assert isinstance(node, Input)
    p = printer(plan, ("m",))
    arg, width, over = p.tensors[node.name], plan.widths_k[i], plan.fold.over
    zero = Place(Var("0"))
    along = {PAGES: zero, PAGE: zero} if plan.page else {over: zero}
    base, _ = p.child(**{**dict.fromkeys(dot.over, zero), **along}).offset(arg)
    start = "" if base.text == "0" else f" + {base.text}"
    box = min(width, plan.part_e if plan.copied == plan.block_n else LINE)
    if not plan.page:
        return KeyMap(
            f"map{i}", f"{arg.pointer}{start}", f"gl.maximum(S, 1), {width}", "",
            f"{_stride(arg, over)}, 1", f"{plan.copied}, {box}", box,
        )  # fmt: skip
    end = f"(gl.maximum(S, 1) - 1) % {plan.page} + 1"
    return KeyMap(
        f"map{i}", f"{arg.pointer}{start}", f"{BEYOND}, {plan.page}, {width}",
        f"{BEYOND}, {end}, {width}", f"{_stride(arg, PAGES)}, {_stride(arg, PAGE)}, 1",
        f"1, {plan.copied}, {box}", box,
    )  # fmt: skip


def _stride(arg: TensorArg, axis: str) -> str:
    return arg.strides[arg.pattern.dim_of(axis)]


def _pieces(
    plan: SharedPlan | PickedPlan, i: int, dot: Dot, made: Callable[[], Printer]
) -> list[PieceCode]:
    """A product's columns in pieces of a warpgroup's columns of the value."""
    [columns] = plan.passes[0].columns
    width, parts = min(plan.widths_k[i], plan.part_e), plan.block_n // plan.copied
    found = []
    for at, first in enumerate(range(0, plan.widths_k[i], width)):
        p = made()
        lines = section(p)
        begin = first_column(plan, at) if columns.shared == i else first
        setup, places = spread(f"d{i}", "k", dot.over, sizes_of(plan), width, width, first=begin)
        lines += setup
        text = operand(
            p.child(**places), dot.query, ("m", "k"), plan.operand[i], (plan.block_m, width)
        )
        lines.append(f"queries = {text}  # [m, k]")
        name, owned = f"{i}_{at}", columns.shared == i and at < plan.consumers
        texts = gluon_lines(lines, f"COLUMNS_{width}")
        chunk = min(width, LINE)
        copies = tuple((first + c, c // chunk * parts) for c in range(0, width, chunk))
        count = len(copies) * parts
        found.append(
            PieceCode(
                name, i, f"map{i}", str(begin), width, at if owned else -1,
                2 * plan.block_n * width, chunk, copies, count, count * plan.num_stages, texts,
            )
        )  # fmt: skip
    return found


def first_column(plan: SharedPlan | PickedPlan, part: int) -> int | str:
    """The first column of a part of the value: the first parts are the program's own."""
    if isinstance(plan, SharedPlan) or plan.shares == 1:
        return part * plan.part_e
    return f"(share ^ {part}) * {plan.part_e}"


def _in_order(plan: SharedPlan | PickedPlan, pieces: list[PieceCode]) -> tuple[PieceCode, ...]:
    """The half of the values last whose reader is the last one to be done with a block."""
    last = 0 if plan.ahead else 1
    return tuple(sorted(pieces, key=lambda p: 1 if p.owner < 0 else 2 if p.owner == last else 0))


def layout_of(width: int) -> LayoutCode:
    """The layouts of so many columns: 16 bytes a thread, 128 bytes of a row in one pattern."""
    across = min(32, width // 8)
    return LayoutCode(width, min(128, 2 * width), 32 // across, across)


def pieces_of(
    plan: SharedPlan | PickedPlan, made: Callable[[], Printer]
) -> tuple[PieceCode, ...]:  # fmt: skip
    """The products' columns in pieces, in the order in which they are multiplied.

    Args:
        plan: of the tile.
        made: makes printers of its rows.
    """
    dots = plan.fold.dots
    return _in_order(plan, [p for i, d in enumerate(dots) for p in _pieces(plan, i, d, made)])


def halves_of(pieces: tuple[PieceCode, ...]) -> Texts:
    """Names of the pieces that are the value's halves."""
    return tuple(p.name for p in sorted(pieces, key=lambda p: p.owner) if p.owner >= 0)


def layouts_of(pieces: tuple[PieceCode, ...]) -> tuple[LayoutCode, ...]:
    """The layouts of the pieces' widths."""
    return tuple(map(layout_of, sorted({w for p in pieces for w in (p.width, p.chunk)})))


def ring_names(pieces: tuple[PieceCode, ...], parts: int) -> Texts:
    """What every partition is handed of shared memory."""
    kinds = ("query", "keys", "full", "free", *(("pages",) if parts > 1 else ()))
    names = [f"{kind}_{p.name}" for p in pieces for kind in kinds]
    names += ["weights", "kept", "highs", "sums", "weights_full", "weights_free"]
    names += ["scored", "summed"]
    return tuple(wrap(", ".join(names) + ",", 88))
