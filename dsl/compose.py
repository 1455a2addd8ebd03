"""Layers are composed here: named nodes between named objects, checked as they are written.

    @ac.layer
    def projection(n):
        x = n.input("hidden_states", "B T M", "h_t")
        return n.project("out_proj", x, "y", "B T D", "y_t")

The function runs once, on names alone, and gives a :class:`Composition`: the ledger, the pictures
and the sharding plan read its :attr:`~Composition.layer`, and ``attncc.nn`` runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from attncc.dsl.axes import Pattern, shared_dims
from attncc.dsl.build import Declaration
from attncc.dsl.composition import Composition, Fused, check_settings, misfits
from attncc.dsl.errors import LayerError
from attncc.dsl.ir import Kind, Lifetime
from attncc.dsl.layers import CARRIED, KEPT, Dtype, Inner, Layer, LayerNode, LayerObject, NodeKind
from attncc.dsl.loc import Loc, caller
from attncc.dsl.signature import pattern_of


@dataclass(slots=True)
class Nodes:
    """What the function under :func:`layer` composes with; every object is named by a string."""

    name: str
    loc: Loc
    nodes: list[LayerNode] = field(default_factory=list)
    objects: dict[str, LayerObject] = field(default_factory=dict)
    groups: list[Fused] = field(default_factory=list)
    settings: dict[str, dict[str, float]] = field(default_factory=dict)
    titles: tuple[str, ...] = ()

    # --- objects

    def rows(self, *titles: str) -> None:
        """Titles of the object table in their order, where it is not the objects' own."""
        self.titles = titles

    def object(self, name: str, pattern: str, symbol: str = "", **about: Any) -> str:
        """An object.

        Args:
            name: the code's name for it.
            pattern: its layout: B, T tokens of this call, S of history, the layer's other axes.
            symbol: its name in formulas; the code's if empty.
            **about: as :class:`LayerObject`: ``lifetime``, ``dtype``, ``row``, ``formula``, ...

        Raises:
            LayerError: there is one of this name, or no such field.
            PatternError: a layout that cannot be read.
        """
        loc = caller()
        if name in self.objects:
            raise self._error("an object of this name is there", name, loc)
        unknown = [key for key in about if key not in _ABOUT]
        if unknown:
            raise self._error(
                f"an object has no {unknown[0]}", name, loc, " ".join(_ABOUT), unknown[0]
            )
        layout = pattern_of(pattern, self.name, name, loc)
        self.objects[name] = LayerObject(name, symbol or name, layout, **about)
        return name

    def input(self, name: str, pattern: str, symbol: str = "", **about: Any) -> str:
        """What the layer is given."""
        return self.object(name, pattern, symbol, **{"source": "previous sublayer", **about})

    def positions(self, name: str = "position") -> str:
        """Each token's place in its sequence: from the cache's length on, known to the device."""
        about = {"lifetime": Lifetime.CONTROL, "dtype": Dtype.INT32, "source": "cache length"}
        return self.object(name, "B T", "pos_t", **about)

    def cache(self, name: str, pattern: str, symbol: str = "", **about: Any) -> str:
        """A history that grows by the call's rows."""
        return self.object(name, pattern, symbol, lifetime=Lifetime.CACHE, **about)

    def state(self, name: str, pattern: str, symbol: str = "", **about: Any) -> str:
        """A carry of fixed size."""
        about = {"dtype": Dtype.FP32, **about}
        return self.object(name, pattern, symbol, lifetime=Lifetime.STATE, **about)

    def window(self, name: str, pattern: str, symbol: str = "", **about: Any) -> str:
        """The last rows; its axis counts those that a token sees, one more than are kept."""
        return self.object(name, pattern, symbol, lifetime=Lifetime.WINDOW, **about)

    def param(self, name: str, pattern: str, symbol: str = "", **about: Any) -> str:
        """A tensor of the model."""
        return self.object(name, pattern, symbol, lifetime=Lifetime.PARAMETER, **about)

    # --- nodes

    def node(
        self, kind: NodeKind, name: str, inputs: Sequence[str], outputs: Sequence[str],
        params: Sequence[str] = (), *, label: str = "", **settings: float,
    ) -> None:  # fmt: skip
        """A node between objects that are there.

        Args:
            kind: what it does.
            name: its name.
            inputs: objects it reads.
            outputs: objects it writes.
            params: parameters it reads.
            label: what tables call it.
            **settings: host numbers.

        Raises:
            LayerError: a name stands twice, or an object is not there or written twice.
        """
        loc = caller()
        self._add(
            LayerNode(name, kind, tuple(inputs), tuple(outputs), tuple(params), label, loc=loc), loc
        )
        if settings:
            self.settings[name] = settings

    def project(
        self, name: str, x: str, y: str, pattern: str, symbol: str = "", *, label: str = "",
        weight: str = "", per: str = "", **about: Any,
    ) -> str:  # fmt: skip
        """``y = x W``: the trailing axes that x has and y has not are summed.

        Args:
            name: of the node; its weight is ``{name}_weight`` unless it is named.
            x: what is projected.
            y: name of the result.
            pattern: its layout.
            symbol: its symbol.
            label: of the node.
            weight: name of the parameter, laid out ``[out, in]`` as a linear layer's.
            per: the heads' axis, of which each has a matrix of its own: ``[per, out, in]``.
            **about: about the result.

        Raises:
            LayerError: the result has all of the trailing axes of x, or adds none.
        """
        loc = caller()
        own, new = self._known(x, loc).pattern, pattern_of(pattern, self.name, y, loc)
        shared = shared_dims(own, new)
        if shared in (len(own.dims), len(new.dims)):
            raise self._error(
                "a projection sums trailing axes and has others in their place", y, loc,
                f"trailing axes other than those of {x}, [{own}]", f"[{new}]",
            )  # fmt: skip
        inner = " ".join(a for dim in own.dims[shared:] for a in dim)
        outer = " ".join(a for dim in new.dims[shared:] for a in dim)
        shape = f"{per} {outer} {inner}" if per else f"({outer}) ({inner})"
        w = self.param(weight or f"{name}_weight", shape, label)
        self.object(y, pattern, symbol, **about)
        self.node(NodeKind.PROJECT, name, [x], [y], [w], label=label)
        return y

    def same(
        self, kind: NodeKind, name: str, x: str, y: str, symbol: str = "", *,
        inputs: Sequence[str] = (), params: Mapping[str, str] | None = None, label: str = "",
        settings: Mapping[str, float] | None = None, **about: Any,
    ) -> str:  # fmt: skip
        """A node whose result is laid out as what it reads (norms, activations, RoPE).

        Args:
            kind: what it does.
            name: of the node.
            x: what it reads first.
            y: name of the result.
            symbol: of the result.
            inputs: what else it reads.
            params: parameters with their patterns, made here.
            label: of the node.
            settings: host numbers.
            **about: about the result.
        """
        own = self._known(x, caller())
        names = [self.param(p, pattern) for p, pattern in (params or {}).items()]
        self.object(y, str(own.pattern), symbol, **about)
        self.node(kind, name, [x, *inputs], [y], names, label=label, **dict(settings or {}))
        return y

    def append(self, name: str, rows: str, history: str, *, label: str = "append") -> None:
        """New rows to a history."""
        self.node(NodeKind.APPEND, name, [rows, history], [history], label=label)

    def op(
        self, name: str, op: Any, binds: Mapping[str, str], *, label: str = "",
        axes: Mapping[str, str] | None = None, inner: Sequence[Inner] = (),
        also: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """A declared op between objects of the layer.

        Args:
            name: of the node.
            op: the op or its declaration.
            binds: arguments and results of the op, and the objects they are.
            label: of the node.
            axes: the op's axes that have other names in the layer.
            inner: what the layer calls objects inside the op.
            also: what the op reads besides its arguments: scales of a quantised history.

        Raises:
            LayerError: no such argument or result, one that is missing, or other memory axes.
        """
        loc = caller()
        node = self._op_node(name, op, binds, label, axes or {}, tuple(inner), loc)
        self._add(replace(node, inputs=(*node.inputs, *also)), loc)

    def fuse(
        self, nodes: Sequence[str], op: Any, binds: Mapping[str, str], *,
        axes: Mapping[str, str] | None = None, flags: Sequence[str] = (), phase: str = "",
        most: int = 0,
    ) -> None:  # fmt: skip
        """An op that does several nodes at once; the layer's structure stays as it is.

        Args:
            nodes: names of the nodes; the last one's place is the op's.
            op: the op or its declaration.
            binds: as of :meth:`op`.
            axes: as of :meth:`op`.
            flags: flags of the op that are on.
            phase: the phase in which it is taken; all if empty.
            most: sequences of a call up to which it is taken; any number if 0.

        Raises:
            LayerError: as :meth:`op`, or there is no such node or flag; at the end, if other nodes
                read what the op does not make (:func:`attncc.dsl.composition.misfits`).
        """
        loc = caller()
        there = [n.name for n in self.nodes]
        for name in nodes or ("",):
            if name not in there:
                raise self._error("no such node to fuse", name, loc, " ".join(there))
        tensors = getattr(op, "declaration", op).tensors
        known = [t.name for t in tensors if t.kind is Kind.BOOL]
        for name in flags:
            if name not in known:
                raise self._error("no such flag", "flags", loc, " ".join(known), name)
        by = self._op_node("+".join(nodes), op, binds, "", axes or {}, (), loc)
        self.groups.append(Fused(tuple(nodes), by, tuple(flags), phase, most))

    def _op_node(
        self, name: str, op: Any, binds: Mapping[str, str], label: str, axes: Mapping[str, str],
        inner: tuple[Inner, ...], loc: Loc,
    ) -> LayerNode:  # fmt: skip
        declaration: Declaration = getattr(op, "declaration", op)
        arguments = {t.name: t.pattern for t in declaration.tensors if not t.scalar}
        results = dict(declaration.outputs)
        kept = {t.name for t in declaration.tensors if t.lifetime in CARRIED}
        for bound, target in binds.items():
            pattern = arguments.get(bound) or results.get(bound)
            if pattern is None:
                known = " ".join((*arguments, *results))
                raise self._error(f"{declaration.name} has no {bound}", name, loc, known)
            self._fits(bound, pattern, target, axes, loc)
        wanted = [t for t in declaration.tensors if not (t.optional or t.scalar)]
        missing = [t.name for t in wanted if t.name not in binds]
        if missing:
            raise self._error(f"{missing[0]} of {declaration.name} is not bound", name, loc)
        bound_to = [(a, self.objects[o]) for a, o in binds.items()]
        model = [o.name for a, o in bound_to if o.lifetime is Lifetime.PARAMETER]
        read = [o.name for a, o in bound_to if a in arguments and o.name not in model]
        written = [o.name for a, o in bound_to if a in results or a in kept]
        return LayerNode(
            name, NodeKind.OP, tuple(read), tuple(written), tuple(model), label, declaration,
            tuple(binds.items()), tuple(axes.items()), inner, loc,
        )  # fmt: skip

    # --- checks

    def _fits(
        self, argument: str, pattern: Pattern, target: str, axes: Mapping[str, str], loc: Loc
    ) -> None:
        found = self._known(target, loc).pattern
        want = Pattern(tuple(tuple(axes.get(a, a) for a in dim) for dim in pattern.dims))
        if want != found:
            raise self._error(
                f"{argument} is laid out otherwise than {target}", target, loc,
                f"[{want}]", f"[{found}]",
            )  # fmt: skip

    def _known(self, name: str, loc: Loc) -> LayerObject:
        if name not in self.objects:
            raise self._error("no such object", name, loc, " ".join(self.objects))
        return self.objects[name]

    def _add(self, node: LayerNode, loc: Loc) -> None:
        if any(n.name == node.name for n in self.nodes):
            raise self._error("a node of this name is there", node.name, loc)
        made = {o for n in self.nodes for o in n.outputs}
        for name in (*node.inputs, *node.params):
            own = self._known(name, loc)
            if not own.given and name not in made:
                raise self._error("nothing has made this object yet", name, loc)
        for name in node.outputs:
            own = self._known(name, loc)
            if name in made and own.lifetime not in KEPT:
                raise self._error("the object is made twice", name, loc)
        self.nodes.append(node)

    def _error(
        self, message: str, argument: str, loc: Loc, expected: Any = None, found: Any = None
    ) -> LayerError:
        return LayerError(
            message, op=self.name, argument=argument, expected=expected, found=found, loc=loc
        )

    def done(self, result: Any, doc: str) -> Composition:
        """The composition, with the object that the function gave back as the layer's output."""
        if not isinstance(result, str) or result not in self.objects:
            raise self._error(
                "a layer gives back the name of its output", "return", self.loc,
                " ".join(self.objects), repr(result),
            )  # fmt: skip
        output = self.objects[result]
        if output.lifetime in KEPT or not any(result in n.outputs for n in self.nodes):
            message, found = "a layer's output is an activation that a node makes", output.lifetime
            raise self._error(message, result, self.loc, "the result of a node", found.value)
        check_settings(self.nodes, self.settings, self.name)
        for group in self.groups:
            for message, name in misfits(self.nodes, group, result):
                raise self._error(message, name, group.by.loc, name, " ".join(group.by.outputs))
        self.objects[result] = replace(
            output, lifetime=Lifetime.OUTPUT, sink=output.sink or "next sublayer"
        )
        layer = Layer(
            self.name, tuple(self.nodes), tuple(self.objects.values()), doc, rows=self.titles,
            loc=self.loc,
        )  # fmt: skip
        numbers = ((n, tuple(sorted(x.items()))) for n, x in sorted(self.settings.items()))
        return Composition(layer, tuple(self.groups), tuple(numbers))


_ABOUT = tuple(f.name for f in fields(LayerObject) if f.name not in ("name", "symbol", "pattern"))
"""What may be said about an object beside its name, symbol and layout."""


def layer(fn: Callable[[Nodes], object]) -> Composition:
    """Compose a layer: ``fn`` takes :class:`Nodes` and gives back the name of its output.

    Raises:
        LayerError: a node or object that does not fit; the line is shown.
    """
    code = fn.__code__
    nodes = Nodes(fn.__name__, Loc(code.co_filename, code.co_firstlineno))
    return nodes.done(fn(nodes), inspect.getdoc(fn) or "")
