"""Every possible order of one contraction's operands, as products beside a fold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from attncc.codegen.association import FIRST, Product
from attncc.codegen.passes.find_loose import Loose
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of
from attncc.dsl.ir import Input, Lifetime, Node, Program

ROOM = 1 << 31
"""Elements that one contraction's products may have, 4 GiB in 16 bits, if there is another way."""

_Tree = int | tuple["_Tree", "_Tree"]


@dataclass(frozen=True, slots=True)
class Order:
    """One order of one contraction: ``left`` and ``right`` meet in the fold.

    ``room`` counts the elements of the results of ``before``.
    """

    before: tuple[Product, ...]
    left: tuple[Node, ...]
    right: tuple[Node, ...]
    over: tuple[str, ...]
    after: tuple[Product, ...]
    flops: int
    room: int

    @property
    def products(self) -> tuple[object, ...]:
        """What tells it from other orders; fewer products come first."""
        products = (*self.before, *self.after)
        return (len(products), tuple(p.text() for p in products))

    @property
    def rank(self) -> tuple[object, ...]:
        """What fits into memory, then the least work, then the fewer products, then by name."""
        return (self.room > ROOM, self.flops, self.products)


def _trees(leaves: tuple[int, ...]) -> Iterator[_Tree]:
    """Every binary tree; the first leaf is always to the left, so that none comes twice."""
    if len(leaves) == 1:
        yield leaves[0]
        return
    first, rest = leaves[0], leaves[1:]
    for chosen in range(1 << len(rest)):
        right = tuple(n for i, n in enumerate(rest) if chosen >> i & 1)
        if right:
            left = (first, *(n for n in rest if n not in right))
            for a in _trees(left):
                for b in _trees(right):
                    yield (a, b)


@dataclass(frozen=True, slots=True)
class _Part:
    """What a subtree gives.

    Attributes:
        leaves: operands below.
        axes: its axes.
        nodes: factors; one stored tensor where it is a product.
        folded: it holds the closed history.
        order: how it came about.
    """

    leaves: frozenset[int]
    axes: tuple[str, ...]
    nodes: tuple[Node, ...]
    folded: bool
    order: Order


_NOTHING = Order((), (), (), (), (), 0, 0)


@dataclass(frozen=True, slots=True)
class Search:
    """Looks at every binary tree over a contraction's operands.

    Attributes:
        program: it holds the contraction.
        loose: the contraction.
        sizes: of every axis; missing ones count as 64.
        stored: inputs that no matrix product of the runtime takes.
        output: name of the output that the contraction is, if it is one.
        made: products of other contractions' orders, by name.
    """

    program: Program
    loose: Loose
    sizes: Mapping[str, int]
    stored: frozenset[str]
    output: str | None
    made: Mapping[str, Product] = field(default_factory=dict)

    def orders(self) -> Iterator[Order]:
        """Every possible order; of two products with one name, neither."""
        for tree in _trees(tuple(range(len(self.loose.leaves)))):
            part = self._part(tree, root=True)
            if part is not None:
                names = [p.name for p in part.order.before]
                if len(set(names)) == len(names):
                    yield part.order

    def _part(self, tree: _Tree, *, root: bool = False) -> _Part | None:
        if isinstance(tree, int):
            nodes = self.loose.leaves[tree]
            axes = union(*map(axes_of, nodes))
            return _Part(frozenset({tree}), axes, nodes, False, _NOTHING)
        left, right = self._part(tree[0]), self._part(tree[1])
        if left is None or right is None:
            return None
        if self.loose.closes and 0 in left.leaves:
            return self._after(left, right) if left.folded else self._fold(left, right)
        if root:
            return self._fold(left, right)
        return self._before(left, right)

    def _over(self, left: _Part, right: _Part) -> tuple[str, ...]:
        """Axes that nothing else has."""
        inside = left.leaves | right.leaves
        others = {
            a
            for i, nodes in enumerate(self.loose.leaves)
            if i not in inside
            for n in nodes
            for a in axes_of(n)
        }
        both = union(left.axes, right.axes)
        return tuple(a for a in self.loose.node.over if a in both and a not in others)

    def _elements(self, axes: tuple[str, ...]) -> int:
        return prod(self.sizes.get(a, 64) for a in axes)

    def _flops(self, left: _Part, right: _Part) -> int:
        return 2 * self._elements(union(left.axes, right.axes))

    def _before(self, left: _Part, right: _Part) -> _Part | None:
        """A product of stored tensors, formed once."""
        names = [self._name(p) for p in (left, right)]
        over, both = self._over(left, right), union(left.axes, right.axes)
        kept = tuple(a for a in both if a not in over)
        if None in names or {"T", self.loose.over} <= set(kept):
            return None
        made = self._product(left, right, None)
        held = [n.lifetime for p in (left, right) for n in p.nodes if isinstance(n, Input)]
        node = Input(made.name, made.axes, _lifetime(held, made.axes), loc=self.loose.node.loc)
        order = replace(
            _NOTHING,
            before=(*left.order.before, *right.order.before, made),
            flops=left.order.flops + right.order.flops + made.flops,
            room=left.order.room + right.order.room + self._elements(made.axes),
        )
        return _Part(left.leaves | right.leaves, made.axes, (node,), False, order)

    def _fold(self, left: _Part, right: _Part) -> _Part | None:
        """Query meets key, or the probabilities meet the value."""
        over, history = self._over(left, right), self.loose.over
        if self.loose.closes:
            if len(left.leaves) != 1 or over != (history,) or "T" in right.axes:
                return None
            if any(history in axes_of(n) for n in self._others(left, right)):
                return None
        else:
            key, query = (left, right) if history in left.axes else (right, left)
            if history in query.axes or history not in key.axes or "T" in key.axes:
                return None
            if not set(over) <= set(key.axes) & set(query.axes):
                return None
        order = replace(
            _NOTHING,
            before=(*left.order.before, *right.order.before), left=left.nodes, right=right.nodes,
            over=over,
            flops=left.order.flops + right.order.flops + self._flops(left, right),
            room=left.order.room + right.order.room,
        )  # fmt: skip
        axes = tuple(a for a in union(left.axes, right.axes) if a not in over)
        return _Part(left.leaves | right.leaves, axes, (), True, order)

    def _after(self, left: _Part, right: _Part) -> _Part | None:
        """A product that finishes an output."""
        if self.output is None or self._name(right) is None or self.loose.over in right.axes:
            return None
        made = self._product(left, right, self.output)
        order = replace(
            left.order,
            before=(*left.order.before, *right.order.before),
            after=(*left.order.after, made),
            flops=left.order.flops + right.order.flops + made.flops,
            room=left.order.room + right.order.room,
        )
        return _Part(left.leaves | right.leaves, made.axes, (), True, order)

    def _others(self, left: _Part, right: _Part) -> Iterator[Node]:
        inside = left.leaves | right.leaves
        for i, nodes in enumerate(self.loose.leaves):
            if i not in inside:
                yield from nodes

    def _name(self, part: _Part) -> str | None:
        """The tensor that a part is, if a matrix product can take it."""
        if len(part.nodes) != 1 or not isinstance(part.nodes[0], Input):
            return None
        name = part.nodes[0].name
        return None if name in self.stored else name

    def _product(self, left: _Part, right: _Part, output: str | None) -> Product:
        """Rows of tokens to the left; the last axis of the other operand is innermost."""
        over, flops = self._over(left, right), self._flops(left, right)
        if output is None and not set(FIRST) & set(left.axes) and set(FIRST) & set(right.axes):
            left, right = right, left
        names = [output or self._name(left), self._name(right)]
        kept = tuple(a for a in union(left.axes, right.axes) if a not in over)
        columns = [a for a in right.axes if a not in (*over, *left.axes)]
        last = columns[-1:] or list(kept[-1:])
        axes = (
            *(a for a in FIRST if a in kept),
            *(a for a in kept if a not in (*FIRST, *last)),
            *(a for a in last if a not in FIRST),
        )
        assert names[0] is not None and names[1] is not None
        name = output or f"{names[0]}_{names[1]}"
        found = Product(name, names[0], names[1], over, axes, flops)
        return found if output else self._fresh(found)

    def _fresh(self, product: Product) -> Product:
        """The product under a name that means nothing else."""
        taken = {t.name for t in self.program.tensors} | {o.name for o in self.program.outputs}
        while product.name in taken or self.made.get(product.name, product) != product:
            product = replace(product, name=f"{product.name}_")
        return product


def _lifetime(held: list[Lifetime], axes: tuple[str, ...]) -> Lifetime:
    """A product of a history is one; of parameters alone a parameter."""
    for lifetime in (Lifetime.CACHE, Lifetime.MEMORY):
        if lifetime in held:
            return lifetime
    return Lifetime.ACTIVATION if set(FIRST) & set(axes) else Lifetime.PARAMETER
