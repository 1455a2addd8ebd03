"""Scale of the scores and extent of a tile's rows, as text: what every dialect's tile needs."""

from __future__ import annotations

import math

from attncc.codegen.emit.bounds import Bounds
from attncc.codegen.emit.functions import literal
from attncc.codegen.emit.scale import gather
from attncc.codegen.emit.softmax_finish import group_of
from attncc.codegen.emit.softmax_rows import Texts
from attncc.codegen.emit.triton import Printer
from attncc.codegen.forms import Band
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.terms import mul
from attncc.dsl.graph import axes_of
from attncc.dsl.ir import Node


def scaled(p: Printer, plan: TiledPlan, score: Node) -> tuple[Node, str]:
    """The score without its uniform factor, and that factor as text if it is a positive constant.

    Otherwise a variable ``scale`` holds the factor, log2(e) included.
    """
    uniform = {*plan.grid_axes, *(("B",) if plan.packed else ())}
    x, base2, fixed = factored(p, score, uniform)
    if not fixed and base2 > 0 and math.isfinite(base2):
        return x, repr(base2)
    p.lines.append(scale_line(p, base2, fixed))
    return x, ""


def factored(p: Printer, score: Node, uniform: set[str]) -> tuple[Node, float, list[Node]]:
    """The score without the factors that are one number for a tile.

    Args:
        p: of the tile.
        score: the score.
        uniform: axes that a tile has one place of.

    Returns:
        What is left; the constant factor, log2(e) included; the other factors that were taken.
    """
    factor, rest = gather(score, p.sizes)
    fixed = [n for n in rest if set(axes_of(n)) <= uniform]
    x = mul(*(n for n in rest if not set(axes_of(n)) <= uniform))
    return x, factor * math.log2(math.e), fixed


def scale_line(p: Printer, base2: float, fixed: list[Node]) -> str:
    """The line that defines ``scale``."""
    texts = [literal(base2), *(p.emit(n).text for n in fixed)]
    return f"scale = {' * '.join(texts)}  # log2(e) included"


def band_offset(p: Printer, band: Band) -> str | None:
    """Text of a band's offset if it is one number for the whole tile."""
    value = p.emit(band.offset)
    return None if value.dims else value.text


def limit_lines(plan: TiledPlan, limits: Bounds, *, forced: bool) -> Texts:
    """Absolute positions of the tile's first and last token, if anything uses them."""
    texts = " ".join((limits.lo, limits.hi, limits.inner_lo, limits.inner_hi))
    if "t_" not in texts and not forced:
        return ()
    group = group_of(plan)
    shift = " + (S - T)" if plan.aligned_end else ""
    last = f"tl.minimum(start + {plan.block_m}, T * {group}) - 1"
    return (
        f"t_first = (start // {group}{shift}).to(tl.int64)",
        f"t_last = (({last}) // {group}{shift}).to(tl.int64)",
    )
