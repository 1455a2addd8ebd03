"""The state's value as a chain of events: decays and writes, found by degree in the state.

Every state-dependent value of a body is one of four things: a *version* of the state matrix (the
chain up to some event), a sum of *outer* products, a *vector* affine in reads of versions, or
something of higher degree, which is refused with its line.
"""

from __future__ import annotations

from collections.abc import Iterator

from attncc.codegen.passes.affine_values import (
    Affine,
    Decay,
    Event,
    Outer,
    Stop,
    Term,
    Vector,
    Version,
    Write,
)
from attncc.codegen.terms import (
    add,
    depends_on,
    factors,
    is_number,
    mul,
    neg,
    number,
    product,
    split,
)
from attncc.dsl.ir import Contract, Fn, Input, Lifetime, Map, Node


class Chain:
    """Reads a body's values for one state, collecting the events its final value passes."""

    def __init__(
        self,
        state: str,
        state_axes: tuple[str, ...],
        active: tuple[str, ...],
        pending: frozenset[str] | None = None,
    ) -> None:
        self.state = state
        self.state_axes = state_axes
        self.active = active
        self.pending = frozenset({state}) if pending is None else pending
        self.events: list[Event] = []
        self._memo: dict[Node, Affine] = {}

    def value(self, node: Node) -> Affine:
        """What a node is as a function of the state.

        Raises:
            Stop: it is not affine, or its events do not form one chain.
        """
        if node not in self._memo:
            self._memo[node] = self._value(node)
        return self._memo[node]

    def held(self, node: Node) -> bool:
        """Whether a value depends on the state, or on another one that is not known yet."""
        return depends_on(node, self.pending)

    def known(self, node: Node) -> bool:
        """Whether a value was looked at before."""
        return node in self._memo

    def _value(self, node: Node) -> Affine:
        if not self.held(node):
            return None
        match node:
            case Input(name=name, lifetime=Lifetime.STATE) if name == self.state:
                return Version(0)
            case Map(fn=Fn.MUL | Fn.NEG):
                return self._product(node)
            case Map(fn=Fn.DIV):
                return self._quotient(node)
            case Map(fn=Fn.ADD | Fn.SUB):
                return self._sum(node)
            case Map(fn=Fn.WHERE):
                return self._where(node)
            case Contract():
                return self._contract(node)
            case Input():
                raise Stop(f"the update of {self.state} takes {node.name}", node.loc)
            case _:
                name = node.fn.value if isinstance(node, Map) else type(node).__name__.lower()
                raise Stop(f"{name} of a value of the state is not affine", node.loc)

    def _quotient(self, node: Map) -> Affine:
        x, y = node.args
        if self.value(y) is not None:
            raise Stop("a division by a value of the state", node.loc)
        return self._scale(self.value(x), Map(Fn.DIV, (number(1), y), loc=node.loc), node)

    def _product(self, node: Map) -> Affine:
        parts = factors(node)
        held = [p for p in parts if self.value(p) is not None]
        if len(held) > 1:
            raise Stop("a product of two values of the state is not affine", node.loc)
        rest = product(p for p in parts if p is not held[0])
        return self._scale(self.value(held[0]), rest, node)

    def _scale(self, x: Affine, by: Node, node: Node) -> Affine:
        match x:
            case Version(at=at):
                return self._extend(at, Decay(by), node)
            case Vector():
                active, plain = split(factors(by), self.active)
                scaled = x.scaled(product(plain)) if plain else x
                return Outer(((product(active), scaled),)) if active else scaled
            case Outer(parts=parts):
                active, plain = split(factors(by), self.active)
                a, u = product(active), product(plain)
                return Outer(tuple((product(factors(mul(p, a))), v.scaled(u)) for p, v in parts))
            case None:
                raise AssertionError("a state-free value reached _scale")

    def _extend(self, at: int, event: Event, node: Node) -> Version:
        if at < len(self.events):
            if self.events[at] == event:
                return Version(at + 1)
            raise Stop("the state goes two ways within one token", node.loc)
        if isinstance(event, Decay) and is_number(event.factor, 1):
            return Version(at)
        self.events.append(event)
        return Version(at + 1)

    def _sum(self, node: Map) -> Affine:
        terms = self._terms(node, 1)
        held = [(sign, n) for sign, n in terms if self.held(n)]
        matrices = self._matrices(held, node)
        free = add(*(n if sign > 0 else neg(n) for sign, n in terms if not self.held(n)))
        values = [(sign, n, self.value(n)) for sign, n in held if n not in matrices]
        if matrices:
            return self._write(self._base(held, matrices, node), values, free, node)
        if any(isinstance(v, Outer) for _, _, v in values):
            return self._outers(values, free)
        total = Vector(free)
        for sign, _, v in values:
            assert isinstance(v, Vector)
            total = total.plus(v if sign > 0 else v.scaled(number(-1)))
        return total

    def _outers(self, values: list[tuple[int, Node, Affine]], free: Node | None) -> Outer:
        """Outer products that are added before they meet the state."""
        parts: list[tuple[Node, Vector]] = []
        for sign, n, value in values:
            if not isinstance(value, Outer):
                raise Stop("a vector without the active axis is added to the state", n.loc)
            parts += [(a, u if sign > 0 else u.scaled(number(-1))) for a, u in value.parts]
        return Outer((*parts, *((a, u) for a, u, _ in self._free_outers(free))))

    def _terms(self, node: Node, sign: int) -> list[tuple[int, Node]]:
        """The summands of a node; a version of the state inside it stays one summand.

        Only a sum of two versions is opened further: they may be multiples of one.
        """
        if isinstance(node, Map) and node.fn in (Fn.ADD, Fn.SUB) and self.held(node):
            x, y = node.args
            second = sign if node.fn is Fn.ADD else -sign
            both = self.is_matrix(x) and self.is_matrix(y) and self._core(x) != self._core(y)
            return self._side(x, sign, both) + self._side(y, second, both)
        return [(sign, node)]

    def _core(self, node: Node) -> Node:
        """The version of the state inside a product."""
        inner = [p for p in factors(node) if self.is_matrix(p)]
        return inner[0] if len(inner) == 1 and inner[0] != node else node

    def _side(self, node: Node, sign: int, opened: bool) -> list[tuple[int, Node]]:
        while isinstance(node, Map) and node.fn is Fn.NEG:
            node, sign = node.args[0], -sign
        if self.is_matrix(node) and not opened:
            return [(sign, node)]
        return self._terms(node, sign)

    def is_matrix(self, node: Node) -> bool:
        """Whether a value carries the state matrix itself, told without recording events."""
        if not self.held(node):
            return False
        match node:
            case Input(name=name):
                return name == self.state
            case Contract():
                return False
            case Map(fn=Fn.MUL | Fn.ADD | Fn.SUB | Fn.NEG | Fn.DIV | Fn.WHERE, args=args):
                return any(self.is_matrix(a) for a in args)
            case _:
                return False

    def _matrices(self, held: list[tuple[int, Node]], node: Node) -> list[Node]:
        return [n for _, n in held if self.is_matrix(n)]

    def _base(self, held: list[tuple[int, Node]], matrices: list[Node], node: Node) -> Version:
        if len(matrices) == 1:
            value = self.value(matrices[0])
            sign = next(s for s, n in held if n is matrices[0])
            if not isinstance(value, Version):
                raise Stop("a sum that is neither a state nor a vector", node.loc)
            return value if sign > 0 else self._extend(value.at, Decay(number(-1)), node)
        bases, coefs = set(), []
        for sign, n in held:
            if n not in matrices:
                continue
            parts = factors(n)
            inner = [p for p in parts if self.is_matrix(p)]
            if len(inner) != 1:
                raise Stop("a product of two values of the state is not affine", n.loc)
            bases.add(inner[0])
            coefs.append(product([number(sign), *(p for p in parts if p is not inner[0])]))
        if len(bases) != 1:
            raise Stop("two versions of the state are added", node.loc)
        value = self.value(bases.pop())
        assert isinstance(value, Version)
        factor = add(*coefs)
        return self._extend(value.at, Decay(number(0) if factor is None else factor), node)

    def _write(
        self, base: Version, values: list[tuple[int, Node, Affine]], free: Node | None, node: Node
    ) -> Version:
        at = base
        for sign, n, value in values:
            if not isinstance(value, Outer):
                raise Stop("a vector without the active axis is added to the state", n.loc)
            for a, u in value.parts:
                at = self._extend(
                    at.at, Write(a, u if sign > 0 else u.scaled(number(-1)), n.loc), n
                )
        for a, u, n in self._free_outers(free):
            at = self._extend(at.at, Write(a, u, n.loc), n)
        return at

    def _free_outers(self, free: Node | None) -> Iterator[tuple[Node, Vector, Node]]:
        """Summands without the state as outer products."""
        for sign, n in self._terms_free(free):
            active, plain = split(factors(n), self.active)
            if not active:
                raise Stop("what is added to the state is not an outer product", n.loc)
            yield product(active), Vector(product(plain) if sign > 0 else neg(product(plain))), n

    def _terms_free(self, node: Node | None) -> list[tuple[int, Node]]:
        if node is None:
            return []
        if isinstance(node, Map) and node.fn in (Fn.ADD, Fn.SUB):
            x, y = node.args
            flip = -1 if node.fn is Fn.SUB else 1
            return self._terms_free(x) + [(s * flip, n) for s, n in self._terms_free(y)]
        if isinstance(node, Map) and node.fn is Fn.NEG:
            return [(-s, n) for s, n in self._terms_free(node.args[0])]
        return [(1, node)]

    def _where(self, node: Map) -> Affine:
        condition, x, y = node.args
        if self.held(condition):
            raise Stop("a choice that depends on the state is not affine", node.loc)
        for kept, other, order in ((x, y, (1.0, 0.0)), (y, x, (0.0, 1.0))):
            if is_number(other, 0) and self.held(kept):
                keep = Map(Fn.WHERE, (condition, number(order[0]), number(order[1])), loc=node.loc)
                return self._scale(self.value(kept), keep, node)
        raise Stop(
            "a choice between two values of the state (only a reset to 0 is affine)", node.loc
        )

    def _contract(self, node: Contract) -> Affine:
        parts = [f for arg in node.args for f in factors(arg)]
        held = [p for p in parts if self.value(p) is not None]
        if len(held) > 1:
            raise Stop("a contraction of two values of the state is not affine", node.loc)
        free = [p for p in parts if p is not held[0]]
        value = self.value(held[0])
        if set(node.over) != set(self.active):
            raise Stop(
                f"a value of the state is summed over {' '.join(node.over)}, "
                f"corrections contract {' '.join(self.active)}", node.loc,
            )  # fmt: skip
        active, plain = split(free, self.active)
        match value:
            case Version(at=at):
                if not active:
                    raise Stop("a read of the state without a read vector", node.loc)
                term = Term(product(plain) if plain else None, product(active), at)
                return Vector(None, (term,))
            case Outer(parts=outer):
                total = Vector(None)
                for a, u in outer:
                    inner = Contract((a, product(active)), node.over, loc=node.loc)
                    total = total.plus(u.scaled(mul(product(plain), inner)))
                return total
            case _:
                raise Stop("a vector of reads is contracted again", node.loc)
