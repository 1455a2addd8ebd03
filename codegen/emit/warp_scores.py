"""Prints the score of a warp-specialised tile from its product, in the form that the plan names."""

from __future__ import annotations

import math
from collections.abc import Mapping

from attncc.codegen.emit.functions import literal, wrap
from attncc.codegen.emit.linear_scores import linear_lines, linear_score
from attncc.codegen.emit.scale import fold_constants
from attncc.codegen.emit.softmax_limits import factored, scaled
from attncc.codegen.emit.softmax_rows import Texts, section
from attncc.codegen.emit.softmax_scores import TILE, hoist, tile_of
from attncc.codegen.emit.triton import Named, Printer, Var
from attncc.codegen.forms import Dot
from attncc.codegen.plan_gluon import WarpPlan
from attncc.codegen.terms import mul, number
from attncc.codegen.warp_forms import Tanh
from attncc.dsl.graph import kind_of
from attncc.dsl.ir import Fn, Kind, Map, Node

NAMED: Mapping[Tanh, Mapping[Fn, Named]] = {
    Tanh.QUOTIENT: {},
    Tanh.SERIES: {Fn.TANH: Named("tl.tanh_series({0}, -1.0, 1.0)", 2 * math.log2(math.e))},
}
"""Gluon's text of functions that have several forms."""


def score_lines(p: Printer, plan: WarpPlan, dot: Dot) -> tuple[Texts, str, str]:
    """Lines that define ``x``, the factor to logits, and what a row adds; setup is printed."""
    found = linear_score(plan, p.sizes)
    if found is not None:
        lines, scale = linear_lines(p, found)
        return lines, scale, "rest"
    folded = fold_constants(plan.fold.score, p.sizes)
    hoist(p, plan, folded)
    x, scale = scaled(p, plan, folded)
    p.known[dot.node] = Var("s0", TILE)
    if isinstance(x, Map) and x.fn is Fn.TANH and plan.tanh is Tanh.SERIES:
        series = _series(p, plan, x, "1.0" if scale else "scale")
        return series, scale, ""
    setup, scores = p.lines, section(p)
    scores.append(_tile(p, plan, x, "" if scale else " * scale"))
    p.lines = setup
    return tuple(scores), scale, ""


def _series(p: Printer, plan: WarpPlan, x: Map, by: str) -> Texts:
    """A score that is a tanh, where what multiplies its argument and its value costs nothing."""
    uniform = {*plan.grid_axes, *(("B",) if plan.packed else ())}
    inner, base2, fixed = factored(p, mul(number(2), x.args[0]), uniform)
    if fixed:
        texts = [literal(base2), *(wrap(p.emit(n).text) for n in fixed)]
        p.lines += [
            f"inside = {' * '.join(texts)}",
            f"by = tl.where(inside < 0.0, -{by}, {by})",
            "inside = -tl.abs(inside)",
        ]
    else:
        p.lines += [f"inside = {-abs(base2)!r}", f"by = {'-' if base2 < 0 else ''}{by}"]
    setup, scores = p.lines, section(p)
    scores.append(f"x = tl.tanh_series({p.lift(p.emit(inner), TILE)}, inside, by)")
    p.lines = setup
    return tuple(scores)


def _tile(p: Printer, plan: WarpPlan, x: Node, tail: str) -> str:
    return tile_of(p, plan, p.emit(x), tail, kind_of(x) is Kind.INT)
