"""Element-wise functions at fp32's own accuracy, for values that pass through them repeatedly."""

from __future__ import annotations

from collections.abc import Callable

from attncc.dsl.ir import Fn

Name = Callable[[str], str]
"""Gives an expression a variable and returns the variable."""

_SERIES = (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075)
"""Taylor coefficients of tanh(x) / x - 1 in x^2; below 0.5 the rest is under 1e-8."""

_EXP = (1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
"""Taylor coefficients of exp; within ln(2) / 2 of 0 the rest is under 6e-9."""

_LN2 = (0.693145751953125, 1.428606820309417e-06)
"""ln(2) as a part of 15 bits, so that its multiples are exact, and the rest."""


def _horner(x: str, terms: tuple[float, ...]) -> str:
    text = ""
    for term in reversed(terms):
        text = f"{term!r} + {x} * ({text})" if text else f"{term!r}"
    return text


def exp(x: str, name: Name) -> str:
    """Triton text of exp within about one rounding; the hardware's own errs twice as much.

    x = n ln(2) + r with a whole n: a polynomial in r, times a power of two that is exact.
    """
    n = name(f"tl.floor({x} * {1.4426950408889634!r} + 0.5)")
    r = name(f"({x} - {n} * {_LN2[0]!r}) - {n} * {_LN2[1]!r}")
    value = f"2.0 * ({_horner(r, _EXP)}) * tl.exp2({n} - 1.0)"
    return f"tl.where(tl.abs({x}) > 100.0, tl.exp({x}), {value})"


def tanh(x: str, name: Name) -> str:
    """Triton text of tanh, within 1e-7 everywhere.

    Near 0 the series, elsewhere (1 - e) / (1 + e) with e = exp(-2 |x|); the short form
    1 - 2 / (exp(2 x) + 1) cancels near 0 and errs twice as much.
    """
    square = name(f"{x} * {x}")
    near = f"{x} + {x} * ({square} * ({_horner(square, _SERIES)}))"
    decay = name(f"tl.exp(-2.0 * tl.abs({x}))")
    far = name(f"(1.0 - {decay}) / (1.0 + {decay})")
    return f"tl.where(tl.abs({x}) < 0.5, {near}, tl.where({x} < 0.0, -{far}, {far}))"


def sigmoid(x: str, name: Name) -> str:
    """Triton text of the logistic function by the exact exp."""
    falling = name(f"-({x})")
    return f"1.0 / (1.0 + {exp(falling, name)})"


def silu(x: str, name: Name) -> str:
    """Triton text of x times its logistic function."""
    return f"{x} * ({sigmoid(x, name)})"


def softplus(x: str, name: Name) -> str:
    """Triton text of log(1 + exp(x)), also where exp(x) is too small to change 1.

    With e = exp(-|x|) and u = 1 + e as it is rounded, log(1 + e) = log(u) e / (u - 1) (Kahan).
    """
    falling = name(f"-tl.abs({x})")
    e = name(exp(falling, name))
    u = name(f"1.0 + {e}")
    kept = name(f"tl.where({u} == 1.0, 1.0, {u} - 1.0)")
    rest = f"tl.where({u} == 1.0, {e}, tl.log({u}) * ({e} / {kept}))"
    return f"tl.maximum({x}, 0.0) + {rest}"


FUNCTIONS: dict[Fn, Callable[[str, Name], str]] = {
    Fn.EXP: exp, Fn.TANH: tanh, Fn.SIGMOID: sigmoid, Fn.SILU: silu, Fn.SOFTPLUS: softplus,
}  # fmt: skip
"""The functions that have an exact form, each of one variable."""
