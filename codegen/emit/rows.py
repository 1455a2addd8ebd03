"""Rows of a chunk as tile dimensions: where tokens are found, and expressions that differ by row.

A chunk is four blocks of 16 places. A block holds whole tokens: of rows, token-major, place ``i``
is row ``i % R`` of the block's token ``i // R``, with places left over where R does not divide 16;
of tokens, one a place. Rows have the dimension ``m`` (and ``n`` as columns); tokens have it too
where R is 1, otherwise ``c``. ``state`` works on all 64 places at once, ``prepare`` and ``mix`` on
one block beside another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attncc.codegen.affine_choices import TOKENS
from attncc.codegen.affine_rows import RowGroup, row_groups, unpicked
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
from attncc.codegen.plan_affine import BLOCK, ROWS, ChunkPlan, Part, StatePlan
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Contract, Input, Node, Reduce, Select

DIMS = ("m", "c", "n", "k", "v")
TRANSPOSED = ("v", "m", "c", "n", "k")


@dataclass(frozen=True, slots=True)
class Places:
    """Names of the variables that say where a dimension of rows or tokens lies.

    Attributes:
        dim: the tile dimension.
        token: token within its sequence.
        inner: token within the chunk or block.
        valid: the place holds a token of this chunk.
        update: which of the token's rows the place is; "" for a dimension of tokens.
        block: the block of 16 places, or None for the whole chunk.
        size: places of the whole chunk, where those are not ``ROWS``.
    """

    dim: str
    token: str
    inner: str
    valid: str
    update: str
    block: int | None = None
    size: int = ROWS

    @property
    def count(self) -> int:
        """Places along the dimension."""
        return self.size if self.block is None else BLOCK

    @property
    def tag(self) -> str:
        """What names of this dimension and block end in."""
        return self.dim if self.block is None else f"{self.dim}{self.block}"

    def of(self, block: int) -> Places:
        """The same dimension in one block."""
        token, valid = f"{self.token}_{block}", f"{self.valid}_{block}"
        return Places(self.dim, token, self.inner, valid, self.update, block)

    def first(self, plan: ChunkPlan, of: str) -> str:
        """Where the chunk or block starts, given where the chunk starts."""
        return f"{of} + {self.block * plan.block_tokens}" if self.block else of

    def _alone(self, plan: ChunkPlan) -> bool:
        """Whether no other block lies along the dimension."""
        return self.block is not None or plan.gathered

    def head(self, plan: ChunkPlan) -> list[str]:
        """Code that makes what all blocks share."""
        per, d = len(plan.form.rows) if self.update else 1, self.dim
        used, alone = per * plan.block_tokens, self._alone(plan)
        place = d if alone or used == BLOCK else f"{d} % {BLOCK}"
        inner = place if per == 1 else f"{place} // {per}"
        if not alone and used < BLOCK:
            inner = f"{d} // {BLOCK} * {plan.block_tokens} + {inner}"
        lines = [f"{d} = tl.arange(0, {self.count})", f"{self.inner} = {inner}"]
        return [*lines, f"{self.update} = {place} % {per}"] if per > 1 else lines

    def lines(self, plan: ChunkPlan) -> list[str]:
        """Code that makes the variables from ``first_token`` and ``length``."""
        used = plan.block_tokens * (len(plan.form.rows) if self.update else 1)
        inside, alone = f"{self.token} < length", self._alone(plan)
        if used < (self.count if alone else BLOCK):
            place = self.dim if alone else f"{self.dim} % {BLOCK}"
            inside = f"({inside}) & ({place} < {used})"
        first = self.first(plan, "first_token")
        return [f"{self.token} = {first} + {self.inner}", f"{self.valid} = {inside}"]


ROW = Places("m", "row_token", "row_inner", "row_valid", "row_update")
TOKEN = Places("c", "token", "token_inner", "token_valid", "")


def tokens_of(plan: ChunkPlan) -> Places:
    """The dimension of tokens: the rows themselves where a token has one row."""
    if len(plan.form.rows) == 1:
        return ROW
    return replace(TOKEN, size=TOKENS) if plan.gathered else TOKEN


def printer_of(plan: ChunkPlan) -> Printer:
    """A printer without a place for T; :func:`at` gives it one."""
    names = {plan.form.active[0]: "k", plan.blocked: "v"}
    dims = TRANSPOSED if isinstance(plan, StatePlan) and plan.transposed else DIMS
    places = {t.axis: tile_place(t, names[t.axis]) for t in plan.tile} | grid_places(plan)
    if isinstance(plan, StatePlan) and plan.part is Part.SUMMARY and plan.solve:
        v = plan.axis(plan.blocked)  # blocks of A lie past the end
        valid = Var(f"at_{v.axis} < {v.size}", ("v",))
        places[v.axis] = replace(places[v.axis], valid=valid)
    positions = {a: p.index for a, p in places.items()}
    tensors, sizes = tensors_of(plan), sizes_of(plan)
    return Printer(dims, tensors, places, positions, sizes, scalars=scalars_of(plan))


@dataclass(slots=True)
class Scope:
    """Prints expressions at the places of one dimension.

    Attributes:
        plan: the plan.
        printer: finds T at ``places``.
        places: the dimension.
        kept: printers of groups of rows, so that what one expression printed serves the next;
            None where lines need not run in the order they are printed in.
    """

    plan: ChunkPlan
    printer: Printer
    places: Places
    kept: dict[object, Printer] | None = None

    @property
    def valid(self) -> Var:
        """The condition that a place holds a token."""
        return Var(self.places.valid, (self.places.dim,))

    def value(self, node: Node) -> Var:
        """An expression in fp32, arbitrary (but of finite inputs) where no token is."""
        return self.printer.emit(node)

    def rows(self, nodes: Sequence[Node | None]) -> Var:
        """An expression per row of a token: printed once where only picked positions differ."""
        first, *others = row_groups(nodes)
        text = self._group(first, alone=not others)
        for group in others:
            text = self._choose(group, self._group(group, alone=False), text)
        return text

    def _choose(self, group: RowGroup, here: Var, others: Var) -> Var:
        p = self.printer
        dims = p.order((self.places.dim,), here.dims, others.dims)
        mine = p.lift(Var(self._among(group), (self.places.dim,)), dims)
        text = f"tl.where({mine}, {p.lift(here, dims)}, {p.lift(others, dims)})"
        return p.name(text, dims)

    def _among(self, group: RowGroup) -> str:
        """The condition that a place holds one of the group's rows."""
        update, (first, last) = self.places.update, (group.rows[0], group.rows[-1])
        if len(group.rows) == 1:
            return f"{update} == {first}"
        if last - first == len(group.rows) - 1:
            return f"({update} >= {first}) & ({update} <= {last})"
        return " | ".join(f"({update} == {row})" for row in group.rows)

    def _group(self, group: RowGroup, *, alone: bool) -> Var:
        """The group's expression; its loads touch its rows' places only."""
        return self._printer(group, alone=alone).emit(group.node)

    def settle(self, nodes: Sequence[Node | None], without: str) -> None:
        """Print now the sums inside some rows that do not differ along an axis.

        What is settled before a loop over the axis is neither loaded nor summed in it again.
        """
        groups = row_groups(nodes)
        for group in groups:
            printer = self._printer(group, alone=len(groups) == 1)
            for node in walk(group.node):
                if isinstance(node, (Contract, Reduce)) and without not in axes_of(node):
                    printer.emit(node)

    def _printer(self, group: RowGroup, *, alone: bool) -> Printer:
        key = (group.axes, group.shift, () if alone else group.rows)
        if self.kept is None:
            return self._fresh(group, alone=alone)
        if key not in self.kept:
            self.kept[key] = self._fresh(group, alone=alone)
        return self.kept[key]

    def _fresh(self, group: RowGroup, *, alone: bool) -> Printer:
        dims = (self.places.dim,)
        index = self.places.update + (f" - {group.shift}" if group.shift else "")
        places = {a: Place(Var(index, dims)) for a in group.axes}
        if not alone:
            t = self.plan.program.scan or "T"
            valid = Var(f"{self.places.valid} & ({self._among(group)})", dims)
            places[t] = replace(self.printer.places[t], valid=valid)
        return self.printer.child(**places)

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
            shape = f"[{self.places.count}, {self._width(dim)}]"
            text = f"tl.broadcast_to({text}, {shape})"
        return self.printer.name(f"({text}).to({ELEMENT[self.plan.storage]})", dims)

    def _width(self, dim: str) -> int:
        axis = self.plan.form.active[0] if dim == "k" else self.plan.blocked
        return self.plan.axis(axis).block

    def _loaded(self, nodes: Sequence[Node | None]) -> TensorArg | None:
        """The tensor of rows that are plain loads: those are 0 where no token is."""
        given = [n for n in nodes if n is not None]
        same = {unpicked(n, i) for i, n in enumerate(given)}
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


def at(plan: ChunkPlan, printer: Printer, places: Places, back: int = 0) -> Scope:
    """A scope whose T lies at a dimension's tokens, or ``back`` tokens earlier in their block.

    Lines are shared with ``printer``; names differ between scopes by their prefix.
    """
    scan = plan.program.scan or "T"
    index = f"{places.inner} - {back}" if back else places.inner
    token = f"{places.token} - {back}" if back else places.token
    dim = (places.dim,)
    valid = places.valid
    if back:
        valid = f"{valid} & ({token} >= {places.first(plan, 'first_token')})"
    base: Var | None = Var(places.first(plan, "chunk_row"))
    if isinstance(plan, StatePlan):  # offsets that never change would fill registers in its loop
        index, base = f"chunk_row + {index}", None
    inner = printer.child(**{scan: Place(Var(index, dim), Var(valid, dim), base)})
    inner.positions = {**printer.positions, scan: Var(token, dim)}
    inner.prefix = f"{places.tag}_{back or ''}"
    return Scope(plan, inner, places)
