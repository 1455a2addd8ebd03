"""Bytes of objects as formulas over axis sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from attncc.dsl.axes import Pattern, history_dim
from attncc.dsl.errors import ArgumentError, SizeError, UnknownSizeError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Layer, LayerObject, NodeKind
from attncc.dsl.ledger.choices import Choices
from attncc.dsl.ledger.model import Formula, Growth, Phase

if TYPE_CHECKING:
    from sympy import Expr, Symbol

DEFAULTS = {"chunk": 64, "splits": 1, "segments": 1, "room": 1 << 28}
"""What a plan chooses: tokens of a chunk, parts of a history, parts of a scan, and the bytes that
scores of a selection may take at a time (more tokens are taken in turns)."""


@cache
def symbol(name: str) -> Symbol:
    """The size of an axis."""
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


@cache
def _least(count: int, size: Expr) -> Expr:
    import sympy

    return sympy.Min(count, size)


@dataclass(frozen=True, slots=True)
class Measure:
    """How the axes of a graph are counted in one phase.

    Attributes:
        name: of the op or layer, for errors.
        phase: what the step is part of.
        sizes: by axis, None for formulas alone.
        fixed: axes with a size of their own in this phase: what stands for them in formulas.
        selected: axes that a top-k makes, with k.
        histories: axes along which histories in blocks grow.
    """

    name: str
    phase: Phase
    sizes: Mapping[str, int] | None
    fixed: Mapping[str, Expr]
    selected: Mapping[str, int]
    histories: frozenset[str] = frozenset()

    def axis(self, name: str) -> Expr:
        """The size of one axis."""
        if name in self.fixed:
            return self.fixed[name]
        if name in self.selected:
            return _least(self.selected[name], self.axis("S"))
        return symbol(name)

    def rows(self, held: LayerObject, choices: Choices) -> dict[str, Expr]:
        """Axes of an object that are stored with another size than the body sees."""
        import sympy

        found: dict[str, Expr] = {}
        if held.rows:
            found[held.rows] = self.axis(held.rows) - 1
        if held.lifetime is Lifetime.CACHE and self.phase is not Phase.TRAIN:
            history = self.axis("S")
            if held.name in choices.keep:
                history = sympy.Min(history, choices.keep[held.name])
            if choices.page:
                history = sympy.ceiling(history / choices.page) * choices.page
            found["S"] = history
        return found

    def product(
        self, pattern: Pattern, factor: int, changed: Mapping[str, Expr] | None = None,
        extra: Iterable[Expr] = (),
    ) -> Formula:  # fmt: skip
        """Elements of a layout times bytes of each, factors as they stand in the layout."""
        import sympy

        other = changed or {}
        parts = [*extra, *(other.get(a, self.axis(a)) for a in pattern.axes), sympy.Integer(factor)]
        shown = [p for p in parts if p != 1] or [sympy.Integer(1)]
        text = " * ".join(f"({p})" if p.is_Add else str(p) for p in shown)
        return self.formula(sympy.Mul(*parts), text)

    def shape(self, pattern: Pattern, changed: Mapping[str, Expr]) -> tuple[str, ...]:
        """Extents of memory axes as text: ``("B", "1", "Hkv*G", "D")``."""
        found = []
        for dim in pattern.dims:
            parts = [changed.get(a, self.axis(a)) for a in dim]
            texts = [f"({p})" if p.is_Add and len(dim) > 1 else str(p) for p in parts if p != 1]
            found.append("*".join(texts) or "1")
        return tuple(found)

    def chunked(self, pattern: Pattern, factor: int) -> Formula:
        """Bytes of a state kept at the beginning of every chunk of a pass."""
        import sympy

        return self.product(
            pattern, factor, extra=(sympy.ceiling(self.axis("T") / symbol("chunk")),)
        )

    def in_turns(self, size: Formula) -> Formula:
        """Bytes of what is made for so many tokens at a time that it has room."""
        import sympy

        return self.formula(sympy.Min(size.expr, symbol("room")), f"Min({size.text}, room)")

    def blocks(self, axis: str, block: int | None) -> Expr:
        """How many scales an axis has: one, or one for each block of it.

        Raises:
            ArgumentError: the block does not divide the axis.
        """
        import sympy

        if block is None:
            return sympy.Integer(1)
        size = self.value(self.axis(axis))
        if size is not None and size % block:
            raise ArgumentError(
                "the block does not divide the row",
                op=self.name, axis=axis, expected=f"a multiple of {block}", found=size,
            )  # fmt: skip
        return self.axis(axis) / block

    def numbers(self, reach: int | str) -> dict[str, Symbol]:
        """Host numbers of a bound on a history, as symbols."""
        return {w: symbol(w) for w in _words(reach)}

    def reach(self, reach: int | str) -> int | None:
        """The last rows that a query looks at, None where a host number is not known."""
        import sympy

        rows = sympy.sympify(str(reach), locals=self.numbers(reach))
        return int(rows) if rows.is_Integer else self.value(rows)

    def formula(self, expr: Expr, text: str | None = None) -> Formula:
        """A formula, with its value where sizes are known.

        Raises:
            UnknownSizeError: sizes were given, but not all.
        """
        return Formula(str(expr) if text is None else text, expr, self.value(expr))

    def value(self, expr: Expr) -> int | None:
        """The value of a formula; see :meth:`formula`."""
        if self.sizes is None:
            return None
        missing = sorted(s.name for s in expr.free_symbols if s.name not in self.sizes)
        if missing:
            raise UnknownSizeError(
                "a size is missing", op=self.name, axis=" ".join(missing),
                expected="an entry in sizes=",
            )  # fmt: skip
        return int(expr.subs({s: self.sizes[s.name] for s in expr.free_symbols}))

    def growth(self, expr: Expr, held: LayerObject) -> Growth:
        """How a formula grows with the context."""
        import sympy

        if held.lifetime is Lifetime.WINDOW:
            return Growth.BOUNDED
        if held.lifetime in (Lifetime.MEMORY, Lifetime.PARAMETER, Lifetime.STATE):
            return Growth.FIXED
        context = sympy.Symbol("context", positive=True)
        plain = expr.replace(sympy.ceiling, lambda x: x)
        bounded = plain.replace(sympy.Min, lambda *_: sympy.Integer(1))
        both = bounded.subs({symbol(a): context for a in ("T", "S", *self.histories)})
        degree = sympy.degree(sympy.expand(both), context) if both.has(context) else 0
        if degree == 0:
            return Growth.BOUNDED if plain.has(sympy.Min) else Growth.FIXED
        return Growth.LINEAR if degree == 1 else Growth.QUADRATIC


def measure(graph: Layer, sizes: Mapping[str, int] | None, phase: Phase) -> Measure:
    """How the axes of a graph are counted.

    Decode has one token a sequence where T is not given; a prefill's history is its own tokens
    where one of S and T is not given; in training S is T.

    Raises:
        ArgumentError: a size that is no number, or of no axis of the graph.
        SizeError: another size than the declaration's own, or a history that is not the batch.
    """
    import sympy

    selected = {
        graph.object(name).pattern.axes[-1]: dict(graph.sizes)[graph.object(name).pattern.axes[-1]]
        for node in graph.nodes
        if node.kind is NodeKind.TOPK
        for name in node.outputs
    }
    own = any(o.lifetime is Lifetime.CACHE for o in graph.objects)
    fixed = {a: sympy.Integer(n) for a, n in graph.sizes if a not in selected}
    known = None if sizes is None else _known(graph, sizes, fixed, selected)
    if phase is Phase.DECODE and (known is None or "T" not in known):
        fixed["T"] = sympy.Integer(1)
    if phase is Phase.TRAIN and own:
        fixed["S"] = symbol("T")
    if known is not None and own and phase is not Phase.DECODE and "S" in known:
        known.setdefault("T", known["S"])
    if known is not None and "T" in known and own and phase is not Phase.DECODE:
        other = known.setdefault("S", known["T"]) != known["T"]
        if other and phase is Phase.TRAIN:
            raise SizeError(
                "in training the history is the batch's own tokens",
                op=graph.name, axis="S", expected=known["T"], found=known["S"],
            )  # fmt: skip
    caches = (history_dim(o.pattern) for o in graph.objects if o.lifetime is Lifetime.CACHE)
    blocks = frozenset(dim[0] for dim in caches if dim)
    return Measure(graph.name, phase, known, fixed, selected, blocks)


def _words(reach: int | str) -> list[str]:
    """The host numbers that a bound on a history names."""
    words = str(reach).replace("*", " ").replace("+", " ").split()
    return [w for w in words if w.isidentifier()]


def _known(
    graph: Layer, sizes: Mapping[str, int], fixed: Mapping[str, Expr], selected: Mapping[str, int]
) -> dict[str, int]:
    axes = {a for o in graph.objects for a in o.pattern.axes} | {"B", "T", "S"}
    numbers = {w for o in graph.objects if o.reach is not None for w in _words(o.reach)}
    some = {*DEFAULTS, *(o.rows for o in graph.objects)}  # a window holds a row less than it has
    for axis, size in sizes.items():
        least = 1 if axis in some else 0
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise ArgumentError(
                "a size is a whole number", op=graph.name, axis=axis, expected=f"{least} or more",
                found=repr(size),
            )  # fmt: skip
        if axis not in axes | numbers | set(DEFAULTS):
            raise ArgumentError(
                "no such axis", op=graph.name, axis=axis, expected=" ".join(sorted(axes))
            )
        own = selected.get(axis, fixed.get(axis, size))
        if own != size:
            raise SizeError(
                "the declaration has a size of its own",
                op=graph.name, axis=axis, expected=own, found=size,
            )  # fmt: skip
    known = {**DEFAULTS, **{a: n for a, n in sizes.items() if a not in selected}}
    return _reshaped(graph, known)


def _reshaped(graph: Layer, sizes: dict[str, int]) -> dict[str, int]:
    """Sizes, with those of axes that a reshape makes of known ones."""
    for node in graph.nodes:
        if node.kind is not NodeKind.RESHAPE or len(node.inputs) != 1:
            continue
        read, made = graph.object(node.inputs[0]).pattern, graph.object(node.outputs[0]).pattern
        for whole, parts in ((read, made), (made, read)):
            new = [a for a in whole.axes if a not in parts.axes]
            split = [a for a in parts.axes if a not in whole.axes]
            if len(new) == 1 and new[0] not in sizes and all(a in sizes for a in split):
                sizes[new[0]] = prod(sizes[a] for a in split)
    return sizes
