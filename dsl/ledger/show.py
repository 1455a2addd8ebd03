"""A ledger as text, Markdown or plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attncc.dsl.ledger.model import Entry, Held, Ledger, Phase
from attncc.dsl.ledger.size import DEFAULTS
from attncc.dsl.ledger.ways import ways

OBJECTS = ("object", "names", "shape", "dtype", "producer → consumers", "lifetime")
BYTES = ("object", "memory", "growth", "bytes", "=", "read a step", "=")

Row = Sequence[str]


_MOST = 6
"""Names, shapes or addends of one cell; of more, the first and how many there are."""


def _unique(values: Iterable[str]) -> str:
    return _short(list(dict.fromkeys(v for v in values if v)), ", ")


def _short(parts: Sequence[str], joint: str) -> str:
    if len(parts) <= _MOST:
        return joint.join(parts)
    return joint.join((*parts[: _MOST // 2], f"... ({len(parts)})"))


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _names(entries: Sequence[Entry]) -> str:
    """Symbols, and the code's names where they are others."""
    symbols = _unique(e.symbol for e in entries)
    codes = _unique(e.name.rpartition(".")[2] if "." in e.name else e.name for e in entries)
    return symbols if symbols == codes else f"{symbols} / {codes}"


def object_rows(ledger: Ledger) -> list[Row]:
    """The object table: one row a title, as the source document has them."""
    found: list[Row] = []
    graph = {o.name for o in ledger.graph.objects}
    for title, entries in ledger.rows():
        group = [e.name for e in entries if e.name in graph]
        kept = ledger.phase is not Phase.TRAIN
        if group:
            made, read = ways(ledger.graph, group, kept)
        else:
            made = tuple(dict.fromkeys(p for e in entries for p in e.producers))
            read = tuple(dict.fromkeys(c for e in entries for c in e.consumers))
        shapes = _unique(shape_text(e) for e in entries)
        found.append(
            (
                title, _names(entries), shapes, _unique(e.dtype.value for e in entries),
                f"{', '.join(made)} → {', '.join(read)}",
                _unique(e.lifetime.value for e in entries),
            )
        )  # fmt: skip
    return found


def shape_text(entry: Entry) -> str:
    """Extents in brackets."""
    return f"[{', '.join(entry.shape)}]"


def byte_rows(ledger: Ledger) -> list[Row]:
    """Formulas and numbers of every row; what is fused away takes no memory."""
    return [_bytes(ledger, title, entries) for title, entries in ledger.rows()]


def _bytes(ledger: Ledger, title: str, entries: Sequence[Entry]) -> Row:
    lying = [e for e in entries if e.held is Held.MEMORY]
    known = ledger.sizes is not None
    parts = [(e.size.text if e.times == 1 else f"{e.times} * {e.size.text}") for e in lying]
    reads = [e.read for e in entries if e.read is not None and e.read.expr != 0]
    each = "" if ledger.layers == 1 else f"{ledger.layers} * "
    read = sum(r.number for r in reads) * ledger.layers
    return (
        title, _unique(e.held.value for e in entries), _unique(e.growth.value for e in entries),
        _sum(parts) or "-", _number(sum(e.bytes for e in lying)) if known and lying else "-",
        _sum(each + r.text for r in reads) or "-", _number(read) if known and reads else "-",
    )  # fmt: skip


def _sum(parts: Iterable[str]) -> str:
    """Equal addends once, with how many there are."""
    counted: dict[str, int] = {}
    for part in parts:
        counted[part] = counted.get(part, 0) + 1
    return _short([p if n == 1 else f"{n} * {p}" for p, n in counted.items()], " + ")


def peak_rows(ledger: Ledger) -> list[Row]:
    """The addends of ``M_peak`` and their sum."""
    rows: list[Row] = [
        (i.name, _number(i.bytes) or "-", _shortened(i.formula)) for i in ledger.peak.items
    ]
    return [*rows, ("M_peak", _number(ledger.peak.bytes) or "-", "the sum")]


def _shortened(formula: str) -> str:
    head, colon, rest = formula.partition(": ")
    if not colon:
        return _sum(formula.split(" + "))
    return f"{head}: {_sum(rest.split(' + '))}"


def title(ledger: Ledger) -> str:
    """Name, phase, layers and sizes in one line."""
    known = {} if ledger.sizes is None else ledger.sizes
    told = {a: n for a, n in known.items() if DEFAULTS.get(a) != n}
    sizes = " ".join(f"{a}={n}" for a, n in told.items())
    layers = "" if ledger.layers == 1 else f", {ledger.layers} layers"
    return f"{ledger.name}, {ledger.phase.value}{layers}" + (f": {sizes}" if sizes else "")


def aligned(head: Row, rows: Sequence[Row]) -> list[str]:
    """A table in columns of equal width."""
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]


def text(ledger: Ledger) -> str:
    """For a terminal: the object table, bytes, the peak."""
    lines = [title(ledger), "", *aligned(OBJECTS, object_rows(ledger)), ""]
    lines += [*aligned(_byte_head(ledger), _cut(ledger, byte_rows(ledger))), ""]
    lines += aligned(("peak", "bytes", "of"), peak_rows(ledger))
    return "\n".join(lines) + "\n"


def _byte_head(ledger: Ledger) -> Row:
    return BYTES if ledger.phase is Phase.DECODE else BYTES[:5]


def _cut(ledger: Ledger, rows: list[Row]) -> list[Row]:
    return [row[: len(_byte_head(ledger))] for row in rows]


def grid(head: Row, rows: Sequence[Row]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    return [*lines, *(f"| {' | '.join(_cell(c) for c in row)} |" for row in rows)]


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("*", "·")


def markdown(ledger: Ledger) -> str:
    """The three tables as Markdown."""
    parts = [
        grid(OBJECTS, object_rows(ledger)),
        grid(_byte_head(ledger), _cut(ledger, byte_rows(ledger))),
        grid(("peak", "bytes", "of"), peak_rows(ledger)),
    ]
    return "\n\n".join([f"**{title(ledger)}**", *("\n".join(p) for p in parts)]) + "\n"


def data(ledger: Ledger) -> dict[str, Any]:
    """Everything as plain data: every object, those without a row too."""
    return {
        "name": ledger.name,
        "phase": ledger.phase.value,
        "layers": ledger.layers,
        "sizes": None if ledger.sizes is None else dict(ledger.sizes),
        "objects": [_data(e) for e in ledger.entries],
        "peak": [
            {"item": i.name, "formula": i.formula, "bytes": i.bytes, "of": list(i.of)}
            for i in ledger.peak.items
        ],
        "peak_bytes": ledger.peak.bytes,
    }


def _data(entry: Entry) -> dict[str, Any]:
    read = entry.read
    return {
        "name": entry.name, "symbol": entry.symbol, "row": entry.row, "formula": entry.formula,
        "pattern": str(entry.pattern), "shape": list(entry.shape), "dtype": entry.dtype.value,
        "producers": list(entry.producers), "consumers": list(entry.consumers),
        "declared": entry.declared.value, "lifetime": entry.lifetime.value,
        "memory": entry.held.value, "growth": entry.growth.value, "layers": entry.times,
        "bytes": {"formula": entry.size.text, "one_layer": entry.size.bytes},
        "read": None if read is None else {"formula": read.text, "one_layer": read.bytes},
        "note": entry.note,
    }  # fmt: skip
