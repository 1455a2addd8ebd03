"""Who makes an object and who reads it, in words of the operations between rows of the table."""

from __future__ import annotations

from collections.abc import Iterable

from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT, Layer, LayerNode, LayerObject, NodeKind

PREVIOUS, NEXT = "previous step", "next step"
CALLER, MODEL = "caller", "model"


def ways(
    graph: Layer, group: Iterable[str], kept: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Producers and consumers of objects that share a row.

    Args:
        graph: operations and objects, ops taken apart.
        group: names of the objects.
        kept: whether caches, states and windows outlive the step (not in training).

    Returns:
        Labels of the operations from the last rows to these objects, and of those that read them;
        operations between two objects of the group are producers only.
    """
    names = tuple(group)
    leading = _leading(graph, names)
    made = [n for n in graph.nodes if n.name in leading]
    readers = [n for n in graph.nodes if _reads(graph, n, names, n in made)]
    objects = [graph.object(n) for n in names]
    held = kept and any(o.lifetime in KEPT for o in objects)
    before = dict.fromkeys(o.source for o in objects if o.source)
    after = dict.fromkeys(o.sink for o in objects if o.sink)
    first = [PREVIOUS] if held else [*before] or ([] if made else [_origin(objects[0])])
    if held and not made:
        first.append(NodeKind.APPEND.value)  # an op's own history: a call appends its rows
    last = [NEXT] if held and _rewritten(objects) else [*after] or ([] if readers else [CALLER])
    producers = dict.fromkeys((*first, *(n.shown for n in made)))
    consumers = dict.fromkeys((*(n.shown for n in readers), *last))
    return tuple(producers), tuple(consumers)


def _reads(graph: Layer, node: LayerNode, names: tuple[str, ...], making: bool) -> bool:
    """Whether a node reads an object of the group, and does more than make another one of it."""
    read = [x for x in (*node.inputs, *node.params) if x in names]
    if not making:
        return bool(read)
    old = [x for x in read if graph.object(x).lifetime in KEPT]
    return bool(old) and node.kind is not NodeKind.APPEND


def _rewritten(objects: list[LayerObject]) -> bool:
    """States and windows go on to the next step themselves; a history only gets longer."""
    return any(o.lifetime in (Lifetime.STATE, Lifetime.WINDOW) for o in objects)


def _origin(held: LayerObject) -> str:
    return MODEL if held.lifetime is Lifetime.PARAMETER else CALLER


def _leading(graph: Layer, names: tuple[str, ...]) -> frozenset[str]:
    """Nodes that lead to the objects from objects with a row of their own."""
    wanted = list(names)
    seen: set[str] = set()
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in graph.producers(name):
            found.add(node.name)
            wanted.extend(i for i in node.inputs if passing(graph.object(i)))
    return frozenset(found)


def passing(held: LayerObject) -> bool:
    """Whether an object has no row and is only part of the way between others."""
    return held.row is None and not held.given


def first_and_last(graph: Layer, name: str) -> tuple[int, int]:
    """Positions of the node that makes an object (-1: none) and of the last that reads it.

    An object that leaves the layer is read at the end; a view reads what it is a view of.
    """
    made, last = -1, -1
    for i, node in enumerate(graph.nodes):
        if name in node.outputs and made < 0:
            made = i
        if name in (*node.inputs, *node.params):
            viewed = [first_and_last(graph, v)[1] for v in node.outputs] if _view(node) else []
            last = max(last, i, *viewed)
    leaves = graph.object(name).lifetime is Lifetime.OUTPUT or graph.object(name).sink
    return made, len(graph.nodes) if leaves else max(last, made)


def _view(node: LayerNode) -> bool:
    return node.kind is NodeKind.RESHAPE
