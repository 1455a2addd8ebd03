"""Prints a mask of bands as each row's first and last key, and what is left of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attncc.codegen.emit.bounds import Bounds
from attncc.codegen.emit.softmax_rows import Texts
from attncc.codegen.emit.triton import Printer
from attncc.codegen.forms import Band, Clause, MaskForm
from attncc.codegen.plan_gluon import WarpPlan
from attncc.dsl.ir import Fn, Map, Node

FAR = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Edges:
    """A mask in two parts.

    Attributes:
        setup: ``row_lo`` and ``row_hi``, the first and the last key that bands show each row.
        visible: whether an element of a block lies between them.
        rest: what bands do not say, or None.
    """

    setup: Texts
    visible: str
    rest: Node | None


def edges_of(p: Printer, plan: WarpPlan, place: str = "") -> Edges:
    """The parts of a mask of one clause, whose bands are all of one key each.

    Both edges are clamped to the keys that there are, so that they are 32-bit numbers whatever
    the bands' offsets, and no key after the history's last one is seen.

    Args:
        p: of the tile.
        plan: of the tile.
        place: a variable with the places of a block's keys as real numbers, if there is one: no
            others are held in registers then. Rounding moves no edge into a block or out of it.
    """
    [clause] = _clauses(plan)
    lows = [_edge(p, band) for band in clause.bands if band.s > 0]
    highs = [_edge(p, band) for band in clause.bands if band.s < 0]
    highs = highs or ["0 * t_abs + (S - 1)"]  # one number a row, whatever limits it
    setup = [f"row_hi = {_clamped('minimum', highs, 'S - 1', 'maximum', '-1')}"]
    at, cast = (place, ".to(tl.float32)") if place else ("offs_n", "")
    visible = f"({at}[None, :] <= (row_hi - n0){cast}[:, None])"
    if lows:
        setup.append(f"row_lo = {_clamped('maximum', lows, '0', 'minimum', 'S')}")
        visible += f" & ({at}[None, :] >= (row_lo - n0){cast}[:, None])"
    return Edges(tuple(setup), visible, rest_of(plan))


def _clauses(plan: WarpPlan) -> tuple[Clause, ...]:
    return () if plan.fold.mask is None else plan.fold.mask.clauses


def _edge(p: Printer, band: Band) -> str:
    """The first key of a band that limits from below, the last one of any other; ``[m]``."""
    offset = p.emit(band.offset).text
    row = "t_abs" if abs(band.t) == 1 else f"{abs(band.t)} * t_abs"
    text = f"{'-' if band.t < 0 else ''}{row}" if band.t else "0 * t_abs"
    text = text if offset == "0" else f"{text} + ({offset})"
    return f"-({text})" if band.s > 0 else text


def _clamped(inner: str, edges: list[str], bound: str, outer: str, limit: str) -> str:
    text = bound
    for edge in edges:
        text = f"tl.{inner}({text}, {edge})"
    return f"tl.{outer}({text}, {limit}).to(tl.int32)"


def rest_of(plan: WarpPlan) -> Node | None:
    """The conjunction of the predicates that are no bands."""
    found: Node | None = None
    for clause in _clauses(plan):
        for node in clause.residual:
            found = node if found is None else Map(Fn.AND, (found, node), loc=node.loc)
    return found


def bands_alone(mask: MaskForm) -> MaskForm:
    """A mask without its predicates."""
    return MaskForm(mask.node, tuple(replace(c, residual=()) for c in mask.clauses))


def beside_clear(limits: Bounds, clear: tuple[str, str]) -> Bounds:
    """Bounds where inside, besides bands, the predicates of a run of blocks hold for all rows."""
    return replace(
        limits,
        inner_lo=f"tl.maximum({limits.inner_lo}, {clear[0]})",
        inner_hi=f"tl.minimum({limits.inner_hi}, {clear[1]})",
    )


def clear_lines(plan: WarpPlan, clear: tuple[str, str]) -> Texts:
    """Blocks from ``clear_lo`` up to before ``clear_hi`` need bands only.

    A run that reaches the last block looked at has no end: no band shows a key after it.
    """
    size = plan.block_n
    lo, hi = clear
    return (
        f"clear_lo = tl.cdiv({lo}, {size}).to(tl.int32) * {size}",
        f"clear_hi = ({hi}).to(tl.int32) // {size} * {size}",
        f"clear_hi = tl.where(all_hi >= stop_block, {FAR}, clear_hi)",
    )
