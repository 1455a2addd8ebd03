"""What a declaration is written with; the names ``attncc`` re-exports."""

from attncc.dsl.build import Activation, Cache, Declaration, Memory, Param, State, Window, op, param
from attncc.dsl.functions import (
    amax,
    amin,
    at_query,
    between,
    causal,
    cumsum,
    dot,
    eq,
    exp,
    index,
    log,
    maximum,
    minimum,
    push,
    relu,
    rsqrt,
    sigmoid,
    silu,
    size,
    softmax,
    softplus,
    sqrt,
    sum,
    take,
    tanh,
    topk,
    unroll,
    where,
)
from attncc.dsl.types import Value

__all__ = [
    "Activation", "Cache", "Declaration", "Memory", "Param", "State", "Value", "Window", "amax",
    "amin", "at_query", "between", "causal", "cumsum", "dot", "eq", "exp", "index", "log",
    "maximum", "minimum", "op", "param", "push", "relu", "rsqrt", "sigmoid", "silu", "size",
    "softmax", "softplus", "sqrt", "sum", "take", "tanh", "topk", "unroll", "where",
]  # fmt: skip
