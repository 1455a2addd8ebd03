"""Objects that no declaration names: tables, partials, boundaries, what a backward needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attncc.dsl.axes import Pattern, parse
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import Dtype, Layer, LayerNode, LayerObject, NodeKind
from attncc.dsl.ledger.choices import Choices
from attncc.dsl.ledger.model import Entry, Formula, Growth, Held, Phase
from attncc.dsl.ledger.size import Measure, symbol

_NO_GRADIENT = (Dtype.INT32, Dtype.INT64)


def extras(
    graph: Layer, by: Measure, choices: Choices, layers: int, known: Mapping[str, Entry]
) -> Iterator[Entry]:
    """What a phase adds to the objects of a graph."""
    if by.phase is Phase.TRAIN:
        yield from _saved(graph, by, layers)
        yield from _gradients(by, layers, known)
        return
    yield from _tables(graph, by, choices, layers)
    yield from _partials(graph, by)
    if by.phase is Phase.PREFILL:
        yield from _carries(graph, by, choices)


def _made(
    name: str, formula: str, pattern: Pattern, dtype: Dtype, way: tuple[str, str],
    lifetime: Lifetime, size: Formula, by: Measure, *, held: Held = Held.MEMORY,
    growth: Growth | None = None, times: int = 1, row: str | None = None, read: bool = False,
    shape: tuple[str, ...] | None = None, at: str = "",
) -> Entry:  # fmt: skip
    grows = by.growth(size.expr, LayerObject(name, name, pattern)) if growth is None else growth
    none = by.product(Pattern(()), 0)
    return Entry(
        name, name, row, formula, pattern, by.shape(pattern, {}) if shape is None else shape, dtype,
        (way[0],), (way[1],), lifetime, lifetime, held, grows, size, times,
        (size if read else none) if by.phase is Phase.DECODE else None, at=at,
    )  # fmt: skip


def _tables(graph: Layer, by: Measure, choices: Choices, layers: int) -> Iterator[Entry]:
    """Lengths, block tables and slots: what finds rows and states."""
    kept = {o.lifetime for o in graph.objects}
    b = parse("B")
    if Lifetime.CACHE in kept:
        size = by.product(b, Dtype.INT32.bytes)
        yield _made(
            "lengths", "tokens held, before the append", b, Dtype.INT32, ("owner", "append, mask"),
            Lifetime.CONTROL, size, by, times=layers, row="Tables", read=True,
        )  # fmt: skip
        if choices.page:
            import sympy

            pages = sympy.ceiling(by.axis("S") / choices.page)
            size = by.product(b, Dtype.INT32.bytes, extra=(pages,))
            yield _made(
                "block_table", "pages of each sequence", parse("B pages"), Dtype.INT32,
                ("owner", "reads and appends"), Lifetime.CONTROL, size, by, times=layers,
                row="Tables", read=True, growth=Growth.LINEAR, shape=("B", str(pages)),
            )  # fmt: skip
    if kept & {Lifetime.STATE, Lifetime.WINDOW}:
        size = by.product(b, Dtype.INT32.bytes)
        yield _made(
            "slots", "slot of each sequence", b, Dtype.INT32, ("owner", "reads and writes"),
            Lifetime.CONTROL, size, by, times=layers, row="Tables", read=True,
        )  # fmt: skip


def _closed(graph: Layer) -> Iterator[tuple[LayerNode, LayerObject, LayerObject]]:
    """Each contraction that closes a softmax: the node, probabilities, result."""
    weights = {n.outputs[0] for n in graph.nodes if n.kind is NodeKind.SOFTMAX}
    for node in graph.nodes:
        for name in node.inputs:
            if node.kind is NodeKind.CONTRACT and name in weights:
                yield node, graph.object(name), graph.object(node.outputs[0])


def _partials(graph: Layer, by: Measure) -> Iterator[Entry]:
    """The carries (m, l, u) of parts of a history, fp32, where a plan splits it."""
    for node, p, u in _closed(graph):
        import sympy

        rows = sympy.Mul(*(by.axis(a) for a in p.pattern.axes if a in u.pattern.axes))
        wide = sympy.Mul(*(by.axis(a) for a in u.pattern.axes))
        expr = symbol("splits") * (2 * rows + wide) * Dtype.FP32.bytes
        held = Held.MEMORY if by.sizes is not None and by.sizes["splits"] > 1 else Held.FUSED
        yield _made(
            f"partials of {u.name}", "m, l, u of each part of the history", u.pattern, Dtype.FP32,
            (node.shown, "merge"), Lifetime.WORKSPACE, by.formula(expr), by, held=held,
            at=node.name,
        )  # fmt: skip


def _carries(graph: Layer, by: Measure, choices: Choices) -> Iterator[Entry]:
    """The carry of a scan between chunks of one pass: registers, unless a plan cuts the scan."""
    for held in graph.objects:
        if held.lifetime is not Lifetime.STATE:
            continue
        size = by.product(held.pattern, Dtype.FP32.bytes, extra=(symbol("segments"),))
        many = by.sizes is not None and by.sizes["segments"] > 1
        yield _made(
            f"carry of {held.name}", f"{held.symbol} where a chunk begins", held.pattern,
            Dtype.FP32, ("the chunk before", "the next chunk"), Lifetime.BOUNDARY, size, by,
            held=Held.MEMORY if many else Held.FUSED, growth=Growth.FIXED,
        )  # fmt: skip


def _saved(graph: Layer, by: Measure, layers: int) -> Iterator[Entry]:
    """What a forward saves beside its objects: lse of each row that a softmax normalises."""
    for _, p, u in _closed(graph):
        axes = tuple((a,) for a in p.pattern.axes if a in u.pattern.axes)
        pattern = Pattern(axes)
        size = by.product(pattern, Dtype.FP32.bytes)
        yield _made(
            f"lse of {p.name}", "log of the softmax's denominator", pattern, Dtype.FP32,
            ("softmax", "backward"), Lifetime.ACTIVATION, size, by, times=layers, row="Saved lse",
        )  # fmt: skip


def _gradients(by: Measure, layers: int, known: Mapping[str, Entry]) -> Iterator[Entry]:
    """A gradient for everything in memory that a loss depends on."""
    for entry in known.values():
        if entry.held is not Held.MEMORY or entry.dtype in _NO_GRADIENT or entry.at:
            continue
        if entry.lifetime in (Lifetime.CONTROL, Lifetime.BOUNDARY):
            continue
        weight = entry.lifetime is Lifetime.PARAMETER
        yield Entry(
            f"d{entry.name}", f"d{entry.symbol}", "Gradients", f"of the loss by {entry.symbol}",
            entry.pattern, entry.shape, entry.dtype, ("backward",),
            ("optimizer" if weight else "backward",), Lifetime.GRADIENT, Lifetime.GRADIENT,
            Held.MEMORY, entry.growth, entry.size, layers if weight else 1,
        )  # fmt: skip
