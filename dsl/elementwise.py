"""What each element-wise function computes, on plain tensors.

Only methods of tensors are used, so that importing this does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncc.dsl.ir import Fn

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Data

_PLAIN: dict[Fn, Any] = {
    Fn.ADD: lambda a, b: a + b, Fn.SUB: lambda a, b: a - b, Fn.MUL: lambda a, b: a * b,
    Fn.NEG: lambda a: -a, Fn.ABS: lambda a: a.abs(), Fn.MOD: lambda a, b: a.remainder(b),
    Fn.LT: lambda a, b: a < b, Fn.LE: lambda a, b: a <= b, Fn.GT: lambda a, b: a > b,
    Fn.GE: lambda a, b: a >= b, Fn.EQ: lambda a, b: a.eq(b), Fn.NE: lambda a, b: a.ne(b),
    Fn.AND: lambda a, b: a.logical_and(b), Fn.OR: lambda a, b: a.logical_or(b),
    Fn.NOT: lambda a: a.logical_not(), Fn.MIN: lambda a, b: a.minimum(b),
    Fn.MAX: lambda a, b: a.maximum(b), Fn.WHERE: lambda c, a, b: a.where(c, b),
}  # fmt: skip
_REAL: dict[Fn, Any] = {
    Fn.DIV: lambda a, b: a / b, Fn.EXP: lambda a: a.exp(), Fn.LOG: lambda a: a.log(),
    Fn.SQRT: lambda a: a.sqrt(), Fn.RSQRT: lambda a: a.rsqrt(), Fn.TANH: lambda a: a.tanh(),
    Fn.SIGMOID: lambda a: a.sigmoid(), Fn.RELU: lambda a: a.relu(),
    Fn.SILU: lambda a: a * a.sigmoid(),
    Fn.SOFTPLUS: lambda a: a.relu() + (-a.abs()).exp().log1p(),  # torch's is x above 20
}  # fmt: skip


def apply(fn: Fn, xs: list[Data], dtype: torch.dtype) -> Data:
    """A function of already broadcast operands; whole numbers stay whole unless they meet a real.

    Args:
        fn: the function.
        xs: its operands.
        dtype: what real numbers are computed in.
    """
    result: Data
    if fn in _REAL:
        result = _REAL[fn](*(x.to(dtype) for x in xs))
        return result
    chosen = 1 if fn is Fn.WHERE else 0
    if any(x.is_floating_point() for x in xs[chosen:]):
        xs = [*xs[:chosen], *(x.to(dtype) for x in xs[chosen:])]
    result = _PLAIN[fn](*xs)
    return result
