"""What a picture shows: marks for objects and operations, and the edges between them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attncc.dsl.build import Declaration
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT, Layer, LayerNode, LayerObject, NodeKind
from attncc.dsl.ledger.derive import Subject, graph_of
from attncc.dsl.ledger.inline import in_training
from attncc.dsl.ledger.model import Phase
from attncc.dsl.ledger.ways import passing

_LABEL = 34


class Mark(enum.Enum):
    """The shape of a vertex."""

    DOT = "dot"  # an activation
    RING = "ring"  # kept across steps: a double circle
    BOX = "box"  # an operation


@dataclass(frozen=True, slots=True)
class Vertex:
    """One mark of a picture.

    Attributes:
        name: unique in its figure.
        mark: its shape.
        label: symbol of an object, label of an operation.
        detail: layout of an object.
    """

    name: str
    mark: Mark
    label: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Edge:
    """From a vertex to one that reads it; ``back`` leads to the next step or chunk."""

    source: str
    target: str
    back: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """One panel.

    Attributes:
        name: of the op or layer.
        phase: training, or inference (decode).
        vertices: in an order in which the operations can run.
        edges: between them.
    """

    name: str
    phase: Phase
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]

    def vertex(self, name: str) -> Vertex:
        """The vertex of that name.

        Raises:
            KeyError: there is none.
        """
        for found in self.vertices:
            if found.name == name:
                return found
        raise KeyError(name)


def figure(subject: Subject, phase: Phase) -> Figure:
    """The dataflow of an op or a layer in one phase.

    Parameters and objects without a row of the table are not drawn: an edge passes through those.
    In training a history is the batch's own rows and a state is kept where chunks begin, so nothing
    is a double circle.

    Args:
        subject: the declaration, or the composition.
        phase: TRAIN, or DECODE for inference.
    """
    whole = isinstance(subject, Declaration)
    graph = graph_of(subject)
    if phase is Phase.TRAIN:
        graph = in_training(graph)
    shown = {o.name for o in graph.objects if _drawn(graph, o, phase)}
    boxes = [n for n in graph.nodes if n.kind is not NodeKind.RESHAPE]
    vertices = [_object(o, phase) for o in graph.objects if o.name in shown]
    vertices += [Vertex(f"op:{n.name}", Mark.BOX, _cut(n.shown)) for n in boxes]
    edges = dict.fromkeys(e for n in graph.nodes for e in _edges(graph, n, shown))
    touched = {v for e in edges for v in (e.source, e.target)}
    kept = [v for v in vertices if v.name in touched]
    return Figure(subject.name, phase, tuple(_ordered(graph, kept, whole)), tuple(edges))


def _drawn(graph: Layer, held: LayerObject, phase: Phase) -> bool:
    if held.lifetime is Lifetime.PARAMETER or passing(held):
        return False
    made = {n.kind for n in graph.producers(held.name)}
    if phase is Phase.TRAIN and held.lifetime is Lifetime.WINDOW:
        return False
    own_rows = phase is Phase.TRAIN and held.lifetime is Lifetime.CACHE
    return not (own_rows and made == {NodeKind.RESHAPE})


def _object(held: LayerObject, phase: Phase) -> Vertex:
    kept = held.lifetime in (*KEPT, Lifetime.MEMORY)
    training = phase is Phase.TRAIN
    mark = Mark.RING if kept and not training else Mark.DOT
    names = {"S": "T"} if training and held.lifetime is not Lifetime.MEMORY else {"T": "1"}
    if held.rows:
        names[held.rows] = f"{held.rows}-1"
    dims = (" ".join(names.get(a, a) for a in dim) for dim in held.pattern.dims)
    layout = " ".join(f"({d})" if " " in d else d for d in dims)
    chunks = "chunks " if training and held.lifetime is Lifetime.STATE else ""
    return Vertex(held.name, mark, held.symbol, f"[{chunks}{layout}]")


def _cut(label: str) -> str:
    return label if len(label) <= _LABEL else f"{label[: _LABEL - 3]}..."


def _edges(graph: Layer, node: LayerNode, shown: set[str]) -> Iterator[Edge]:
    """Edges into and out of a box; what is not drawn is passed through, and so is a view."""
    if node.kind is NodeKind.RESHAPE:
        for made in (n for n in node.outputs if n in shown):
            for name in node.inputs:
                yield from (Edge(s, made) for s in _sources(graph, name, shown, node))
        return
    box = f"op:{node.name}"
    for name in node.inputs:
        if node.kind is NodeKind.APPEND and name in node.outputs:
            continue  # the history grows; its old rows do not pass through the append
        yield from (Edge(s, box) for s in _sources(graph, name, shown, node))
    for name in node.outputs:
        if name in shown:
            yield Edge(box, name, _goes_back(graph.object(name), node))


def _goes_back(held: LayerObject, node: LayerNode) -> bool:
    return held.lifetime in KEPT and node.kind is not NodeKind.APPEND


def _sources(graph: Layer, name: str, shown: set[str], reader: LayerNode) -> Iterator[str]:
    """The drawn vertices that an input comes from."""
    if name in shown:
        yield name
        return
    if graph.object(name).lifetime is Lifetime.WINDOW:
        return  # in training: the rows that come with the call are the window
    for node in graph.producers(name):
        if node is reader:
            continue
        if node.kind is NodeKind.RESHAPE:
            for above in node.inputs:
                yield from _sources(graph, above, shown, reader)
        else:
            yield f"op:{node.name}"


def _ordered(graph: Layer, vertices: Iterable[Vertex], whole: bool) -> Iterator[Vertex]:
    """Objects that nothing makes first, then each operation with what it makes."""
    left = {v.name: v for v in vertices}
    made = {name for n in graph.nodes for name in n.outputs if not _kept_outside(graph, name, n)}
    for name in [o.name for o in graph.objects if o.name not in made]:
        if name in left:
            yield left.pop(name)
    for node in graph.nodes:
        for name in (f"op:{node.name}", *node.outputs):
            if name in left:
                yield left.pop(name)
    yield from left.values()


def _kept_outside(graph: Layer, name: str, node: LayerNode) -> bool:
    return _goes_back(graph.object(name), node)
