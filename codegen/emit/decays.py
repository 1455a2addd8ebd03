"""Triton text of what connects two rows of a chunk: products of decays, and who sees whom.

A decay enters at its token; an interval's product is a cumulative product along the rows in which
the decays outside the interval count as 1.
"""

from __future__ import annotations

from attncc.codegen.emit.rows import COLUMN, Places, at, tokens_of
from attncc.codegen.emit.triton import Printer
from attncc.codegen.plan_affine import ROWS, ChunkPlan


class Decays:
    """Prints products of decays over intervals, each once."""

    def __init__(self, plan: ChunkPlan, printer: Printer) -> None:
        self.plan = plan
        self.printer = printer
        self.present = bool(plan.form.decays)
        self._steps: dict[tuple[str, int], str] = {}
        self._weights: dict[tuple[str, int], str] = {}
        self._prefixes: dict[tuple[str, int], str] = {}

    def _step(self, places: Places, slot: int) -> str:
        """The decay that enters at each place: the token's own, or (slot 0) the one before's."""
        key = (places.dim, slot)
        if key not in self._steps:
            scope = at(self.plan, self.printer, places, back=1 - slot)
            value = scope.value(self.plan.form.decays[0])
            dims = (places.dim,)
            scan = self.plan.program.scan or "T"
            valid = scope.printer.places[scan].valid
            assert valid is not None
            inside = valid.text
            if places.update and len(self.plan.form.rows) > 1:
                inside = f"{inside} & ({places.update} == 0)"
            text = f"tl.where({inside}, {scope.printer.lift(value, dims)}, 1.0)"
            name = f"decay_{places.dim}{slot}"
            self.printer.lines.append(f"{name} = {text}  # [{places.dim}]")
            self._steps[key] = name
        return self._steps[key]

    def weight(self, places: Places, slot: int) -> str:
        """Products from after each column's token to each place's read, ``[places, n]``."""
        key = (places.dim, slot)
        if key not in self._weights:
            step = self._step(places, slot)
            token = places.token if slot else f"({places.token} - 1)"
            inside = f"{token}[:, None] > {COLUMN.token}[None, :]"
            name = f"weight_{places.dim}{slot}"
            masked = f"tl.where({inside}, {step}[:, None], 1.0)"
            self.printer.lines.append(
                f"{name} = tl.associative_scan({masked}, 0, multiply)  # [{places.dim}, n]"
            )
            self._weights[key] = name
        return self._weights[key]

    def prefix(self, places: Places, slot: int) -> str:
        """Products from the chunk's start to each place's read."""
        key = (places.dim, slot)
        if key not in self._prefixes:
            step = self._step(places, slot)
            name = f"prefix_{places.dim}{slot}"
            scan = f"tl.associative_scan({step}, 0, multiply)"
            self.printer.lines.append(f"{name} = {scan}  # [{places.dim}]")
            self._prefixes[key] = name
        return self._prefixes[key]

    def by_slot(self, places: Places, slots: list[int], of: str) -> str:
        """Weights or prefixes where the rows of a token read at different slots."""
        pick = self.weight if of == "weight" else self.prefix
        if len(set(slots)) == 1:
            return pick(places, slots[0])
        late = row_choice(places, [str(bool(s)) for s in slots])
        if of == "weight":
            late = f"({late})[:, None]"
        return f"tl.where({late}, {pick(places, 1)}, {pick(places, 0)})"

    def written(self, weight: str, reads_late: str, places: Places) -> str:
        """A weight with the column's own decay where the column writes before it."""
        slots = [r.write_slot for r in self.plan.form.rows]
        if all(slots):
            return weight
        own = self._step_own()
        early = f"({row_choice(COLUMN, [str(not s) for s in slots])})[None, :]"
        later = f"{places.token}[:, None] > {COLUMN.token}[None, :]"
        passed = f"({early}) & (({later}) | ({reads_late}))"
        return f"{weight} * tl.where({passed}, {own}[None, :], 1.0)"

    def _step_own(self) -> str:
        """Each column's own decay."""
        key = ("own", 1)
        if key not in self._steps:
            scope = at(self.plan, self.printer, COLUMN)
            value = scope.inert(scope.value(self.plan.form.decays[0]), "1.0")
            self._steps[key] = value.text
        return self._steps[key]

    def suffix(self) -> tuple[str, str]:
        """Products from each column's write to the chunk's end, and over the whole chunk."""
        places = tokens_of(self.plan)
        last = (ROWS if places.update else self.plan.token_tile) - 1
        weight, prefix = self.weight(places, 1), self.prefix(places, 1)
        end = f"{places.dim} == {last}"
        text = f"tl.sum(tl.where(({end})[:, None], {weight}, 0.0), 0)"
        slots = [r.write_slot for r in self.plan.form.rows]
        if not all(slots):
            early = row_choice(COLUMN, [str(not s) for s in slots])
            text = f"{text} * tl.where({early}, {self._step_own()}, 1.0)"
        return text, f"tl.sum(tl.where({end}, {prefix}, 0.0), 0)"


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
    """Whether a place sees a column's row: an earlier token's, or an earlier one of its own."""
    rows = len(plan.form.rows)
    if places.update and (rows == 1 or seen == list(range(rows))) and seen[0] == 0:
        return f"{places.dim}[:, None] > {COLUMN.dim}[None, :]"
    earlier = f"{places.token}[:, None] > {COLUMN.token}[None, :]"
    same = f"{places.token}[:, None] == {COLUMN.token}[None, :]"
    if set(seen) == {rows}:
        return f"{places.token}[:, None] >= {COLUMN.token}[None, :]"
    if set(seen) == {0}:
        return earlier
    limit = row_choice(places, [str(s) for s in seen]) if places.update else str(seen[0])
    limit = limit if limit.isdigit() else f"({limit})[:, None]"
    return f"({earlier}) | (({same}) & ({COLUMN.update}[None, :] < {limit}))"


def visible_read(plan: ChunkPlan, places: Places, seen: int) -> str:
    """Whether a token's read-out sees a column's row."""
    rows = len(plan.form.rows)
    token = f"{places.token}[:, None]"
    if seen == rows:
        return f"{token} >= {COLUMN.token}[None, :]"
    if seen == 0:
        return f"{token} > {COLUMN.token}[None, :]"
    same = f"({token} == {COLUMN.token}[None, :]) & ({COLUMN.update}[None, :] < {seen})"
    return f"({token} > {COLUMN.token}[None, :]) | ({same})"
