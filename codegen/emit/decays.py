"""Triton text of what connects two rows of a block: products of decays, and who sees whom.

A decay enters at its token; an interval's product is a cumulative product along the rows in which
the decays outside the interval count as 1. Between blocks the product has three factors: from the
row's write to its block's end, over whole blocks, and from the block's start to the read.
"""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.rows import ROW, Places, at, tokens_of
from attncc.codegen.emit.scan import ELEMENT
from attncc.codegen.emit.triton import Printer
from attncc.codegen.plan_affine import BLOCK, ROWS, ChunkPlan


class BlockDecays:
    """Prints products of decays over intervals of one block, each once."""

    def __init__(self, plan: ChunkPlan, printer: Printer, block: int) -> None:
        self.plan = plan
        self.printer = printer
        self.block = block
        self.rows = ROW.of(block)
        self.last = BLOCK - 1
        self.axis = 0
        self._found: dict[tuple[str, str, int], str] = {}

    def _once(self, name: str, places: Places, slot: int, text: str) -> str:
        """The variable ``name`` of a dimension and slot, made by ``text``."""
        variable = f"{name}_{places.tag}" + ("" if slot else "_before")
        self.printer.lines.append(f"{variable} = {text}")
        self._found[name, places.dim, slot] = variable
        return variable

    def step(self, places: Places, slot: int) -> str:
        """The decay that enters at each place: the token's own, or (slot 0) the one before's."""
        if found := self._found.get(("decay", places.dim, slot)):
            return found
        scope = at(self.plan, self.printer, places, back=1 - slot)
        value = scope.value(self.plan.form.decays[0])
        valid = scope.printer.places[self.plan.program.scan or "T"].valid
        assert valid is not None
        inside = valid.text
        if places.update and len(self.plan.form.rows) > 1:
            inside = f"{inside} & ({places.update} == 0)"
        text = f"tl.where({inside}, {scope.printer.lift(value, (places.dim,))}, 1.0)"
        return self._once("decay", places, slot, text)

    def inside(self, places: Places, slot: int) -> str:
        """Products from each column's write to each place's read, ``[places, m]``."""
        if found := self._found.get(("inside", places.dim, slot)):
            return found
        step = self.step(places, slot)
        token = places.token if slot else f"({places.token} - 1)"
        passed = f"{token}[:, None] > {self.rows.token}[None, :]"
        writes = [r.write_slot for r in self.plan.form.rows]
        if not all(writes):
            same = f"{token}[:, None] == {self.rows.token}[None, :]"
            early = row_choice(self.rows, [str(not s) for s in writes])
            passed = f"({passed}) | (({same}) & ({early})[None, :])"
        return self._once("inside", places, slot, f"over_intervals({step}, {passed})")

    def prefix(self, places: Places, slot: int) -> str:
        """Products from the block's start to each place's read."""
        if found := self._found.get(("prefix", places.dim, slot)):
            return found
        step = self.step(places, slot)
        return self._once(
            "prefix", places, slot, f"tl.associative_scan({step}, {self.axis}, multiply)"
        )

    def by_slot(self, places: Places, slots: list[int], of: str) -> str:
        """Intervals or prefixes where the rows of a token read at different slots."""
        pick = self.inside if of == "inside" else self.prefix
        if len(set(slots)) == 1:
            return pick(places, slots[0])
        late = row_choice(places, [str(bool(s)) for s in slots])
        if of == "inside":
            late = f"({late})[:, None]"
        return f"tl.where({late}, {pick(places, 1)}, {pick(places, 0)})"

    def suffix(self, places: Places) -> str:
        """Products from each column's write to the block's end."""
        if found := self._found.get(("suffix", "m", 1)):
            return found
        end = f"({places.dim} == {self.last})[:, None]"
        text = f"tl.sum(tl.where({end}, {self.inside(places, 1)}, 0.0), 0)"
        return self._once("suffix", self.rows, 1, text)

    def total(self, places: Places) -> str:
        """Product of all decays of the block."""
        if found := self._found.get(("total", "m", 1)):
            return found
        end = f"{places.dim} == {self.last}"
        text = f"tl.sum(tl.where({end}, {self.prefix(places, 1)}, 0.0), {self.axis})"
        return self._once("total", self.rows, 1, text)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the reads of one block lie among its decays.

    Attributes:
        prefix: products of the decays from the block's start to each read, ``[places, k]``.
        reach: the last row of the block whose decay a read is behind, if that row has one.
    """

    prefix: str
    reach: str


class EachDecays:
    """Prints operands of one block with decays per element of the active axis inside them.

    Everything here is ``[m, k]`` in fp32. Rows are written behind their token's decay, which enters
    at the token's first row; reads are ahead of it or behind it.
    """

    def __init__(self, plan: ChunkPlan, printer: Printer, block: int) -> None:
        self.plan = plan
        self.printer = printer
        self.block = block
        self._step(f"decay_{block}", ROW.of(block), 1)
        printer.lines += [
            f"prefix_{block} = tl.associative_scan(decay_{block}, 0, multiply)",
            f"suffix_{block} = after(decay_{block}, m)",
            f"total_{block} = row_of(prefix_{block}, m, {BLOCK - 1})",
        ]

    def _step(self, name: str, places: Places, slot: int) -> None:
        """The decay that enters at each place: the token's own, or (slot 0) the one before's."""
        plan, key = self.plan, self.plan.axis(self.plan.form.active[0])
        scope = at(plan, self.printer, places, back=1 - slot)
        value = scope.value(plan.form.decays[0])
        valid = scope.printer.places[plan.program.scan or "T"].valid
        assert valid is not None
        inside = valid.text
        if places.update and len(plan.form.rows) > 1:
            inside = f"{inside} & ({places.update} == 0)"
        inside = f"({inside})[:, None]" if inside != places.valid else f"{inside}[:, None]"
        if key.partial:
            inside = f"{inside} & (at_{key.axis} < {key.size})[None, :]"
        text = f"tl.where({inside}, {scope.printer.lift(value, (places.dim, 'k'))}, 1.0)"
        self.printer.lines.append(f"{name} = {text}")

    def reading(self, places: Places, slots: list[int]) -> Reading:
        """What reads need, given the slot of each row of a token (or of a token's one read)."""
        found = {slot: self._at_slot(places, slot) for slot in sorted(set(slots))}
        if len(found) == 1:
            [one] = found.values()
            return one
        late = row_choice(places, [str(bool(s)) for s in slots])
        prefix = f"tl.where(({late})[:, None], {found[1].prefix}, {found[0].prefix})"
        reach = f"tl.where({late}, {found[1].reach}, {found[0].reach})"
        return Reading(prefix, reach)

    def _at_slot(self, places: Places, slot: int) -> Reading:
        """Reads behind their token's decay (slot 1), or ahead of it."""
        rows, dim = len(self.plan.form.rows), places.dim
        first = f"{dim} * {rows}"  # the first row of a token
        if places.update:
            first = dim if rows == 1 or slot else f"{dim} - {places.update}"
        if places.update and slot:  # the rows' own
            return Reading(f"prefix_{self.block}", first)
        name = f"{places.tag}_{'behind' if slot else 'ahead'}"
        self._step(f"decay_{name}", places, slot)
        scan = f"tl.associative_scan(decay_{name}, 0, multiply)"
        self.printer.lines.append(f"prefix_{name} = {scan}")
        return Reading(f"prefix_{name}", first if slot else f"{first} - 1")

    def within(self, vector: str, reading: Reading, written: str) -> str:
        """Products of reads and writes of this block, with the decays between them."""
        return f"between({vector}, {written}, decay_{self.block}, m, {reading.reach})"

    def early(self, vector: str, reading: Reading, blocks: range = range(0)) -> str:
        """A vector that reads: the decays since its block's start, and those of whole blocks."""
        return self._with(vector, reading.prefix, blocks)

    def late(self, vector: str, blocks: range = range(0)) -> str:
        """A vector that was written: the decays to its block's end, and those of whole blocks."""
        return self._with(vector, f"suffix_{self.block}", blocks)

    def _with(self, vector: str, own: str, blocks: range) -> str:
        whole = (f"total_{n}[None, :]" for n in blocks)
        return f"({times(vector, own, *whole)}).to({ELEMENT[self.plan.storage]})"

    def store(self, name: str, text: str, dim: str = "m") -> str:
        """A line that leaves this block of an operand to ``state``."""
        return f"tl.store({operand_at(self.plan, name, dim, self.block)}, {text})"


def operand_at(plan: ChunkPlan, name: str, dim: str, block: int = 0) -> str:
    """Where an operand with decays inside lies: ``[system, ROWS, active]``."""
    key = plan.axis(plan.form.active[0])
    base = f"{name}_ptr + system * {ROWS * key.block} + {block * BLOCK * key.block}"
    return f"{base} + {dim}[:, None] * {key.block} + at_{key.axis}[None, :]"


def times(*parts: str) -> str:
    """A product as text; empty parts are 1."""
    return " * ".join(p for p in parts if p)


def row_choice(places: Places, values: list[str]) -> str:
    """A value per row of a token, as text over the rows' dimension."""
    if len(set(values)) == 1:
        everywhere = {"True": f"{places.dim} >= 0", "False": f"{places.dim} < 0"}
        return everywhere.get(values[0], values[0])
    if set(values) <= {"True", "False"}:
        mine = [f"({places.update} == {i})" for i, v in enumerate(values) if v == "True"]
        return " | ".join(mine)
    text = values[0]
    for i, value in enumerate(values[1:], 1):
        text = f"tl.where({places.update} == {i}, {value}, {text})"
    return text


def visible(plan: ChunkPlan, places: Places, seen: list[int]) -> str:
    """Whether a row sees another of its block: an earlier token's, or an earlier one of its own."""
    rows, dim, token = len(plan.form.rows), places.dim, places.token
    if (rows == 1 or seen == list(range(rows))) and seen[0] == 0:
        return f"{dim}[:, None] > {dim}[None, :]"
    earlier = f"{token}[:, None] > {token}[None, :]"
    if set(seen) == {0}:
        return earlier
    same = f"{token}[:, None] == {token}[None, :]"
    limit = row_choice(places, [str(s) for s in seen])
    limit = limit if limit.isdigit() else f"({limit})[:, None]"
    return f"({earlier}) | (({same}) & ({places.update}[None, :] < {limit}))"


def visible_read(plan: ChunkPlan, block: int | None, seen: int) -> str:
    """Whether a token's read-out sees a row of the token's block (of its chunk for None)."""
    rows, columns, tokens = len(plan.form.rows), ROW, tokens_of(plan)
    if block is not None:
        columns, tokens = columns.of(block), tokens.of(block)
    token = f"{tokens.token}[:, None]"
    if seen == rows:
        return f"{token} >= {columns.token}[None, :]"
    if seen == 0:
        return f"{token} > {columns.token}[None, :]"
    same = f"({token} == {columns.token}[None, :]) & ({columns.update}[None, :] < {seen})"
    return f"({token} > {columns.token}[None, :]) | ({same})"
