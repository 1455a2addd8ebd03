"""Every carried object of a scan: windows, element-wise states, affine states, in their order.

One object after another is derived from those before it. What is left when none can be derived
names the line: two states that take each other, an update that is neither element-wise nor affine.
"""

from __future__ import annotations

from collections.abc import Callable

from attncc.codegen.forms import Carries, Carry, DiagonalForm, Refusal, WindowForm
from attncc.codegen.passes.affine_values import Stop
from attncc.codegen.passes.find_affine import affine_state
from attncc.codegen.terms import add, depends_on, is_number, mul, neg, number
from attncc.dsl.graph import children, walk
from attncc.dsl.ir import Contract, Fn, Input, Lifetime, Map, Node, Program, Push


def find_carries(program: Program) -> Carries | Refusal:
    """The forms of a scan's carried objects, or the first line that stands in the way."""
    if program.scan is None:
        return Refusal("no scan: the body folds a history", program.loc)
    if not program.states:
        return Refusal("the body carries nothing", program.loc)
    return _Search(program).run()


class _Search:
    """Values are rewritten as forms are found: reads of an affine state become inputs."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.updates = {s.name: s.value for s in program.states}
        self.outputs = tuple(o.value for o in program.outputs)
        self.forms: list[Carry] = []
        self.reads = 0

    def run(self) -> Carries | Refusal:
        """Windows and affine states first: element-wise scans only where nothing else is left."""
        refused: dict[str, Refusal] = {}
        while self.updates:
            for find in (self._folded, self._diagonal):
                name = next((n for n in self.updates if self._found(n, find, refused)), None)
                if name is not None:
                    del self.updates[name]
                    break
            else:
                return refused[next(iter(self.updates))]
            refused.clear()
        return Carries(tuple(self.forms), self.outputs)

    def _found(
        self, name: str, find: Callable[[str], Carry | Refusal], refused: dict[str, Refusal]
    ) -> bool:
        found = self._coupled(name) or find(name)
        if isinstance(found, Refusal):
            if name not in refused or not self._contracts(name):
                refused[name] = found
            return False
        self.forms.append(found)
        return True

    def _contracts(self, name: str) -> bool:
        """Whether the update reads its state along an axis."""
        own = frozenset({name})
        nodes = walk(self.updates[name])
        return any(isinstance(n, Contract) and depends_on(n, own) for n in nodes)

    def _coupled(self, name: str) -> Refusal | None:
        """The first value that takes a state which is not known yet."""
        others = frozenset(self.updates) - {name}
        for node in walk(self.updates[name]):
            taken = [c.name for c in children(node) if isinstance(c, Input) and c.name in others]
            if not taken:
                continue
            if depends_on(self.updates[taken[0]], frozenset({name})):
                return Refusal(
                    f"{name} and {taken[0]} take each other: their (A, B) summary is a block of "
                    "both, which has no chunk form; the body is stepped",
                    node.loc,
                )
            return Refusal(f"{name} takes {taken[0]}, which has no form of its own", node.loc)
        return None

    def _lifetime(self, name: str) -> Lifetime:
        return self.program.tensor(name).lifetime

    def _folded(self, name: str) -> Carry | Refusal:
        if self._lifetime(name) is Lifetime.WINDOW:
            return self._window(name, self.updates[name])
        try:
            return self._affine(name, self.updates[name])
        except Stop as stop:
            return stop.refusal

    def _diagonal(self, name: str) -> Carry | Refusal:
        if self._lifetime(name) is Lifetime.WINDOW:
            return Refusal(f"the window {name} has no form", self.updates[name].loc)
        try:
            decay, more = _linear(self.updates[name], name)
        except Stop as stop:
            return stop.refusal
        decay = number(0) if decay is None else _unless(decay, 1)
        return DiagonalForm(name, decay, _unless(more, 0))

    def _affine(self, name: str, update: Node) -> Carry:
        later = [n for n in self.updates if n != name]
        others = (*self.outputs, *(self.updates[n] for n in later))
        pending = frozenset(self.updates)
        form, new = affine_state(self.program, name, update, others, pending, self.reads)
        self.outputs = new[: len(self.outputs)]
        self.updates |= dict(zip(later, new[len(self.outputs) :], strict=True))
        self.reads += len(form.reads)
        return form

    def _window(self, name: str, update: Node) -> WindowForm | Refusal:
        if not isinstance(update, Push):
            return Refusal(f"the window {name} comes back as more than its push", update.loc)
        for node in walk(*self.updates.values(), *self.outputs):
            mine = [c for c in children(node) if isinstance(c, Input) and c.name == name]
            if mine and node != update:
                return Refusal(f"the window {name} is read without its push", node.loc)
        if depends_on(update.row, frozenset({name})):
            return Refusal(f"the row of the window {name} takes its earlier rows", update.row.loc)
        return WindowForm(name, update)


def _unless(node: Node | None, neutral: float) -> Node | None:
    return None if node is None or is_number(node, neutral) else node


def _linear(node: Node, state: str) -> tuple[Node | None, Node | None]:
    """``(d, c)`` with ``node = d * state + c``, element by element; None is 0.

    Raises:
        Stop: it is something else.
    """
    if not depends_on(node, frozenset({state})):
        return None, node
    match node:
        case Input():
            return number(1), None
        case Map(fn=Fn.NEG, args=(x,)):
            return _times(_linear(x, state), number(-1))
        case Map(fn=Fn.ADD | Fn.SUB, args=(x, y)):
            left, right = _linear(x, state), _linear(y, state)
            if node.fn is Fn.SUB:
                right = _times(right, number(-1))
            return add(left[0], right[0]), add(left[1], right[1])
        case Map(fn=Fn.MUL, args=(x, y)):
            left, right = _linear(x, state), _linear(y, state)
            if left[0] is not None and right[0] is not None:
                raise Stop("a product of two values of the state is not affine", node.loc)
            held, by = (left, y) if left[0] is not None else (right, x)
            return _times(held, by)
        case Map(fn=Fn.DIV, args=(x, y)) if not depends_on(y, frozenset({state})):
            return _times(_linear(x, state), Map(Fn.DIV, (number(1), y), loc=node.loc))
        case Map(fn=Fn.WHERE, args=(c, x, y)) if not depends_on(c, frozenset({state})):
            left, right = _linear(x, state), _linear(y, state)
            pairs = zip(left, right, strict=True)
            decay, more = (_where(c, a, b, node) for a, b in pairs)
            return decay, more
        case _:
            name = node.fn.value if isinstance(node, Map) else type(node).__name__.lower()
            raise Stop(f"{name} of a value of the state is not affine", node.loc)


def _times(x: tuple[Node | None, Node | None], by: Node) -> tuple[Node | None, Node | None]:
    if is_number(by, -1):
        return (None if x[0] is None else neg(x[0]), None if x[1] is None else neg(x[1]))
    return (None if x[0] is None else mul(x[0], by), None if x[1] is None else mul(x[1], by))


def _where(condition: Node, a: Node | None, b: Node | None, node: Map) -> Node | None:
    if a is None and b is None:
        return None
    return Map(Fn.WHERE, (condition, a or number(0), b or number(0)), loc=node.loc)
