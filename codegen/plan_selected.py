"""Plans of a selection: ordered scores, the k-th of them digit by digit, and what lies above it.

The selection is a radix select. Two histograms of eight bits, from the most significant on, are
counted over the whole history, the first by those who make the scores, and find the first half of
the k-th number. What is greater is picked; what agrees with that half is kept aside in the order of
positions, and is little unless scores are alike. One program a row finishes it: two more digits,
and of what equals the k-th number as many of the first positions as are still wanted. Only whole
numbers are added, so nothing depends on the order of programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from attncc.codegen.forms import SelectedForm, Selection
from attncc.codegen.plan import Arg, KernelPlan, ScalarArg, Spec, TensorArg
from attncc.codegen.plan_append import page_size
from attncc.codegen.plan_choices import choose_selected, selected_wanted
from attncc.codegen.plan_parts import inputs, layout_args, stored
from attncc.codegen.plan_table import Family
from attncc.codegen.quantised import E4M3, Scaled
from attncc.codegen.softmax_checks import TOKENS
from attncc.codegen.target import shared_limit
from attncc.codegen.tiles import Tiles, padded
from attncc.dsl.axes import Pattern, parse
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Node, Program, Size

DIGITS, BINS = 2, 256
"""Digits of an ordered number that are counted over the history, of four; and values of one."""

CHUNK = 2048
"""Positions of the history that one program counts."""

CLOSE = 1024
"""Numbers with the first digits of the k-th that are looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectPlan(KernelPlan):
    """What the kernels of a selection share.

    Attributes:
        packed: sequences lie end to end along T.
        lengths: the history's length before the call comes from the device.
        page: rows of a page of the history, 0 where it does not lie in pages.
        block_t: tokens of a tile; a row of the workspaces is a token of a tile.
        k: how many are picked.
        block_k: the same, padded to a power of two.
        chunk: positions that one program counts.
        counters: whole numbers a row has for counting: a histogram a digit, and one more.
        histograms: how many histograms that is room for.
        total: the first number of the last, how many have been picked.
        close_block: numbers with the first digits of the k-th that are looked at together.
        eighth: an eighth of ``block_k``.
    """

    packed: bool
    lengths: bool
    page: int
    block_t: int
    k: int
    block_k: int
    chunk: int
    counters: int = (DIGITS + 1) * BINS
    histograms: int = DIGITS + 1
    total: int = DIGITS * BINS
    close_block: int = 0
    eighth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePlan(SelectPlan):
    """Scores of a tile of tokens against a range of the history, as ordered whole numbers.

    Attributes:
        selection: the stage.
        heads: columns of one token: the points of the axes that the inner sums close.
        block_h: the same, padded to a power of two.
        block_m: columns of a tile: tokens times padded heads.
        block_n: positions of a block.
        widths_k: length of each dot's contraction.
        blocks_k: the same, padded to powers of two.
        operand: element type of each dot's operands.
        quantised: histories stored as e4m3 beside scales.
    """

    selection: Selection
    heads: int
    block_h: int
    block_m: int
    block_n: int
    widths_k: tuple[int, ...]
    blocks_k: tuple[int, ...]
    operand: tuple[str, ...]
    quantised: tuple[Scaled, ...]


# --- the selection ---------------------------------------------------------------------------


def plan_score(form: SelectedForm, spec: Spec, phase: str) -> ScorePlan:
    """The scores of a tile of tokens against the history."""
    own, program = form.selection, form.program
    widths = tuple(prod(spec.size(a) for a in d.over) for d in own.dots)
    blocks = tuple(padded(w) for w in widths)
    operand = tuple(operand_of((*d.query, *d.key), spec) for d in own.dots)
    heads = prod(spec.size(a) for a in own.heads)
    block_h, block_t = _columns(spec, phase, heads if own.heads else 0)
    block_m = block_h * block_t
    wide, quantised = "fp32" in operand, _quantised(spec, _roots(own))
    block_n, stages = _blocks(spec, sum(blocks), block_m, wide)
    dtype = named(operand, wide, quantised)
    wanted = selected_wanted(Family.SCORES, spec, phase, dtype, blocks, columns=block_m)
    rule = Tiles(block_m, block_n, 8 if block_m * block_n >= 64 * 128 else 4, stages)
    tiles, chosen = choose_selected(spec, wanted, rule)
    roots = _roots(own)
    args: list[Arg] = [*inputs(program, spec, roots), *layout(spec)]
    args += [_numbers("order"), _numbers("counts"), _numbers("firsts")]
    args += [ScalarArg("width", "i64"), ScalarArg("splits", "i32"), *loose(program, roots, spec)]
    return ScorePlan(
        op=program.name, phase=f"{phase}_score", template="triton/select_score.py.jinja",
        program=program, args=tuple(args), static=spec.static,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        precision="tf32x3" if wide else "ieee", packed=spec.packed,
        lengths=spec.lengths, page=page_size(spec), block_t=block_t, k=own.node.k,
        block_k=power(own.node.k), chunk=CHUNK, selection=own, heads=heads, block_h=block_h,
        block_m=block_m, block_n=tiles.block_n, widths_k=widths, blocks_k=blocks, operand=operand,
        quantised=quantised, chosen=chosen,
    )  # fmt: skip


def named(operand: tuple[str, ...], wide: bool, quantised: tuple[Scaled, ...]) -> str:
    """Element types as a table of plans names them."""
    return ("fp32" if wide or not operand else operand[0]) + ("+e4m3" if quantised else "")


def _roots(own: Selection) -> tuple[Node, ...]:
    return tuple(n for n in (own.node.score, own.node.where) if n is not None)


def _columns(spec: Spec, phase: str, heads: int) -> tuple[int, int]:
    """Padded heads of a token, and tokens of a tile: 16 columns at least, of many tokens 128."""
    tokens = 1 if phase == "decode" else 1 << 20
    tokens = tokens if spec.packed else dict(spec.buckets).get(TOKENS, tokens)
    if not heads:
        return 1, min(128, power(tokens))
    most = 1 << max(tokens - 1, 0).bit_length()
    block_h = 1 << max(heads - 1, 0).bit_length()
    block_t = max(1, min(most, 128 // block_h))
    return max(block_h, 16 // block_t), block_t


def _blocks(spec: Spec, columns: int, block_m: int, wide: bool) -> tuple[int, int]:
    """Positions of a block, and how many blocks are under way."""
    element = 4 if wide else 2
    block_n = 32 if wide else 128
    room = shared_limit(spec.target) // (1 if block_m > 64 else 2) - element * block_m * columns
    while block_n > 16 and 2 * element * block_n * columns > room:
        block_n //= 2
    return block_n, max(1, min(3, room // (element * block_n * columns)))


def plan_count(form: SelectedForm, score: ScorePlan) -> SelectPlan:
    """The second digit of the k-th number of each row."""
    names = ("order", "firsts", "counts", "ties")
    args: list[Arg] = [*(_numbers(n) for n in names), *_places(score)]
    args += [ScalarArg("width", "i64"), ScalarArg("chunks", "i32"), ScalarArg("splits", "i32")]
    return _stage(form, score, "count", args)


def plan_pick(form: SelectedForm, score: ScorePlan) -> SelectPlan:
    """What is above the first digits of the k-th number, and what has them."""
    args = [_numbers("order"), _numbers("counts"), _numbers("ties"), *_places(score)]
    args += [TensorArg(n, parse("i"), "i64", True, True) for n in ("picks", "close")]
    args += [ScalarArg("width", "i64"), ScalarArg("chunks", "i32")]
    return _stage(form, score, "pick", args)


def plan_sort(form: SelectedForm, score: ScorePlan, spec: Spec) -> SelectPlan:
    """The last digits of the k-th number, and what is picked, in order."""
    picks = TensorArg("picks", parse("i"), "i64", True, True)
    close = TensorArg("close", parse("i"), "i64", False, True)
    args = [_numbers("counts"), picks, close, picked(form, spec, written=True), *_places(score)]
    args.append(ScalarArg("width", "i64"))
    return _stage(form, score, "sort", args)


def _stage(form: SelectedForm, score: ScorePlan, name: str, args: list[Arg]) -> SelectPlan:
    warps = 8 if name != "sort" or score.block_k > 512 else 4
    return SelectPlan(
        op=score.op, phase=name, template=f"triton/select_{name}.py.jinja", program=form.program,
        args=tuple(args), static=score.static, num_warps=warps, num_stages=1, precision="ieee",
        packed=score.packed, lengths=score.lengths, page=0, block_t=score.block_t, k=score.k,
        block_k=score.block_k, chunk=score.chunk, close_block=CLOSE, eighth=score.block_k // 8,
    )  # fmt: skip


def picked(form: SelectedForm, spec: Spec, *, written: bool) -> TensorArg:
    """The picks as a parameter: int32 ``[B, T, k]``, packed without B."""
    axis = form.selection.node.axis
    rows = ((TOKENS,),) if spec.packed else (("B",), (TOKENS,))
    return TensorArg("picked", Pattern((*rows, (axis,))), "i32", written, False)


# --- parts of plans --------------------------------------------------------------------------


def operand_of(nodes: tuple[Node, ...], spec: Spec) -> str:
    """The element type of a product; plain e4m3 numbers take whatever the others have."""
    plain = {
        n.name for n in walk(*nodes)
        if isinstance(n, Input) and n.axes and spec.operand(n.name) == E4M3
    }  # fmt: skip
    rest = [n for n in walk(*nodes) if isinstance(n, Input) and n.axes and n.name not in plain]
    return stored(rest, spec) if rest else "fp16"


def _quantised(spec: Spec, roots: tuple[Node, ...]) -> tuple[Scaled, ...]:
    names = {n.name for n in walk(*roots) if isinstance(n, Input)}
    return tuple(s for s in spec.quantised if s.name in names)


def layout(spec: Spec) -> Iterator[Arg]:
    """Parameters that say where sequences lie, and which tile of them comes first."""
    paged = bool(spec.pages)
    yield from layout_args(packed=spec.packed, lengths=spec.lengths, paged=paged)
    yield from _tiles(spec.packed)


def _places(score: ScorePlan) -> Iterator[Arg]:
    yield from layout_args(packed=score.packed, lengths=score.lengths, paged=False)
    yield from _tiles(score.packed)


def _tiles(packed: bool) -> Iterator[Arg]:
    yield ScalarArg("first_tile", "i32")
    if not packed:
        yield ScalarArg("tiles_each", "i32")


def _numbers(name: str) -> TensorArg:
    return TensorArg(name, parse("i"), "i32", True, True)


def loose(
    program: Program, roots: tuple[Node, ...], spec: Spec, axes: tuple[str, ...] = ()
) -> Iterator[Arg]:
    """Run-time sizes that the kernel needs."""
    asked = {n.axis for n in walk(*roots) if isinstance(n, Size)} | {*axes}
    asked -= {TOKENS, program.history_axis or "S", *dict(spec.static)}
    return (ScalarArg(f"n_{a}", "i32") for a in sorted(asked))


def power(n: int) -> int:
    """The next power of two, 16 or more."""
    return max(16, 1 << max(n - 1, 0).bit_length())
