"""From a graph of operations and objects to a ledger's entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attncc.dsl.axes import Pattern, block_axis, scales_of
from attncc.dsl.errors import ArgumentError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Dtype, Layer, LayerObject, NodeKind
from attncc.dsl.ledger.choices import Choices, Scaled
from attncc.dsl.ledger.extras import extras
from attncc.dsl.ledger.keep import check_choices
from attncc.dsl.ledger.model import Entry, Formula, Growth, Held, Phase, lives
from attncc.dsl.ledger.size import Measure
from attncc.dsl.ledger.ways import ways

if TYPE_CHECKING:
    from sympy import Expr

_EVERY_LAYER = (
    Lifetime.CACHE, Lifetime.STATE, Lifetime.WINDOW, Lifetime.MEMORY, Lifetime.PARAMETER,
)  # fmt: skip
"""What every layer has its own of at once."""


def entries(graph: Layer, by: Measure, choices: Choices, layers: int) -> tuple[Entry, ...]:
    """Every object of a graph in one phase, and what the phase adds.

    Raises:
        CacheInTrainingError, EvictionError, TokenIndexError: see :mod:`attncc.dsl.ledger.keep`.
        UnknownSizeError: sizes were given, but not all.
    """
    check_choices(graph, by, choices)
    found: list[Entry] = []
    for held in graph.objects:
        found.append(_entry(graph, held, by, choices, layers))
        found += _scales(found[-1], held, by, choices)
    return (*found, *extras(graph, by, choices, layers, {e.name: e for e in found}))


def dtype_of(graph: Layer, held: LayerObject, choices: Choices) -> Dtype:
    """What an object is stored as; parameters of a decay are fp32."""
    named = choices.storage.get(held.name)
    if isinstance(named, Scaled):
        return named.dtype
    if named is not None:
        return named
    if held.dtype is not None:
        return held.dtype
    if any(n.kind is NodeKind.GATE and held.name in n.params for n in graph.nodes):
        return Dtype.FP32
    return choices.state_dtype if held.lifetime is Lifetime.STATE else choices.dtype


def _entry(graph: Layer, held: LayerObject, by: Measure, choices: Choices, layers: int) -> Entry:
    phase = by.phase
    dtype = dtype_of(graph, held, choices)
    changed = by.rows(held, choices)
    at = _selection(graph, held.name)
    place, note = _place(graph, held, phase, at)
    lifetime = lives(held.lifetime, phase)
    size = by.product(held.pattern, dtype.bytes, changed)
    shape = by.shape(held.pattern, changed)
    growth = by.growth(size.expr, held)
    if lifetime is Lifetime.BOUNDARY:
        size = by.chunked(held.pattern, dtype.bytes)
        shape, growth = ("chunks", *shape), Growth.LINEAR
    if at:
        size = by.in_turns(size)
    saved = phase is Phase.TRAIN and place is Held.MEMORY and not at
    producers, consumers = ways(graph, (held.name,), phase is not Phase.TRAIN)
    row = "Parameters" if held.row is None and lifetime is Lifetime.PARAMETER else held.row
    return Entry(
        held.name, held.symbol, row, held.formula, held.pattern, shape, dtype,
        producers, consumers, held.lifetime, lifetime, place, growth, size,
        layers if saved or held.lifetime in _EVERY_LAYER else 1,
        _read(graph, held, by, choices, size, place) if phase is Phase.DECODE else None,
        "; ".join(n for n in (held.note, note) if n), at,
        _row(held, by, dtype.bytes, held.pattern),
    )  # fmt: skip


def _selection(graph: Layer, name: str) -> str:
    """The top-k that selects by an object, directly or through its mask: the node, or ""."""
    for node in graph.consumers(name):
        if node.kind is NodeKind.TOPK:
            return node.name
        if node.kind is NodeKind.MASK and node.inputs[0] == name:
            return _selection(graph, node.outputs[0])
    return ""


def _place(graph: Layer, held: LayerObject, phase: Phase, selection: str) -> tuple[Held, str]:
    """Whether an object lies in memory, and what is to be said of that."""
    made = [n.kind for n in graph.producers(held.name)]
    if selection and NodeKind.MASK not in made:
        return Held.MEMORY, "a selection looks at a whole row of scores several times"
    if held.fused:
        return Held.FUSED, ""
    if made and all(k is NodeKind.RESHAPE for k in made):
        return Held.VIEW, "the batch's own rows" if held.lifetime is Lifetime.CACHE else ""
    if phase is Phase.TRAIN and held.lifetime is Lifetime.WINDOW:
        return Held.VIEW, "the batch's own rows"
    return Held.MEMORY, ""


def _read(
    graph: Layer, held: LayerObject, by: Measure, choices: Choices, size: Formula, place: Held
) -> Formula:
    """Bytes of an object that one decode step reads."""
    import sympy

    readers = [n for n in graph.consumers(held.name) if n.kind is not NodeKind.APPEND]
    if place is not Held.MEMORY or not readers:
        return by.formula(sympy.Integer(0))
    if held.lifetime is not Lifetime.CACHE:
        return size
    width = dtype_of(graph, held, choices).bytes
    picked = [n for n in readers if n.kind is NodeKind.GATHER]
    if len(picked) == len(readers):
        # The same rows may be gathered for keys and for values: they are read once.
        return by.product(graph.object(picked[0].outputs[0]).pattern, width)
    rows = by.axis("S")
    if held.reach is not None:
        seen = sympy.sympify(str(held.reach), locals=by.numbers(held.reach))
        rows = sympy.Min(rows, seen + by.axis("T") - 1)
    return by.product(held.pattern, width, {"S": rows})


def _scales(of: Entry, held: LayerObject, by: Measure, choices: Choices) -> Iterator[Entry]:
    """The scales of a quantised history."""
    storage = choices.storage.get(held.name)
    if not isinstance(storage, Scaled):
        return
    row = held.pattern.dims[-1:]
    if held.lifetime is not Lifetime.CACHE or row == (("S",),) or len(row[0]) != 1:
        raise ArgumentError(
            "only histories have quantised storage, and their innermost axis stands alone",
            op=by.name, argument=held.name, expected="[... S ... D]",
            found=f"{held.lifetime.value} [{held.pattern}]",
        )  # fmt: skip
    axis = held.pattern.axes[-1]
    pattern = scales_of(held.pattern, axis)
    blocks = by.blocks(axis, storage.block)
    changed = {**by.rows(held, choices), block_axis(axis): blocks}
    size = by.product(pattern, storage.scale.bytes, changed)
    read = None
    if of.read is not None:
        per = storage.scale.bytes * blocks / (by.axis(axis) * storage.dtype.bytes)
        read = by.formula(of.read.expr * per)
    yield Entry(
        f"{held.name}.scales", f"{held.symbol}.scales", held.row, f"scales of {held.symbol}",
        pattern, by.shape(pattern, changed), storage.scale, of.producers, of.consumers,
        of.declared, of.lifetime, of.held, of.growth, size, of.times, read,
        token=_row(held, by, storage.scale.bytes, pattern, changed),
    )  # fmt: skip


def _row(
    held: LayerObject, by: Measure, width: int, pattern: Pattern,
    changed: Mapping[str, Expr] | None = None,
) -> Formula | None:  # fmt: skip
    """Bytes of one token of one sequence in a history."""
    if held.lifetime is not Lifetime.CACHE:
        return None
    dims = tuple(tuple(a for a in dim if a not in ("B", "S")) for dim in pattern.dims)
    return by.product(Pattern(tuple(d for d in dims if d)), width, changed)
