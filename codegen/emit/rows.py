"""Rows of a chunk as tile dimensions: where tokens are found, and expressions that differ by row.

A chunk of C tokens with R rows each is laid out token-major: place ``i`` is row ``i % R`` of token
``i // R``. The same layout serves the rows of a system (dimension ``m``), its columns (``n``) and,
where R is 1, the tokens themselves; otherwise tokens have a dimension ``c``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attncc.codegen.emit.scan import (
    ELEMENT,
    grid_places,
    scalars_of,
    sizes_of,
    tensors_of,
    tile_place,
)
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_affine import ROWS, ChunkPlan
from attncc.dsl.graph import rebuild, walk
from attncc.dsl.ir import Input, Lit, Node, Select

DIMS = ("m", "c", "n", "k", "v")


@dataclass(frozen=True, slots=True)
class Places:
    """Names of the variables that say where a dimension of rows or tokens lies.

    Attributes:
        dim: the tile dimension.
        token: token within its sequence.
        row: that token's row of memory along T.
        valid: the place holds a token of this chunk.
        update: which of the token's rows the place is; "" for a dimension of tokens.
    """

    dim: str
    token: str
    row: str
    valid: str
    update: str

    def lines(self, plan: ChunkPlan) -> list[str]:
        """Code that makes the variables from ``first_token``, ``first_row`` and ``length``."""
        per = len(plan.form.rows) if self.update else 1
        count = ROWS if self.update else plan.token_tile
        d = self.dim
        lines = [f"{d} = tl.arange(0, {count})"]
        offset = d
        if per > 1:
            lines += [f"{self.update} = {d} % {per}"]
            offset = f"{d} // {per}"
        lines += [
            f"{self.token} = first_token + {offset}",
            f"{self.row} = first_row + {self.token}",
        ]
        inside = f"{self.token} < length"
        if per * plan.tokens < count:
            inside = f"({inside}) & ({d} < {per * plan.tokens})"
        return [*lines, f"{self.valid} = {inside}"]


ROW = Places("m", "row_token", "row_at", "row_valid", "row_update")
COLUMN = Places("n", "column_token", "column_at", "column_valid", "column_update")


def tokens_of(plan: ChunkPlan) -> Places:
    """The dimension of tokens: the rows themselves where a token has one row."""
    if len(plan.form.rows) == 1:
        return ROW
    return Places("c", "token", "token_at", "token_valid", "")


def printer_of(plan: ChunkPlan) -> Printer:
    """A printer without a place for T; :func:`at` gives it one."""
    names = {plan.form.active[0]: "k", plan.blocked: "v"}
    places = {t.axis: tile_place(t, names[t.axis]) for t in plan.tile} | grid_places(plan)
    positions = {a: p.index for a, p in places.items()}
    tensors, sizes = tensors_of(plan), sizes_of(plan)
    return Printer(DIMS, tensors, places, positions, sizes, scalars=scalars_of(plan))


@dataclass(slots=True)
class Scope:
    """Prints expressions at the places of one dimension.

    Attributes:
        plan: the plan.
        printer: finds T at ``places``.
        places: the dimension.
    """

    plan: ChunkPlan
    printer: Printer
    places: Places

    @property
    def valid(self) -> Var:
        """The condition that a place holds a token."""
        return Var(self.places.valid, (self.places.dim,))

    def value(self, node: Node) -> Var:
        """An expression in fp32, arbitrary (but of finite inputs) where no token is."""
        return self.printer.emit(node)

    def rows(self, nodes: Sequence[Node | None]) -> Var:
        """An expression per row of a token: printed once where only picked positions differ."""
        given = [Lit(0.0) if n is None else n for n in nodes]
        if all(n == given[0] for n in given):
            return self.value(given[0])
        same = [_unpicked(n, i) for i, n in enumerate(given)]
        if all(n == same[0] for n in same):
            axes = {n.over for node in given for n in walk(node) if isinstance(n, Select)}
            return self._elsewhere(same[0], axes, Var(self.places.update, (self.places.dim,)))
        text = Var("")
        for i, node in enumerate(given):
            here = self._only(i, node)
            text = here if i == 0 else self._choose(i, here, text)
        return text

    def _choose(self, row: int, here: Var, others: Var) -> Var:
        p = self.printer
        dims = p.order((self.places.dim,), here.dims, others.dims)
        mine = p.lift(Var(f"{self.places.update} == {row}", (self.places.dim,)), dims)
        text = f"tl.where({mine}, {p.lift(here, dims)}, {p.lift(others, dims)})"
        return p.name(text, dims)

    def _elsewhere(self, node: Node, axes: set[str], index: Var) -> Var:
        return self.printer.child(**{a: Place(index) for a in axes}).emit(node)

    def _only(self, row: int, node: Node) -> Var:
        """A row's own expression; its loads touch that row's places only."""
        t = self.plan.program.scan or "T"
        valid = Var(f"{self.places.valid} & ({self.places.update} == {row})", (self.places.dim,))
        return self.printer.child(**{t: Place(self.printer.places[t].index, valid)}).emit(node)

    def inert(self, value: Var, fill: str = "0.0") -> Var:
        """The value, and ``fill`` where no token is."""
        dims = self.printer.order(value.dims, (self.places.dim,))
        mask = self.printer.lift(self.valid, dims)
        return self.printer.name(
            f"tl.where({mask}, {self.printer.lift(value, dims)}, {fill})", dims
        )

    def added(self, nodes: Sequence[Node | None]) -> Var:
        """Rows that are 0 where no token is."""
        value = self.rows(nodes)
        return value if self._loaded(nodes) else self.inert(value)

    def operand(self, nodes: Sequence[Node | None], dim: str) -> Var:
        """Rows of an operand of a matrix product, ``[rows, dim]``, in the storage type."""
        single = self._stored(nodes)
        if single is not None:
            return single
        value = self.inert(self.rows(nodes))
        dims = (self.places.dim, dim)
        text = self.printer.lift(value, dims)
        if dim not in value.dims:
            shape = f"[{self._extent()}, {self._width(dim)}]"
            text = f"tl.broadcast_to({text}, {shape})"
        return self.printer.name(f"({text}).to({ELEMENT[self.plan.storage]})", dims)

    def _extent(self) -> int:
        return ROWS if self.places.update else self.plan.token_tile

    def _width(self, dim: str) -> int:
        axis = self.plan.form.active[0] if dim == "k" else self.plan.blocked
        return self.plan.axis(axis).block

    def _loaded(self, nodes: Sequence[Node | None]) -> TensorArg | None:
        """The tensor of rows that are plain loads: those are 0 where no token is."""
        given = [n for n in nodes if n is not None]
        same = {_unpicked(n, i) for i, n in enumerate(given)}
        node = same.pop() if len(same) == 1 and len(given) == len(nodes) else None
        if not isinstance(node, Input) or node.name not in self.printer.tensors:
            return None
        arg = self.printer.tensors[node.name]
        return arg if self.plan.program.scan in arg.pattern.axes else None

    def _stored(self, nodes: Sequence[Node | None]) -> Var | None:
        """An input that is already in the storage type is loaded as it is, once."""
        arg = self._loaded(nodes)
        if arg is None or arg.dtype != self.plan.storage:
            return None
        given = [n for n in nodes if n is not None]
        axes = {n.over for x in given for n in walk(x) if isinstance(n, Select)}
        index = Var(self.places.update, (self.places.dim,)) if len(given) > 1 else Var("0")
        self.printer.tell(given[0])
        return self.printer.child(**{a: Place(index) for a in axes}).load(arg, raw=True)


def _unpicked(node: Node, at: int) -> Node:
    """The expression without its picks of position ``at``."""
    if isinstance(node, Select) and node.at == at:
        return _unpicked(node.arg, at)
    return rebuild(node, lambda n: _unpicked(n, at))


def at(plan: ChunkPlan, printer: Printer, places: Places, back: int = 0) -> Scope:
    """A scope whose T lies at a dimension's tokens, or ``back`` tokens earlier.

    Lines are shared with ``printer``; names differ between scopes by their prefix.
    """
    scan = plan.program.scan or "T"
    index = f"{places.row} - {back}" if back else places.row
    token = f"{places.token} - {back}" if back else places.token
    dim = (places.dim,)
    valid = f"{places.valid} & ({token} >= first_token)" if back else places.valid
    inner = printer.child(**{scan: Place(Var(index, dim), Var(valid, dim))})
    inner.positions = {**printer.positions, scan: Var(token, dim)}
    inner.prefix = f"{places.dim}{back or ''}_"
    return Scope(plan, inner, places)
