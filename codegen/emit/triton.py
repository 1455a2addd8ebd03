"""Triton text for element-wise code, loads and in-tile sums over named axes.

A kernel works on tiles whose dimensions have short names (``m``, ``n``, ``c``, ``k``, ``v``). A
family's emitter says where each axis is found (:class:`Place`), which nodes the skeleton already
holds in a variable (``known``), and gets back lines of code and the name of a value. Everything is
computed on fp32 copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from attncc.codegen.emit import exact
from attncc.codegen.emit.functions import REAL_ONLY, constant, function, literal, wrap
from attncc.codegen.emit.scale import fold_constants
from attncc.codegen.plan import TensorArg
from attncc.codegen.terms import mul, number
from attncc.dsl.errors import RefusedError
from attncc.dsl.graph import kind_of
from attncc.dsl.ir import (
    AtQuery,
    Contract,
    Fn,
    Index,
    Input,
    Kind,
    Map,
    Node,
    Red,
    Reduce,
    Select,
    Size,
    Take,
)


@dataclass(frozen=True, slots=True)
class Var:
    """A variable or expression of the kernel and the tile dimensions it has, in tile order."""

    text: str
    dims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an axis is found: an index into memory, and the condition that it is in range.

    The whole index is ``base + index``; a scalar base moves the pointer, not the tile.
    """

    index: Var
    valid: Var | None = None
    base: Var | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """A function's text in a dialect: ``text`` with its argument, times ``factor``, for ``{0}``."""

    text: str
    factor: float = 1.0


@dataclass(slots=True)
class Printer:
    """Prints nodes as Triton code.

    Attributes:
        dims: the kernel's tile dimensions in their one order.
        tensors: parameters by name of the input they hold.
        places: where each axis is found in memory.
        positions: absolute positions for ``Index`` nodes by axis.
        sizes: text of ``Size`` by axis (a literal where the size is compiled in).
        known: nodes that are already in a variable.
        scalars: text of host scalars by input name.
        at_query: where a history axis (and its pages) is found at the query's own position.
        exact: element-wise functions at fp32's own accuracy, at a few more operations.
        named: functions of tiles that their dialect has a form of its own for.
        origins: by axis, a position near all that a tile has of it: distances to these are
            counted from there where they become real numbers.
    """

    dims: tuple[str, ...]
    tensors: Mapping[str, TensorArg]
    places: Mapping[str, Place]
    positions: Mapping[str, Var] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    known: dict[Node, Var] = field(default_factory=dict)
    scalars: Mapping[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    prefix: str = "x"
    at_query: Mapping[str, Place] = field(default_factory=dict)
    exact: bool = False
    named: Mapping[Fn, Named] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    _counter: Iterator[int] = field(default_factory=itertools.count)
    _told: str = ""

    def child(self, **places: Place) -> Printer:
        """A printer with some axes found elsewhere; lines and numbering are shared."""
        merged = {**self.places, **places}
        return replace(self, places=merged, known={})

    # -- tiles

    def order(self, *dims: tuple[str, ...]) -> tuple[str, ...]:
        """The union of dimensions in tile order."""
        have = {d for group in dims for d in group}
        return tuple(d for d in self.dims if d in have)

    def lift(self, var: Var, dims: tuple[str, ...]) -> str:
        """The variable's text broadcast against more dimensions (size 1 where it has none)."""
        if not var.dims or var.dims == dims:
            return var.text
        picks = ", ".join(":" if d in var.dims else "None" for d in dims)
        text = var.text if var.text.isidentifier() else f"({var.text})"
        return f"{text}[{picks}]"

    def name(self, text: str, dims: tuple[str, ...], hint: str = "") -> Var:
        """Assign an expression to a fresh variable."""
        label = f"{hint or self.prefix}{next(self._counter)}"
        self.lines.append(f"{label} = {text}")
        return Var(label, dims)

    def tell(self, node: Node) -> None:
        """A comment with the user's line, once for a run of code from the same line."""
        place = node.loc.short() if node.loc.line else ""
        if place and place != self._told:
            self.lines.append(f"# src[{place}]")
            self._told = place

    # -- memory

    def offset(self, arg: TensorArg) -> tuple[Var, list[Var]]:
        """Element offset of a tensor at the current places, and the conditions that guard it."""
        parts: list[Var] = []
        guards: list[Var] = []
        strides = (*arg.steps, "1")
        for stride, names in zip(strides, arg.pattern.dims, strict=True):
            base, index = Var("0"), Var("0")
            for name in names:
                place, size = self.places[name], self.sizes.get(name, "")
                base = self._within(base, size, place.base or Var("0"))
                index = self._within(index, size, place.index)
                if place.valid is not None and place.valid not in guards:
                    guards.append(place.valid)
            for found in (base, index):
                if found.text != "0":
                    parts.append(_scaled(found, stride))
        parts.sort(key=lambda p: bool(p.dims))  # scalars move the pointer once
        dims = self.order(*(p.dims for p in parts))
        text = " + ".join(self.lift(p, dims) for p in parts) or "0"
        return Var(text, dims), guards

    def _within(self, outer: Var, size: str, inner: Var) -> Var:
        """One more axis of a memory axis: ``outer * size + inner``."""
        if outer.text == "0":
            return inner
        dims = self.order(outer.dims, inner.dims)
        text = f"({self.lift(outer, dims)}) * {size}"
        return Var(text if inner.text == "0" else f"{text} + {self.lift(inner, dims)}", dims)

    def guard(self, guards: list[Var], dims: tuple[str, ...]) -> str:
        """The conjunction of conditions over the given dimensions; empty if there is none."""
        texts = [self.lift(g, dims) for g in guards]
        return " & ".join(f"({t})" if " " in t else t for t in texts)

    def load(self, arg: TensorArg, *, raw: bool = False, other: str = "0.0") -> Var:
        """Load a tensor's elements at the current places: fp32 unless ``raw`` or whole numbers."""
        off, guards = self.offset(arg)
        dims = self.order(off.dims, *(g.dims for g in guards))
        mask = self.guard(guards, dims)
        whole = arg.dtype.startswith(("i", "u"))
        fill = f", mask={mask}, other={'0' if whole else other}" if mask else ""
        text = f"tl.load({arg.pointer} + {self.lift(off, dims)}{fill})"
        if not raw and not whole and arg.dtype != "fp32":
            text += ".to(tl.float32)"
        return self.name(text, dims, f"{arg.name}_")

    def store(self, arg: TensorArg, value: Var, also: list[Var] | None = None) -> None:
        """Store a value to a tensor at the current places, in the tensor's dtype."""
        off, guards = self.offset(arg)
        guards = guards + [g for g in also or [] if g not in guards]
        dims = self.order(off.dims, value.dims, *(g.dims for g in guards))
        mask = self.guard(guards, dims)
        at = f"{arg.pointer} + {self.lift(off, dims)}"
        cast = f".to({arg.pointer}.dtype.element_ty)"
        text = self.lift(value, dims)
        if not text.isidentifier():
            text = f"({text})"
        self.lines.append(f"tl.store({at}, {text}{cast}{f', mask={mask}' if mask else ''})")

    # -- nodes

    def emit(self, node: Node) -> Var:
        """The value of a node; shared nodes are printed once."""
        found = self.known.get(node)
        if found is None:
            found = self.known[node] = self._emit(node)
        return found

    def _emit(self, node: Node) -> Var:
        fixed = constant(node, self.sizes)
        if fixed is not None:
            return Var(literal(fixed))
        match node:
            case Input() | Size() | Index():
                return self._leaf(node)
            case Map():
                return self._map(node)
            case Contract(args=args, over=over):
                values = [self.emit(a) for a in args]
                dims = self.order(*(v.dims for v in values))
                text = " * ".join(wrap(self.lift(v, dims)) for v in values)
                return self._sum(node, text, dims, over)
            case Reduce(red=Red.SUM, arg=arg, over=over):
                value = self.emit(arg)
                return self._sum(node, value.text, value.dims, over)
            case AtQuery(arg=arg, over=axis) if axis in self.at_query:
                return self.child(**self.at_query).emit(arg)
            case Select(arg=arg, over=axis, at=at):
                return self.child(**{axis: Place(Var(str(at)))}).emit(arg)
            case Take(table=table, over=axis, index=index):
                row = self.emit(index)
                last = f"{self.sizes[axis]} - 1"
                text = f"tl.minimum(tl.maximum(({row.text}).to(tl.int32), 0), {last})"
                place = Place(self.name(text, row.dims, "at_"))
                return self.child(**{axis: place}).emit(table)
            case _:
                raise RefusedError(
                    f"no Triton code for {type(node).__name__.lower()} here", loc=node.loc
                )

    def _leaf(self, node: Input | Size | Index) -> Var:
        match node:
            case Input(name=name):
                if name in self.scalars:
                    return Var(self.scalars[name])
                self.tell(node)
                return self.load(self.tensors[name])
            case Size(axis=axis):
                return Var(self.sizes[axis])
            case Index(axis=axis):
                return self.positions[axis] if axis in self.positions else self.places[axis].index

    def _sum(self, node: Node, text: str, dims: tuple[str, ...], over: tuple[str, ...]) -> Var:
        self.tell(node)
        padded = [v for v in (self.places[a].valid for a in over) if v is not None]
        if padded:  # a value need not be 0 past the end of its axis
            text = f"tl.where({self.guard(padded, dims)}, {text}, 0.0)"
        for axis in over:
            dim = self.places[axis].index.dims
            if len(dim) != 1 or dim[0] not in dims:
                raise RefusedError(f"axis {axis} is not a tile dimension here", loc=node.loc)
            at = dims.index(dim[0])
            dims = (*dims[:at], *dims[at + 1 :])
            text = f"tl.sum({text}, axis={at})"
        return self.name(text, dims)

    def _map(self, node: Map) -> Var:
        if node.fn in self.named:
            own = self.named[node.fn]
            x = self.emit(fold_constants(mul(number(own.factor), node.args[0]), self.sizes))
            if x.dims:
                return self.name(own.text.format(x.text), x.dims)
        real = kind_of(node) is Kind.REAL
        values = [self._real(a) if real else self.emit(a) for a in node.args]
        dims = self.order(*(v.dims for v in values))
        texts = [self.lift(v, dims) for v in values]
        if node.fn in REAL_ONLY:
            pairs = zip(node.args, texts, strict=True)
            texts = [f"({t}).to(tl.float32)" if is_whole(a) else t for a, t in pairs]
        self.tell(node)
        if self.exact and node.fn in exact.FUNCTIONS:

            def name(text: str) -> str:
                return self.name(text, dims).text

            return self.name(exact.FUNCTIONS[node.fn](name(texts[0]), name), dims)
        if node.fn is Fn.TANH:
            # From 1 to inf, where the square root's reciprocal is one instruction; a division is
            # six.
            y = self.name(f"tl.exp2({2 * math.log2(math.e)} * ({texts[0]})) + 1.0", dims).text
            return self.name(f"1.0 - 2.0 * tl.rsqrt({y} * {y})", dims)
        return self.name(function(node.fn, texts), dims)

    def _real(self, node: Node) -> Var:
        """A value for real arithmetic.

        Of the distance between two positions the two vectors are converted before they meet, not
        every element of the tile after: a conversion is as dear as eight additions. Counted from
        within the tile both are exact, and so is their difference, up to 2^24.
        """
        match node:
            case Map(fn=Fn.SUB, args=(Index() as left, Index() as right)):
                origin = self.origins.get(left.axis) or self.origins.get(right.axis)
                a, b = self.emit(left), self.emit(right)
                if origin and len(a.dims) == len(b.dims) == 1 and a.dims != b.dims:
                    dims = self.order(a.dims, b.dims)
                    texts = [self.lift(self._counted_from(origin, v), dims) for v in (a, b)]
                    return self.name(" - ".join(texts), dims)
        return self.emit(node)

    def _counted_from(self, origin: str, position: Var) -> Var:
        return self.name(f"({position.text} - {origin}).to(tl.float32)", position.dims)


def _scaled(index: Var, stride: str) -> Var:
    if stride == "1":
        return index
    text = f"({index.text})" if " " in index.text else index.text
    return Var(f"{text} * {stride}", index.dims)


def is_whole(node: Node) -> bool:
    """Whether a value is a whole number (kept as an integer in the kernel)."""
    return kind_of(node) is Kind.INT
