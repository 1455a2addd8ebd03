"""A layer with its ops taken apart: one flat graph of operations and objects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from attncc.dsl.axes import Pattern
from attncc.dsl.build import Declaration
from attncc.dsl.errors import LayerError
from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT, Inner, Layer, LayerNode, LayerObject, NodeKind
from attncc.dsl.ledger.expand import op_layer
from attncc.dsl.verify_selections import HISTORY

ALL_ROWS = "all rows at once"
"""What stands in training where inference appends."""

_NAME = re.compile(r"[A-Za-z_]\w*'*(?![\w(])")


def flatten(layer: Layer) -> Layer:
    """Replace each node of kind OP by the nodes of its body, if the layer names objects in it.

    What the op and the layer share has the layer's name; what is inside is ``node.object``, and has
    a row of the layer's table only where :attr:`LayerNode.inner` gives it one.

    Raises:
        LayerError: the layer's nodes and objects do not fit together.
    """
    check(layer)
    nodes: list[LayerNode] = []
    objects = {o.name: o for o in layer.objects}
    sizes = dict(layer.sizes)
    inside: dict[str, LayerObject] = {}
    for node in layer.nodes:
        if node.op is None:
            nodes.append(node)
            continue
        body = _body(node, node.op, sizes)
        axes = dict(node.axes)
        _fix(layer, node, sizes, {axes.get(a, a): n for a, n in body.sizes})
        names = {
            o.name: dict(node.binds).get(o.name, f"{node.name}.{o.name}") for o in body.objects
        }
        if _closed(node, node.op):
            nodes.append(node)
            body = replace(body, objects=tuple(o for o in body.objects if names[o.name] in objects))
        told = _symbols(body, names, objects, node.inner)
        inner = [_renamed(n, node.name, names, told, axes) for n in body.nodes]
        nodes += [] if _closed(node, node.op) else _beside(layer, node, inner)
        for held in body.objects:
            name = names[held.name]
            if name in objects:
                objects[name] = _merged(objects[name], held, told, axes)
            else:
                inside[name] = _inner(held, name, axes, told, node.inner)
    ordered = _in_order({**objects, **inside}, layer, nodes)
    return replace(layer, nodes=tuple(nodes), objects=ordered, sizes=tuple(sizes.items()))


def _fix(layer: Layer, node: LayerNode, sizes: dict[str, int], own: Mapping[str, int]) -> None:
    """Sizes that an op fixes become the layer's; two of one name must be the same."""
    for axis, size in own.items():
        if sizes.setdefault(axis, size) != size:
            raise LayerError(
                f"node {node.name} fixes an axis to another size than the layer or an op before it",
                op=layer.name, axis=axis, expected=sizes[axis], found=size, loc=node.loc,
                help="axes= of the node gives the op's axis a name of its own in the layer",
            )  # fmt: skip


def in_training(graph: Layer) -> Layer:
    """The graph of a training step: nothing is appended, a history is the batch's own rows."""
    rows: dict[str, str] = {}
    for node in graph.nodes:
        if node.kind is NodeKind.APPEND:
            own = next(graph.object(i).symbol for i in node.inputs if i not in node.outputs)
            rows |= {graph.object(o).symbol: own for o in node.outputs}
    own_rows = any(o.lifetime is Lifetime.CACHE for o in graph.objects)
    axes = {"S": "T"} if own_rows else {}
    found = (_all_rows(n) for n in graph.nodes)
    nodes = (replace(n, label=_words(n.shown, rows, axes)) for n in found)
    objects = (replace(o, formula=_words(o.formula, rows, axes)) for o in graph.objects)
    return replace(graph, nodes=tuple(nodes), objects=tuple(objects))


def _all_rows(node: LayerNode) -> LayerNode:
    if node.kind is not NodeKind.APPEND:
        return node
    rows = tuple(i for i in node.inputs if i not in node.outputs)
    return replace(node, kind=NodeKind.RESHAPE, inputs=rows, label=ALL_ROWS)


def _words(text: str, symbols: Mapping[str, str], axes: Mapping[str, str]) -> str:
    """An op's formula in the layer's symbols; what follows ``over`` are axes."""
    head, over, tail = text.partition(" over ")

    def told(match: re.Match[str]) -> str:
        return symbols.get(match[0], match[0])

    names = " ".join(axes.get(a, a) for a in tail.split(" "))
    return _NAME.sub(told, head) + over + (names if over else "")


def _body(node: LayerNode, op: Declaration, sizes: Mapping[str, int]) -> Layer:
    bound = {name for name, _ in node.binds}
    given = frozenset(t.name for t in op.tensors if t.optional and t.name in bound)
    back = {theirs: own for own, theirs in node.axes}
    own = {back.get(a, a): n for a, n in sizes.items()}
    fixed = tuple((a, own[a]) for a in op.asked if a in own)
    return op_layer(op, given, fixed)


def _closed(node: LayerNode, op: Declaration) -> bool:
    """An op that stays one operation: the layer names nothing in it, and it reads no history."""
    return not node.inner and all(t.lifetime not in HISTORY for t in op.tensors)


def _beside(layer: Layer, node: LayerNode, inner: list[LayerNode]) -> list[LayerNode]:
    """What a node reads beside its op's arguments: scales, which go where their elements go."""
    bound = {target for _, target in node.binds}
    for name in (i for i in node.inputs if i not in bound):
        row = layer.object(name).row
        same = {o.name for o in layer.objects if row is not None and o.row == row}
        at = next((i for i, n in enumerate(inner) if same & set(n.inputs)), 0)
        inner[at] = replace(inner[at], inputs=(*inner[at].inputs, name))
    return inner


def _symbols(
    body: Layer, names: Mapping[str, str], objects: Mapping[str, LayerObject],
    inner: tuple[Inner, ...],
) -> dict[str, str]:  # fmt: skip
    """What formulas call an op's objects: the layer's symbols where it has some."""
    found = {
        o.name: objects[names[o.name]].symbol for o in body.objects if names[o.name] in objects
    }
    new = {f"{name}_next": f"new {symbol}" for name, symbol in found.items()}
    return {**{i.name: i.symbol for i in inner if i.symbol}, **new, **found}


def _renamed(
    node: LayerNode, prefix: str, names: Mapping[str, str], told: Mapping[str, str],
    axes: Mapping[str, str],
) -> LayerNode:  # fmt: skip
    def of(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(n, n) for n in group)

    return replace(
        node, name=f"{prefix}.{node.name}", label=_words(node.label, told, axes),
        inputs=of(node.inputs), outputs=of(node.outputs), params=of(node.params),
    )  # fmt: skip


def _merged(
    shared: LayerObject, held: LayerObject, told: Mapping[str, str], axes: Mapping[str, str]
) -> LayerObject:
    """What the op knows of an object that belongs to the layer too."""
    formula = _words(held.formula, told, axes)
    return replace(
        shared,
        rows=held.rows or shared.rows,
        reach=held.reach if shared.reach is None else shared.reach,
        formula=shared.formula or formula,
    )


def _inner(
    held: LayerObject, name: str, axes: Mapping[str, str], told: Mapping[str, str],
    renamed: tuple[Inner, ...],
) -> LayerObject:  # fmt: skip
    """An object inside an op, in the layer's axes, with the layer's title."""
    dims = tuple(tuple(axes.get(a, a) for a in dim) for dim in held.pattern.dims)
    formula = _words(held.formula, told, axes)
    found = replace(held, name=name, pattern=Pattern(dims), row=None, formula=formula)
    title = next((i for i in renamed if i.name == held.name), None)
    if title is None:
        return found
    formula = formula if title.formula is None else title.formula
    return replace(
        found, symbol=title.symbol or held.symbol, row=title.row or held.name, formula=formula
    )


def _in_order(
    objects: Mapping[str, LayerObject], layer: Layer, nodes: list[LayerNode]
) -> tuple[LayerObject, ...]:
    """Objects in the layer's order, those inside an op before the first that they lead to."""
    given = [o.name for o in layer.objects]
    made = {name: i for i, node in enumerate(nodes) for name in node.outputs}
    place = {name: (float(i), 0) for i, name in enumerate(given)}
    # An object inside an op stands before the layer's first object that is made after it.
    for name in objects:
        if name not in place:
            at = made.get(name, -1)
            later = [g for g in given if made.get(g, -1) >= at and _fresh(objects[g])]
            after = min((place[g][0] for g in later), default=float(len(given)))
            place[name] = (after - 0.5, at)
    return tuple(objects[n] for n in sorted(objects, key=lambda n: place[n]))


def _fresh(held: LayerObject) -> bool:
    return held.lifetime not in KEPT


def check(layer: Layer) -> None:
    """Whether a layer's nodes and objects fit together.

    Raises:
        LayerError: a name twice, an unknown object, an object read before it is made, an op with an
            argument missing or of another layout.
    """
    error = next(_mistakes(layer), None)
    if error is not None:
        raise error


def _mistakes(layer: Layer) -> Iterator[LayerError]:
    names = [o.name for o in layer.objects]
    for group, what in ((names, "object"), ([n.name for n in layer.nodes], "node")):
        for name in group:
            if group.count(name) > 1:
                yield LayerError(f"two {what}s of one name", op=layer.name, found=name)
    known = {o.name: o for o in layer.objects}
    there = {o.name for o in layer.objects if o.given}
    for node in layer.nodes:
        for name in (*node.inputs, *node.params, *node.outputs):
            if name not in known:
                yield LayerError(
                    f"node {node.name} has an object that the layer does not",
                    op=layer.name, argument=name, loc=node.loc,
                )  # fmt: skip
        for name in (*node.inputs, *node.params):
            if name in known and name not in there:
                yield LayerError(
                    f"node {node.name} reads what nothing has made",
                    op=layer.name, argument=name, loc=node.loc,
                    help="source= on an object says that it comes from outside",
                )  # fmt: skip
        there.update(node.outputs)
        yield from _binding(layer, node, known)


def _binding(
    layer: Layer, node: LayerNode, known: Mapping[str, LayerObject]
) -> Iterator[LayerError]:
    """An op's arguments: all there, in the layouts that it declares."""
    if (node.kind is NodeKind.OP) != (node.op is not None):
        yield LayerError(
            f"node {node.name}: an op's node, and no other, names its declaration",
            op=layer.name, found=node.kind.value, loc=node.loc,
        )  # fmt: skip
    if node.op is None:
        return
    bound, axes = dict(node.binds), dict(node.axes)
    results = dict(node.op.outputs)
    patterns = {**{t.name: t.pattern for t in node.op.tensors}, **results}
    for t in node.op.tensors:
        if t.name not in bound and not t.optional and not t.scalar:
            yield LayerError(
                f"node {node.name} lacks an argument of op {node.op.name}",
                op=layer.name, argument=t.name, loc=node.loc,
            )  # fmt: skip
    for argument, name in node.binds:
        if argument not in patterns or name not in known:
            yield LayerError(
                f"node {node.name} binds what is not there",
                op=layer.name, argument=argument, found=name, loc=node.loc,
            )  # fmt: skip
            continue
        dims = tuple(tuple(axes.get(a, a) for a in dim) for dim in patterns[argument].dims)
        if dims != known[name].pattern.dims:
            yield LayerError(
                f"node {node.name}: the layout of {name} is not that of op {node.op.name}",
                op=layer.name, argument=argument, expected=f"[{Pattern(dims)}]",
                found=f"[{known[name].pattern}]", loc=node.loc,
            )  # fmt: skip
