"""Scale of the scores and extent of a tile's rows, as text: what every dialect's tile needs."""

from __future__ import annotations

import math

from attncc.codegen.emit.bounds import Bounds
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
    factor, rest = gather(score, p.sizes)
    uniform = {*plan.grid_axes, *(("B",) if plan.packed else ())}
    fixed = [n for n in rest if set(axes_of(n)) <= uniform]
    x = mul(*(n for n in rest if not set(axes_of(n)) <= uniform))
    base2 = factor * math.log2(math.e)
    if not fixed and factor > 0 and math.isfinite(base2):
        return x, repr(base2)
    texts = [repr(base2), *(p.emit(n).text for n in fixed)]
    p.lines.append(f"scale = {' * '.join(texts)}  # log2(e) included")
    return x, ""


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
