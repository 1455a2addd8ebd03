"""An op as a layer: the operations of its body and the objects between them.

What the signature names lies in memory; what is between is fused into the op's kernels, except the
indices of a top-k, which a later stage reads. Element-wise code between two objects is one node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from attncc.dsl.axes import Pattern
from attncc.dsl.build import Declaration
from attncc.dsl.facts import window_axis
from attncc.dsl.graph import axes_of, children, kind_of, walk
from attncc.dsl.ir import (
    Contract,
    Gather,
    Input,
    Kind,
    Lifetime,
    Map,
    Node,
    Program,
    Push,
    Reduce,
    Select,
    Softmax,
    TopK,
)
from attncc.dsl.layers import CARRIED, Dtype, Layer, LayerNode, LayerObject, NodeKind
from attncc.dsl.ledger.names import variables
from attncc.dsl.ledger.reach import reach
from attncc.dsl.ledger.words import constant, formula, functions

_SINGLE = {k.value: k for k in (NodeKind.SILU, NodeKind.SIGMOID, NodeKind.SOFTPLUS)}
_LABEL_WIDTH = 30
_NEXT = "_next"
"""What ends the name of a state's new value."""


def op_layer(
    declaration: Declaration,
    given: frozenset[str] | None = None,
    sizes: tuple[tuple[str, int], ...] = (),
) -> Layer:
    """The body of an op as nodes and objects.

    Objects have the names of the body's variables; what has none is called ``p`` (a softmax), ``J``
    (a top-k), ``read0`` (a state that is read), ``dot0``, ``sum0``, ``x0``. A variable that is
    assigned again gets a prime: ``s`` is the state as it was, ``s'`` after its decay; the new state
    is ``s_next``, which the op keeps as ``s``. Objects of a scan's body are those of one token.

    Args:
        declaration: the op.
        given: optional inputs that are present; those of a usual call when None.
        sizes: sizes that the body unrolls.
    """
    return _layer(declaration, given, sizes)


@lru_cache(maxsize=256)
def _layer(
    declaration: Declaration, given: frozenset[str] | None, sizes: tuple[tuple[str, int], ...]
) -> Layer:
    return _Expansion(declaration, declaration.trace(given, dict(sizes))).layer()


@dataclass(slots=True)
class _Expansion:
    """One op being taken apart."""

    declaration: Declaration
    program: Program
    names: dict[Node, str] = field(default_factory=dict)  # objects by the value they hold
    nodes: list[LayerNode] = field(default_factory=list)
    objects: dict[str, LayerObject] = field(default_factory=dict)
    carried: set[Node] = field(default_factory=set)  # values that depend on a state
    counts: dict[str, int] = field(default_factory=dict)
    results: dict[Node, str] = field(default_factory=dict)  # names that results must have

    def layer(self) -> Layer:
        """Nodes in the order of the body, objects as signature, body, results."""
        roots = self.program.roots
        order = list(walk(*roots))
        given = variables(order)
        self._signature()
        self._reserve()
        self.carried = _depending(order)
        wanted = self._objects(order, given)
        for node in order:
            if node in wanted and node not in self.names:
                self._add(node, given.get(node))
        self._results()
        fixed = [*self.program.sizes, *((n.axis, n.k) for n in order if isinstance(n, TopK))]
        return Layer(
            self.declaration.name, tuple(self.nodes), tuple(self.objects.values()),
            doc=self.declaration.doc.partition("\n")[0], sizes=tuple(fixed),
            loc=self.declaration.loc,
        )  # fmt: skip

    def _signature(self) -> None:
        """What the caller passes; an absent optional input is no object, an absent state is."""
        for t in self.program.tensors:
            absent = t.optional and t.name not in self.program.given
            if t.scalar or (absent and t.lifetime not in CARRIED):
                continue
            held = LayerObject(
                t.name, t.name, t.pattern, t.lifetime, row=t.name,
                dtype=Dtype.INT32 if t.kind is Kind.INT else None,
            )  # fmt: skip
            if t.lifetime is Lifetime.CACHE and "S" in t.pattern.axes:  # blocks go as a whole
                held = replace(held, reach=reach(self.program, "S"))
            if t.lifetime is Lifetime.WINDOW:
                held = replace(held, rows=window_axis(self.program, t.name))
            self.objects[t.name] = held
        for node in walk(*self.program.roots):
            if isinstance(node, Input) and node.name in self.objects:
                self.names[node] = node.name

    def _reserve(self) -> None:
        """Names of results: ``s_next`` of a new state, an output's own."""
        for output in self.program.outputs:
            self.results.setdefault(output.value, output.name)
        for update in self.program.states:
            if not isinstance(update.value, Input):
                self.results[update.value] = f"{update.name}{_NEXT}"

    def _objects(self, order: list[Node], given: Mapping[Node, str]) -> set[Node]:
        """Values that are objects.

        Everything but masks, constants and the inside of element-wise code that nobody named.
        """
        roots = set(self.program.roots)
        logic = _masks(order) | _neighbours(order)
        found: set[Node] = set()
        for node in order:
            if node in logic or constant(node) or isinstance(node, (Input, Select)):
                continue
            if node in roots or node in given or not isinstance(node, Map):
                found.add(node)
        for node in order:
            if node in found and not isinstance(node, Map):
                found.update(c for c in children(node) if isinstance(c, Map) and not constant(c))
        return found - logic

    def _add(self, node: Node, variable: str | None) -> None:
        name = self._name(node, variable)
        reads, params = self._reads(node)
        inputs, loc = reads, node.loc
        if isinstance(node, (Softmax, TopK)) and node.where is not None:
            masked = self._unique(f"masked_{reads[0]}" if reads else "masked")
            first = LayerObject(masked, masked, _pattern(node.score), dtype=Dtype.FP32, fused=True)
            seen, more = self._below(node.where)
            self.objects[masked] = first
            both = tuple(dict.fromkeys((*reads, *seen)))
            self.nodes.append(
                LayerNode(f"mask_{masked}", NodeKind.MASK, both, (masked,), more, "mask", loc=loc)
            )
            inputs = (masked,)
        kind, label = self._kind(node)
        row = name if (variable or self._shown(node)) and not name.endswith(_NEXT) else None
        integer = isinstance(node, TopK)
        self.objects[name] = LayerObject(
            name, name, _pattern(node), Lifetime.CONTROL if integer else Lifetime.ACTIVATION,
            Dtype.INT32 if integer else Dtype.FP32, row, formula(node, self.names),
            fused=not integer,
        )  # fmt: skip
        self.nodes.append(LayerNode(f"to_{name}", kind, inputs, (name,), params, label, loc=loc))
        self.names[node] = name

    def _reads(self, node: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Objects and parameters that a value is made of, without those of its mask."""
        if isinstance(node, (Softmax, TopK)):
            return self._below(*(c for c in children(node) if c is not node.where))
        return self._below(*children(node))

    def _below(self, *nodes: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
        found: dict[str, None] = {}
        stack = list(reversed(nodes))
        while stack:
            node = stack.pop()
            if node in self.names:
                found[self.names[node]] = None
            else:
                stack.extend(reversed(children(node)))
        params = [n for n in found if self.objects[n].lifetime is Lifetime.PARAMETER]
        return tuple(n for n in found if n not in params), tuple(params)

    def _kind(self, node: Node) -> tuple[NodeKind, str]:
        match node:
            case Contract(over=over) | Reduce(over=over):
                text = formula(node, self.names)
                plain = isinstance(node, Reduce)
                short = text if self._told(node, text) else f"sum over {' '.join(over)}"
                return (NodeKind.SUM if plain else NodeKind.CONTRACT), short
            case Softmax():
                return NodeKind.SOFTMAX, "softmax"
            case TopK(k=k):
                return NodeKind.TOPK, f"top-{k}"
            case Gather():
                return NodeKind.GATHER, formula(node, self.names)
            case Push():
                return NodeKind.PUSH, "push"
            case Map():
                return self._elementwise(node)
            case _:
                return NodeKind.ELEMENTWISE, formula(node, self.names)

    def _elementwise(self, node: Map) -> tuple[NodeKind, str]:
        used = functions(node, self.names)
        text = formula(node, self.names)
        label = text if self._told(node, text) else ", ".join(used)
        if set(used) == {"scale"}:
            return NodeKind.SCALE, "scale"
        return (
            _SINGLE.get(used[0], NodeKind.ELEMENTWISE) if len(used) == 1 else NodeKind.ELEMENTWISE
        ), label

    def _told(self, node: Node, text: str) -> bool:
        """Whether a formula is short, and says nothing of objects that nobody named."""
        inputs, _ = self._below(*children(node))
        nameless = (
            self.objects[n].row is None and "[" not in n and not n.endswith(_NEXT) for n in inputs
        )
        return len(text) <= _LABEL_WIDTH and not any(nameless)

    def _shown(self, node: Node) -> bool:
        """Whether an object without a variable has a row: what the source document's rows hold."""
        if isinstance(node, Contract):
            return any(a in self.carried for a in node.args)
        return isinstance(node, (Softmax, TopK, Push))

    def _name(self, node: Node, variable: str | None) -> str:
        if node in self.results:
            return self.results[node]
        if variable is not None:
            return self._unique(variable, primes=True)
        match node:
            case Softmax():
                return self._unique("p")
            case TopK(axis=axis):
                return self._unique(axis)
            case Contract(args=args) if any(a in self.carried for a in args):
                return self._numbered("read")
            case Contract():
                return self._numbered("dot")
            case Reduce():
                return self._numbered("sum")
            case Gather(arg=arg, index=index) if arg in self.names and index in self.names:
                return self._unique(f"{self.names[arg]}[{self.names[index]}]")
            case _:
                return self._numbered("x")

    def _numbered(self, stem: str) -> str:
        count = self.counts.get(stem, 0)
        self.counts[stem] = count + 1
        return self._unique(f"{stem}{count}")

    def _unique(self, name: str, primes: bool = False) -> str:
        taken = name
        more = 1
        reserved = {o.name for o in self.program.outputs}
        while taken in self.objects or taken in reserved or taken in self.results.values():
            taken = name + ("'" * more if primes and more < 4 else f"_{more}")
            more += 1
        return taken

    def _results(self) -> None:
        """New states become the kept objects; a value that is returned twice is copied."""
        made = {name: i for i, n in enumerate(self.nodes) for name in n.outputs}
        for update in self.program.states:
            value = self.names.get(update.value)
            if value is not None and value in made and value != update.name:
                node = self.nodes[made[value]]
                kind = NodeKind.PUSH if node.kind is NodeKind.PUSH else NodeKind.UPDATE
                outputs = (*node.outputs, update.name)
                self.nodes[made[value]] = replace(node, kind=kind, outputs=outputs)
                kept = self.objects[update.name]
                text = self.objects[value].formula
                self.objects[update.name] = replace(kept, formula=text)
        for output in self.program.outputs:
            name = output.name
            if name not in self.objects:
                inputs, params = self._below(output.value)
                copy = LayerNode(
                    f"to_{name}", NodeKind.ELEMENTWISE, inputs, (name,), params, "copy"
                )
                self.nodes.append(copy)
            formula_of = self.objects[name].formula if name in self.objects else "copy"
            self.objects[name] = LayerObject(
                name, name, output.pattern, Lifetime.OUTPUT, row=name, formula=formula_of
            )


def _pattern(node: Node) -> Pattern:
    return Pattern(tuple((a,) for a in axes_of(node)))


def _masks(order: list[Node]) -> set[Node]:
    """Truth values and whole numbers: masks and positions, which no table has a row for."""
    return {n for n in order if not isinstance(n, TopK) and kind_of(n) is not Kind.REAL}


def _neighbours(order: list[Node]) -> set[Node]:
    """Softmaxes that stand only beside others, for their part of the sum of exponentials."""
    beside: set[Node] = {b for n in order if isinstance(n, Softmax) for b in n.beside}
    read = {c for n in order for c in children(n) if not isinstance(n, Softmax)}
    return beside - read


def _depending(order: list[Node]) -> set[Node]:
    """Values that a state or window of the signature flows into."""
    found: set[Node] = set()
    for node in order:
        held = isinstance(node, Input) and node.lifetime in CARRIED
        if held or any(c in found for c in children(node)):
            found.add(node)
    return found
