"""The interpreter's evaluator, stopping at values that are there already.

``Env.memo`` may hold values put in from outside (a fold's result, a piece of a larger value): what
lies below them is then not evaluated, and need not be possible to evaluate.
"""

from __future__ import annotations

from attncc.dsl.graph import children
from attncc.dsl.interp import Env, Named
from attncc.dsl.interp import _evaluate as evaluate_one
from attncc.dsl.ir import Node


def evaluate(node: Node, env: Env) -> Named:
    """The value of a node; nothing below a remembered value is looked at."""
    stack = [node]
    while stack:
        top = stack[-1]
        missing = [] if top in env.memo else [c for c in children(top) if c not in env.memo]
        stack.extend(missing)
        if not missing:
            stack.pop()
            if top not in env.memo:
                env.memo[top] = evaluate_one(top, env)
    return env.memo[node]
