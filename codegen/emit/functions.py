"""Texts of element-wise functions and of numbers, and what is a number already."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from attncc.dsl.ir import Fn, Lit, Map, Node, Size


def wrap(text: str) -> str:
    """An operand's text, in brackets unless it is one name or one element."""
    return (
        text
        if text.isidentifier() or ("[" in text and " " not in text.split("[")[0])
        else f"({text})"
    )


_INFIX = {
    Fn.ADD: "+", Fn.SUB: "-", Fn.MUL: "*", Fn.DIV: "/", Fn.LT: "<", Fn.LE: "<=", Fn.GT: ">",
    Fn.GE: ">=", Fn.EQ: "==", Fn.NE: "!=", Fn.AND: "&", Fn.OR: "|",
}  # fmt: skip
REAL_ONLY = frozenset(
    {Fn.EXP, Fn.LOG, Fn.SQRT, Fn.RSQRT, Fn.TANH, Fn.SIGMOID, Fn.SILU, Fn.SOFTPLUS}
)
"""Functions whose operands have to be fp32."""
_NAN = "propagate_nan=tl.PropagateNan.ALL"
_CALL = {
    Fn.EXP: "tl.exp({0})", Fn.LOG: "tl.log({0})", Fn.SQRT: "tl.sqrt({0})",
    Fn.RSQRT: "tl.rsqrt({0})",
    Fn.SIGMOID: "tl.sigmoid({0})",
    Fn.RELU: f"tl.maximum({{0}}, 0.0, {_NAN})",
    Fn.SILU: "({0}) / (1.0 + tl.exp2(({0}) * -1.4426950408889634))",  # one quotient
    Fn.SOFTPLUS: "tl.maximum({0}, 0.0) + tl.log(1.0 + tl.exp(-tl.abs({0})))",
    Fn.MOD: "(({0}) % ({1}) + ({1})) % ({1})",  # rounds down on every machine
    Fn.ABS: "tl.abs({0})", Fn.NEG: "-({0})", Fn.NOT: "~({0})", Fn.WHERE: "tl.where({0}, {1}, {2})",
    Fn.MIN: f"tl.minimum({{0}}, {{1}}, {_NAN})", Fn.MAX: f"tl.maximum({{0}}, {{1}}, {_NAN})",
}  # fmt: skip


def function(fn: Fn, texts: list[str]) -> str:
    """Triton text of an element-wise function of already broadcast operands."""
    if fn in _INFIX:
        return f" {_INFIX[fn]} ".join(wrap(t) for t in texts)
    return _CALL[fn].format(*texts)


def literal(value: float | int | bool) -> str:
    """A number as Python source."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


_EVALUATE: dict[Fn, Callable[..., float]] = {
    Fn.ADD: lambda a, b: a + b, Fn.SUB: lambda a, b: a - b, Fn.MUL: lambda a, b: a * b,
    Fn.DIV: lambda a, b: a / b, Fn.NEG: lambda a: -a, Fn.SQRT: lambda a: math.sqrt(a),
    Fn.RSQRT: lambda a: 1.0 / math.sqrt(a), Fn.EXP: lambda a: math.exp(a),
    Fn.LOG: lambda a: math.log(a),
}  # fmt: skip


def constant(node: Node, sizes: Mapping[str, str]) -> float | int | bool | None:
    """The value of an expression of literals and compiled-in sizes, or None."""
    match node:
        case Lit(value=value):
            return value
        case Size(axis=axis):
            text = sizes.get(axis, "")
            return int(text) if text.isdigit() else None
        case Map(fn=fn, args=args) if fn in _EVALUATE:
            values = [constant(a, sizes) for a in args]
            if any(v is None for v in values):
                return None
            try:
                return _EVALUATE[fn](*values)
            except (ArithmeticError, ValueError):
                return None
        case _:
            return None
