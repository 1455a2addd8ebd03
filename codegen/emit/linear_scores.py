"""Scores that are linear in a key's position, and what a row and a block have of them.

``a * dot + f_i (s S + t T + c) + r`` with a constant ``a`` is, within a block that starts at key
``n0``, ``a * (dot + f * place) + rest``: ``place`` counts a block's keys from 0 and is the same in
every block, ``f`` and ``rest`` are one number a row. So an element costs one fused addition, and
``rest`` is added to a row's maximum only. Distances (ALiBi: Press et al., Train Short, Test Long,
2022) are such terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attncc.codegen.emit.functions import constant, wrap
from attncc.codegen.emit.softmax_limits import scale_line
from attncc.codegen.emit.softmax_rows import Texts
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.forms import SoftmaxFold
from attncc.codegen.passes.find_masks import linear
from attncc.codegen.plan_gluon import WarpPlan
from attncc.codegen.softmax_checks import TOKENS
from attncc.codegen.terms import mul, number
from attncc.dsl.graph import axes_of, kind_of
from attncc.dsl.ir import Fn, Kind, Lit, Map, Node

LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Term:
    """``by * (s S + t T + offset)``, where ``by`` is one number a row; ``by`` if s = t = 0."""

    by: Node
    s: int
    t: int
    offset: Node


@dataclass(frozen=True, slots=True)
class LinearScore:
    """A dot times a factor, and terms.

    Attributes:
        scale: the factor's constant part.
        scale_by: its other part, one number a tile, or None.
        terms: each with the constant that it has.
    """

    scale: float
    scale_by: Node | None
    terms: tuple[tuple[float, Term], ...]


def linear_score(plan: WarpPlan, sizes: Mapping[str, str]) -> LinearScore | None:
    """A score's linear form, or None; a score without terms in the key's position has none."""
    found = _Expansion(plan.fold, sizes)
    if not plan.linear or not found.add(plan.fold.score, 1.0, ()):
        return None
    if len(found.dots) != 1 or not any(term.s for _, term in found.terms):
        return None
    [(scale, by)] = found.dots
    if not math.isfinite(scale) or (axes_of(by) if by is not None else scale <= 0):
        return None
    return LinearScore(scale, by, tuple(found.terms))


class _Expansion:
    """The terms of a sum of products, as they are found."""

    def __init__(self, fold: SoftmaxFold, sizes: Mapping[str, str]) -> None:
        self.fold, self.sizes = fold, sizes
        self.dots: list[tuple[float, Node | None]] = []
        self.terms: list[tuple[float, Term]] = []

    def add(self, node: Node, factor: float, by: tuple[Node, ...]) -> bool:
        """Add a constant and factors of a row times a node; False where a term is not linear."""
        match node:
            case _ if node in {d.node for d in self.fold.dots}:
                self.dots.append((factor, mul(*by) if by else None))
                return True
            case Map(fn=Fn.ADD | Fn.SUB as fn, args=(a, b)) if kind_of(node) is Kind.REAL:
                sign = 1.0 if fn is Fn.ADD else -1.0
                return self.add(a, factor, by) and self.add(b, sign * factor, by)
            case Map(fn=Fn.NEG, args=(a,)) if kind_of(node) is Kind.REAL:
                return self.add(a, -factor, by)
            case Map(fn=Fn.MUL, args=(a, b)) if kind_of(node) is Kind.REAL:
                if self._keyed(a):
                    a, b = b, a
                return self._times(a, b, node, factor, by)
            case Map(fn=Fn.DIV, args=(a, b)) if self._keyed(a) and not self._keyed(b):
                below = constant(b, self.sizes)
                if below is not None:
                    return below != 0 and self.add(a, factor / float(below), by)
                return self.add(a, factor, (*by, Map(Fn.DIV, (number(1), b), loc=node.loc)))
        return self._leaf(node, factor, by)

    def _keyed(self, node: Node) -> bool:
        return self.fold.over in axes_of(node)

    def _times(
        self, row: Node, node: Node, whole: Node, factor: float, by: tuple[Node, ...]
    ) -> bool:
        """Add ``whole``, the product of what a row has and another value."""
        if not self._keyed(node):
            return self._leaf(whole, factor, by)
        if self._keyed(row):
            return False
        value = constant(row, self.sizes)
        if value is not None:
            return self.add(node, factor * float(value), by)
        return self.add(node, factor, (*by, row))

    def _leaf(self, node: Node, factor: float, by: tuple[Node, ...]) -> bool:
        if not self._keyed(node):
            self.terms.append((factor, Term(mul(*by, node), 0, 0, Lit(1))))
            return True
        found = linear(node, TOKENS, self.fold.over)
        if found is None:
            return False
        self.terms.append((factor, Term(mul(*by), found.s, found.t, found.offset)))
        return True


def linear_lines(p: Printer, score: LinearScore) -> tuple[Texts, str]:
    """Print a linear score; what rows have goes to the printer's lines.

    Returns:
        Lines that define ``x`` [m, n] and ``rest`` [m] from the product ``s0``; the factor from
        both to base-2 logits, empty where they are that already.
    """
    unit = LOG2E if score.scale_by is not None else 1.0 / score.scale
    slopes: list[str] = []
    rests: list[str] = []
    dims: tuple[str, ...] = ()
    for factor, term in score.terms:
        by = p.emit(mul(number(factor * unit), term.by))
        if term.s:
            dims = dims or by.dims
            slopes.append(wrap(by.text) + ("" if term.s == 1 else f" * {float(term.s)!r}"))
        at = f" * ({_place(p, term)}).to(tl.float32)" if term.s or term.t else ""
        rests.append(wrap(by.text) + at)
    product, scale = "s0", repr(score.scale * LOG2E)
    if score.scale_by is not None:
        p.lines.append(scale_line(p, score.scale * LOG2E, [score.scale_by]))
        product, scale = "s0 * scale", ""
    p.lines += [f"slope = {' + '.join(slopes)}", "place = offs_n.to(tl.float32)  # [n]"]
    slope = p.lift(Var("slope", dims), ("m", "n"))
    # Written as one operation: a product of a row and a column would be kept from block to block.
    fused = f"x = tl.fma({slope}, place[None, :], {product})"
    return (fused, f"rest = {' + '.join(rests)}"), scale


def _place(p: Printer, term: Term) -> str:
    """A term's whole number at the block's first key; parts that are 0 are left out."""
    parts = []
    for factor, name in ((term.s, "n0"), (term.t, "t_abs")):
        if factor:
            parts.append({1: name, -1: f"(-{name})"}.get(factor, f"({factor} * {name})"))
    offset = p.emit(term.offset).text
    if offset != "0":
        parts.append(wrap(offset))
    return " + ".join(parts)
