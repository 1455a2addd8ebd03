"""Symbolic values: what the body of a declaration computes with.

A :class:`Value` holds one IR node. Operators broadcast by axis name; Python's own control flow,
``math`` and ``torch`` on a Value are errors that name the form to use instead.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from attncc.dsl.errors import ClosureError, SymbolicError
from attncc.dsl.graph import axes_of, kind_of
from attncc.dsl.ir import (
    Between,
    Cumulative,
    Fn,
    Input,
    Kind,
    Lit,
    Map,
    Node,
    Red,
    Reduce,
    TopK,
)
from attncc.dsl.loc import Loc, caller

PROBE = 2
"""Size of an unrolled axis while a declaration is checked without arguments."""


@dataclass(slots=True)
class Trace:
    """State of one trace: shared nodes and the sizes it asked for."""

    op: str
    scan: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    declared: frozenset[str] = frozenset()  # axes of the signature: no new axis may use them
    nodes: dict[Node, Node] = field(default_factory=dict)
    fresh: int = 0


_TRACE: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("attncc_trace", default=None)


@contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Make ``trace`` the current one while a body runs."""
    token = _TRACE.set(trace)
    try:
        yield trace
    finally:
        _TRACE.reset(token)


def current() -> Trace | None:
    """The running trace, or None outside a body."""
    return _TRACE.get()


def _op() -> str | None:
    trace = _TRACE.get()
    return trace.op if trace else None


def _number(node: Node, value: float) -> bool:
    return isinstance(node, Lit) and not isinstance(node.value, bool) and node.value == value


def _fold(node: Node) -> Node:
    """Neutral elements fold away, so that an absent optional input leaves no trace."""
    match node:
        case Map(args=args):
            folded = _fold_map(node, args)
            if folded is node or kind_of(folded) is Kind.BOOL:  # a mistake is left to be seen
                return node
            return folded
        case Reduce(red=Red.SUM, arg=arg) | Cumulative(arg=arg) if _number(arg, 0):
            return arg
        case Between(arg=arg) if _number(arg, 0):
            return arg
    return node


def _fold_map(node: Map, args: tuple[Node, ...]) -> Node:
    match node.fn:
        case Fn.MUL if _number(args[0], 1):
            return args[1]
        case Fn.MUL | Fn.DIV if _number(args[1], 1):
            return args[0]
        case Fn.ADD if _number(args[0], 0):
            return args[1]
        case Fn.ADD | Fn.SUB if _number(args[1], 0):
            return args[0]
        case Fn.EXP if _number(args[0], 0):
            return Lit(1.0, loc=node.loc)
        case Fn.NEG if isinstance(args[0], Lit):
            return Lit(-args[0].value, loc=node.loc)
        case Fn.NEG if isinstance(args[0], Map) and args[0].fn is Fn.NEG:
            return args[0].args[0]
    return node


def make(node: Node) -> Value:
    """A value for a node, folded and shared within the current trace."""
    node = _fold(node)
    trace = _TRACE.get()
    if trace is not None:
        node = trace.nodes.setdefault(node, node)
    return Value(node)


def _is_tensor(x: object) -> bool:
    return any(c.__module__.startswith("torch") and c.__name__ == "Tensor" for c in type(x).__mro__)


def lift(x: Any, loc: Loc | None = None) -> Value:
    """A number or Value as a Value.

    Raises:
        ClosureError: ``x`` is a torch tensor.
        SymbolicError: ``x`` is anything else.
    """
    if isinstance(x, Value):
        return x
    if isinstance(x, (bool, int)):
        return make(Lit(x, loc=loc or caller()))
    if isinstance(x, float):  # also numpy's float64, which prints differently
        return make(Lit(float(x), loc=loc or caller()))
    if _is_tensor(x):
        raise ClosureError(
            "a torch tensor inside the body",
            op=_op(), expected="an input or ac.Param of the signature", found="a captured tensor",
            loc=loc or caller(), help='declare it: name=ac.Param("H") or ac.Activation("B T H")',
        )  # fmt: skip
    raise SymbolicError(
        f"a {type(x).__name__} cannot take part in the body",
        op=_op(), expected="a Value or a number", found=repr(x)[:40], loc=loc or caller(),
    )  # fmt: skip


def mapped(fn: Fn, *args: Any) -> Value:
    """Apply an element-wise function at the caller's line."""
    loc = caller()
    return make(Map(fn, tuple(lift(a, loc).node for a in args), loc=loc))


def _refuse(what: str, instead: str) -> NoReturn:
    raise SymbolicError(
        f"{what} on a symbolic value", op=_op(), loc=caller(), help=f"write {instead}"
    )


class Value:
    """A symbolic value with named axes; see the module's docstring."""

    __slots__ = ("node",)
    __array_priority__ = 1000

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the value's axes."""
        return axes_of(self.node)

    def __repr__(self) -> str:
        name = self.node.name if isinstance(self.node, Input) else type(self.node).__name__
        return f"Value({name}: {' '.join(self.axes)})"

    def __add__(self, other: Any) -> Value:
        return mapped(Fn.ADD, self, other)

    def __radd__(self, other: Any) -> Value:
        return mapped(Fn.ADD, other, self)

    def __sub__(self, other: Any) -> Value:
        return mapped(Fn.SUB, self, other)

    def __rsub__(self, other: Any) -> Value:
        return mapped(Fn.SUB, other, self)

    def __mul__(self, other: Any) -> Value:
        return mapped(Fn.MUL, self, other)

    def __rmul__(self, other: Any) -> Value:
        return mapped(Fn.MUL, other, self)

    def __truediv__(self, other: Any) -> Value:
        return mapped(Fn.DIV, self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return mapped(Fn.DIV, other, self)

    def __mod__(self, other: Any) -> Value:
        return mapped(Fn.MOD, self, other)

    def __rmod__(self, other: Any) -> Value:
        return mapped(Fn.MOD, other, self)

    def __neg__(self) -> Value:
        return mapped(Fn.NEG, self)

    def __abs__(self) -> Value:
        return mapped(Fn.ABS, self)

    def __lt__(self, other: Any) -> Value:
        return mapped(Fn.LT, self, other)

    def __le__(self, other: Any) -> Value:
        return mapped(Fn.LE, self, other)

    def __gt__(self, other: Any) -> Value:
        return mapped(Fn.GT, self, other)

    def __ge__(self, other: Any) -> Value:
        return mapped(Fn.GE, self, other)

    def __and__(self, other: Any) -> Value:
        return mapped(Fn.AND, self, other)

    def __rand__(self, other: Any) -> Value:
        return mapped(Fn.AND, other, self)

    def __or__(self, other: Any) -> Value:
        return mapped(Fn.OR, self, other)

    def __ror__(self, other: Any) -> Value:
        return mapped(Fn.OR, other, self)

    def __invert__(self) -> Value:
        return mapped(Fn.NOT, self)

    def __getitem__(self, index: Any) -> Value:
        from attncc.dsl.functions import gather

        if not isinstance(index, Value) or not isinstance(index.node, TopK):
            _refuse("indexing", "x[J] with J = ac.topk(...), ac.take(x, axis, i), or ac.unroll")
        return gather(self, index)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        _refuse("'=='", "ac.eq(a, b)")

    def __ne__(self, other: object) -> bool:
        _refuse("'!='", "~ac.eq(a, b)")

    def __bool__(self) -> bool:
        _refuse("'and', 'or', 'not' or 'if'", "& | ~ for logic, ac.where(cond, a, b) for a choice")

    def __float__(self) -> float:
        _refuse("a function of math, or float(),", "the function of attncc, for instance ac.exp(x)")

    def __int__(self) -> int:
        _refuse("int()", "the value itself")

    def __index__(self) -> int:
        _refuse("range() or a Python index", "ac.unroll, or ac.take(x, axis, i)")

    def __len__(self) -> int:
        _refuse("len()", 'ac.size("T")')

    def __iter__(self) -> Iterator[Value]:
        _refuse("iteration", 'ac.unroll("N", x)')

    def __matmul__(self, other: Any) -> Value:
        _refuse("'@'", 'ac.dot(a, b, "K")')

    __rmatmul__ = __matmul__

    def __pow__(self, other: Any) -> Value:
        _refuse("'**'", "x * x, ac.sqrt(x), or ac.exp(p * ac.log(x))")

    __rpow__ = __pow__

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse("a numpy function", "the function of attncc, for instance ac.exp(x)")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for x in args:
            if _is_tensor(x):
                lift(x)
        _refuse(
            f"torch.{getattr(func, '__name__', 'function')}",
            "the function of attncc, for instance ac.exp(x)",
        )
