"""What a declaration is written with; the names ``attncc`` re-exports."""

from attncc.dsl.build import Declaration, op
from attncc.dsl.compose import layer
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
    l2norm,
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
from attncc.dsl.signature import Activation, Cache, Memory, Param, State, Window, flag, param
from attncc.dsl.types import Value

__all__ = [
    "Activation", "Cache", "Declaration", "Memory", "Param", "State", "Value", "Window", "amax",
    "amin", "at_query", "between", "causal", "cumsum", "dot", "eq", "exp", "flag", "index",
    "l2norm", "layer", "log", "maximum", "minimum", "op", "param", "push", "relu", "rsqrt",
    "sigmoid", "silu", "size", "softmax", "softplus", "sqrt", "sum", "take", "tanh", "topk",
    "unroll", "where",
]  # fmt: skip
