"""Any declaration has a ledger and a picture: what holds of all of them."""

import math
from itertools import combinations

from hypothesis import given

from attncc.dsl.ir import Lifetime
from attncc.dsl.layers import KEPT
from attncc.dsl.ledger import Held, Phase, graph_of, ledger
from attncc.dsl.picture import Mark, figure, place
from attncc.dsl.picture.place import BOX_HEIGHT, RADIUS
from tests.drawn.source import Drawn
from tests.examples import examples
from tests.strategies_ops import declarations


def sizes_of(drawn: Drawn) -> dict[str, int]:
    """Sizes of every axis of a drawn declaration, and of host numbers that bound a mask."""
    tensors = drawn.op.declaration.tensors
    axes = {a for t in tensors for a in t.pattern.axes}
    numbers = {t.name for o in graph_of(drawn.op.declaration).objects if o.reach for t in tensors
               if t.scalar and t.name in str(o.reach)}  # fmt: skip
    known = dict.fromkeys(axes | numbers, 3) | {"B": 2} | dict(drawn.sizes)
    return {**known, "S": 40} if "S" in axes else known


@examples(60)
@given(declarations())
def test_every_object_is_accounted_for(drawn: Drawn):
    declaration = drawn.op.declaration
    sizes = sizes_of(drawn)
    graph = graph_of(declaration, sizes)
    outside = (*KEPT, Lifetime.MEMORY, Lifetime.PARAMETER)
    for held in graph.objects:
        given_by_the_caller = held.name in {t.name for t in declaration.tensors}
        made = list(graph.producers(held.name))
        assert given_by_the_caller or len(made) == 1
        left = held.lifetime is Lifetime.OUTPUT or held.name.endswith("_next")
        read = any(graph.consumers(held.name)) or held.lifetime in outside
        assert left or read or given_by_the_caller, held.name
    for phase in Phase:
        own = {a: n for a, n in sizes.items() if a != "T"} if phase is Phase.DECODE else sizes
        own = {**own, "S": own["T"]} if phase is Phase.TRAIN and "S" in own else own
        found = ledger(declaration, own, phase)
        for entry in found.entries:
            names = {"Min": min, "ceiling": math.ceil, "T": 1, **found.sizes}
            if phase is Phase.DECODE:
                names["T"] = 1
            value = eval(entry.size.text, {"__builtins__": {}}, names)
            assert value == entry.size.bytes, entry
            assert entry.bytes == (value if entry.held is Held.MEMORY else 0)
        assert found.peak.bytes == sum(i.bytes for i in found.peak.items)
        assert found.text() and found.markdown() and found.data()


@examples(60)
@given(declarations())
def test_every_declaration_can_be_drawn(drawn: Drawn):
    for phase in (Phase.TRAIN, Phase.DECODE):
        placed = place(figure(drawn.op.declaration, phase))
        boxes = []
        for vertex in placed.figure.vertices:
            (x, y), (left, right) = placed.at[vertex.name], placed.span[vertex.name]
            half = BOX_HEIGHT / 2 if vertex.mark is Mark.BOX else RADIUS + 4
            boxes.append((x + left, y - half, x + right, y + half))
        for a, b in combinations(boxes, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        for edge in placed.figure.edges:
            down = placed.at[edge.source][1] < placed.at[edge.target][1]
            assert down is not edge.back
