"""The functions a body is written with: contractions, folds, element-wise maths, positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, overload

from attncc.dsl.axes import parse
from attncc.dsl.cascade import Cascade, cascade, contract
from attncc.dsl.errors import PatternError, SizeError, SymbolicError, UnknownAxisError
from attncc.dsl.graph import axes_of
from attncc.dsl.ir import (
    AtQuery,
    Between,
    Contract,
    Cumulative,
    Fn,
    Gather,
    Index,
    Map,
    Node,
    Push,
    Red,
    Reduce,
    Select,
    Size,
    Softmax,
    Take,
    TopK,
)
from attncc.dsl.loc import Loc, caller
from attncc.dsl.types import PROBE, Trace, Value, current, lift, make, mapped


def _op() -> str | None:
    trace = current()
    return trace.op if trace else None


def _axes(over: str | Value, loc: Loc) -> tuple[str, ...]:
    if isinstance(over, Value):
        if isinstance(over.node, TopK):
            return (over.node.axis,)
        raise SymbolicError(
            "an axis must be a name or the result of ac.topk", op=_op(), found=repr(over), loc=loc
        )
    try:
        axes = parse(over).axes
    except PatternError as error:
        raise PatternError(over, error.why, op=_op(), loc=loc) from None
    if not axes:
        raise UnknownAxisError("no axis is named", op=_op(), found=repr(over), loc=loc)
    return axes


def _axis(over: str | Value, loc: Loc) -> str:
    axes = _axes(over, loc)
    if len(axes) != 1:
        raise UnknownAxisError(
            "this function works along one axis",
            op=_op(), expected="one axis", found=" ".join(axes), loc=loc,
        )  # fmt: skip
    return axes[0]


def _unary(fn: Fn, doc: str) -> Any:
    def function(x: Any) -> Value:
        if isinstance(x, str):
            x = size(x)
        return mapped(fn, x)

    function.__name__ = function.__qualname__ = fn.value
    function.__doc__ = doc
    return function


exp = _unary(Fn.EXP, "Natural exponential of a Value, number or axis name (its size).")
log = _unary(Fn.LOG, "Natural logarithm; log 0 is -inf.")
sqrt = _unary(Fn.SQRT, "Square root of a Value, number or axis name (its size).")
rsqrt = _unary(Fn.RSQRT, 'Reciprocal square root; ``rsqrt("D")`` is the usual attention scale.')
tanh = _unary(Fn.TANH, "Hyperbolic tangent (soft caps).")
sigmoid = _unary(Fn.SIGMOID, "Logistic function.")
relu = _unary(Fn.RELU, "max(x, 0).")
silu = _unary(Fn.SILU, "x * sigmoid(x).")
softplus = _unary(Fn.SOFTPLUS, "log(1 + exp(x)), without overflow.")


def minimum(a: Any, b: Any) -> Value:
    """Element-wise minimum; NaN wins."""
    return mapped(Fn.MIN, a, b)


def maximum(a: Any, b: Any) -> Value:
    """Element-wise maximum; NaN wins."""
    return mapped(Fn.MAX, a, b)


def eq(a: Any, b: Any) -> Value:
    """Element-wise equality (``==`` on Values is Python's and refused)."""
    return mapped(Fn.EQ, a, b)


def where(condition: Any, a: Any, b: Any) -> Value:
    """``a`` where the condition holds, else ``b``."""
    return mapped(Fn.WHERE, condition, a, b)


def size(axis: str) -> Value:
    """The number of elements of an axis."""
    return make(Size(axis, loc=caller()))


def index(axis: str) -> Value:
    """Absolute position along an axis; in the history, query i stands at i + S - T."""
    trace = current()
    return make(Index(axis, scalar=trace is not None and trace.scan == axis, loc=caller()))


def dot(*args: Any) -> Value:
    """Product of operands, summed over axes: ``dot(q, k, "D")``, ``dot(a, b, c, "K R")``.

    With the probabilities of a softmax over several histories: ``dot(p, {"P": a, "S": b})``.

    Raises:
        SymbolicError: fewer than two operands or no axis.
    """
    loc = caller()
    if len(args) == 2 and isinstance(args[0], Cascade) and isinstance(args[1], Mapping):
        return contract(args[0], args[1], loc)
    if len(args) < 3 or not isinstance(args[-1], (str, Value)):
        raise SymbolicError(
            'dot needs two operands and an axis: ac.dot(q, k, "D")', op=_op(), loc=loc
        )
    over = _axes(args[-1], loc)
    operands = tuple(lift(a, loc).node for a in args[:-1])
    return make(Contract(operands, over, loc=loc))


def _factors(node: Node) -> Iterator[Node]:
    if isinstance(node, Map) and node.fn is Fn.MUL:
        for arg in node.args:
            yield from _factors(arg)
    else:
        yield node


def sum(x: Any, over: str | Value) -> Value:
    """Sum over axes; ``sum(s * k, "K")``, of a product, is the contraction ``dot(s, k, "K")``."""
    loc = caller()
    value = lift(x, loc)
    axes = _axes(over, loc)
    inside = [f for f in _factors(value.node) if set(axes_of(f)) & set(axes)]
    outside = [f for f in _factors(value.node) if not set(axes_of(f)) & set(axes)]
    if len(inside) < 2:
        inside, outside = [value.node], []
    red: Node = (
        Contract(tuple(inside), axes, loc=loc)
        if len(inside) > 1
        else Reduce(Red.SUM, inside[0], axes, loc=loc)
    )
    result = make(red)
    for factor in outside:
        result = make(Map(Fn.MUL, (factor, result.node), loc=loc))
    return result


def l2norm(x: Any, over: str, eps: float = 1e-6) -> Value:
    """Vectors of length 1: ``x * rsqrt(sum(x * x) + eps)``; a vector of zeros stays zero."""
    value = lift(x, caller())
    length: Value = rsqrt(sum(value * value, over) + eps)
    return value * length


def _extreme(red: Red, x: Any, over: str | Value) -> Value:
    loc = caller()
    value = lift(x, loc)
    axes = _axes(over, loc)
    return make(Reduce(red, value.node, axes, loc=loc))


def amax(x: Any, over: str | Value) -> Value:
    """Maximum over axes."""
    return _extreme(Red.MAX, x, over)


def amin(x: Any, over: str | Value) -> Value:
    """Minimum over axes."""
    return _extreme(Red.MIN, x, over)


def _mask(mask: Any, loc: Loc) -> Node | None:
    return None if mask is None else lift(mask, loc).node


@overload
def softmax(
    score: Mapping[str, Any], *, where: Mapping[str, Any] | None = None, sink: Any = None
) -> Cascade: ...
@overload
def softmax(score: Any, over: str | Value, *, where: Any = None, sink: Any = None) -> Value: ...
def softmax(
    score: Any, over: str | Value = "", *, where: Any = None, sink: Any = None
) -> Value | Cascade:
    """Softmax over a history axis, or over several histories together.

    Args:
        score: the logits; by history axis for several (``softmax({"P": a, "S": b})``, see
            :mod:`attncc.dsl.cascade`; ``where`` is then by axis too).
        over: the axis, or the result of :func:`topk` (whose places of -1 mask themselves).
        where: truth value; positions where it is false have weight 0. A row that sees nothing
            is all 0.
        sink: one more logit in the denominator, without a value.
    """
    loc = caller()
    if isinstance(score, Mapping):
        return cascade(score, where, sink, loc)
    value = lift(score, loc)
    axis = _axis(over, loc)
    mask = _mask(where, loc)
    if isinstance(over, Value):
        valid = (over >= 0).node
        mask = valid if mask is None else make(Map(Fn.AND, (valid, mask), loc=loc)).node
    sunk = None if sink is None else lift(sink, loc).node
    return make(Softmax(value.node, axis, mask, sunk, loc=loc))


def cumsum(x: Any, over: str) -> Value:
    """Running sum along an axis, the element itself included."""
    loc = caller()
    value = lift(x, loc)
    return make(Cumulative(value.node, _axis(over, loc), loc=loc))


def topk(score: Any, over: str, *, k: int, where: Any = None) -> Value:
    """Indices of the k best visible positions, on a new axis; -1 pads. Order as in the contract."""
    loc = caller()
    value = lift(score, loc)
    trace = current()
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise SymbolicError(
            "k of topk is fixed when the op is declared",
            op=_op(), expected="a whole number from 1", found=repr(k), loc=loc,
        )  # fmt: skip
    axis = "J" if trace is None else _fresh(trace)
    return make(TopK(value.node, _axis(over, loc), axis, k, _mask(where, loc), loc=loc))


def _fresh(trace: Trace) -> str:
    while True:
        name, trace.fresh = f"J{trace.fresh or ''}", trace.fresh + 1
        if name not in trace.declared:
            return name


def gather(x: Value, indices: Value) -> Value:
    """Rows of a history tensor at the indices of :func:`topk`: the same as ``x[J]``."""
    loc = caller()
    node = indices.node
    assert isinstance(node, TopK)
    return make(Gather(x.node, node, node.over, loc=loc))


def take(table: Any, axis: str, at: Any) -> Value:
    """Look up ``table`` along ``axis`` at element-wise integer positions (clamped to the table)."""
    loc = caller()
    value = lift(table, loc)
    return make(Take(value.node, _axis(axis, loc), lift(at, loc).node, loc=loc))


def at_query(x: Any, axis: str) -> Value:
    """A history tensor's value at the query's own position."""
    loc = caller()
    value = lift(x, loc)
    return make(AtQuery(value.node, _axis(axis, loc), loc=loc))


def between(x: Any, axis: str) -> Value:
    """Sum of a history tensor over the positions after the key up to and including the query's."""
    loc = caller()
    value = lift(x, loc)
    return make(Between(value.node, _axis(axis, loc), loc=loc))


def push(window: Any, row: Any, axis: str) -> Value:
    """The window with ``row`` as its newest entry: W rows in the body, of which W - 1 are kept."""
    loc = caller()
    return make(Push(lift(window, loc).node, lift(row, loc).node, _axis(axis, loc), loc=loc))


def unroll(axis: str, *values: Any, exactly: int | None = None) -> Iterator[tuple[Value, ...]]:
    """Go over the positions of an axis at trace time: ``for kj, vj in ac.unroll("N", k, v)``.

    With one value the items are Values, not tuples of one.

    Args:
        axis: whose positions.
        *values: of which one at least has the axis.
        exactly: the one size that the body has a meaning for; any if None.

    Raises:
        UnknownAxisError: no value has the axis.
        SizeError: a call in which the axis has another size than ``exactly``.
    """
    loc = caller()
    nodes = [lift(v, loc).node for v in values]
    if not any(axis in axes_of(n) for n in nodes):
        raise UnknownAxisError("no value has the axis to unroll", op=_op(), axis=axis, loc=loc)
    trace = current()
    count = PROBE if exactly is None else exactly
    if trace is not None:
        trace.asked.add(axis)
        count = trace.sizes.setdefault(axis, count)
    if exactly is not None and count != exactly:
        raise SizeError(
            "the body is written for one size of the axis",
            op=_op(), axis=axis, expected=exactly, found=count,
        )  # fmt: skip
    for i in range(count):
        row = tuple(
            make(Select(n, axis, i, loc=loc)) if axis in axes_of(n) else Value(n) for n in nodes
        )
        yield row if len(row) > 1 else row[0]  # type: ignore[misc]


causal = Value(Map(Fn.LE, (Index("S"), Index("T"))))
"""Query t sees keys s <= t, both as absolute positions (bottom-right aligned)."""
