"""Cutting an evaluation into blocks of one axis.

What works across the axis (a running sum, a value at the query's position) is evaluated on the
whole of it first and then cut; everything else is evaluated block by block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from attncc.dsl.graph import axes_of, children, walk
from attncc.dsl.interp import Env, Named, evaluate
from attncc.dsl.ir import (
    AtQuery,
    Between,
    Contract,
    Cumulative,
    Gather,
    Index,
    Node,
    Reduce,
    Select,
    Size,
    Softmax,
    Take,
    TopK,
)
from attncc.runtime.eager.named import narrow

BUDGET = 1 << 20
"""Elements of the largest value of a block on a CPU: 4 MB in fp32, which stays near its cache."""


def budget(device: torch.device) -> int:
    """Elements of the largest value of a block; on a GPU 64 MB in fp32."""
    return BUDGET if device.type == "cpu" else 16 * BUDGET


def crosses(node: Node, axis: str) -> bool:
    """Whether an element of a node needs other places of the axis than its own."""
    match node:
        case Contract(over=over) | Reduce(over=over):
            return axis in over
        case Softmax(over=over) | Cumulative(over=over) | TopK(over=over) | Gather(over=over):
            return axis == over
        case Take(over=over) | Select(over=over) | AtQuery(over=over) | Between(over=over):
            return axis == over
        case Size(axis=own) | Index(axis=own):
            return axis == own
        case _:
            return False


def holds_fold(roots: Iterable[Node]) -> set[Node]:
    """The nodes that contain a softmax or a top-k: the ones that must not be evaluated early."""
    found: set[Node] = set()
    for node in walk(*roots):
        if isinstance(node, (Softmax, TopK)) or any(c in found for c in children(node)):
            found.add(node)
    return found


def whole_nodes(roots: tuple[Node, ...], axis: str, folds: set[Node]) -> list[Node]:
    """The topmost nodes to evaluate before cutting: those across the axis, and those without it.

    Args:
        roots: what the blocks evaluate.
        axis: the axis that is cut.
        folds: nodes that are never evaluated early.
    """
    memo: dict[Node, tuple[str, ...]] = {}
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        early = crosses(node, axis) or axis not in axes_of(node, memo)
        if early and node not in folds:
            found[node] = None
        else:
            stack.extend(children(node))
    return list(found)


def block(env: Env, early: Iterable[Node], axis: str, start: int, length: int) -> Env:
    """The environment of a range of an axis.

    Args:
        env: the whole.
        early: nodes to evaluate in the whole and cut.
        axis: the axis.
        start: first place.
        length: number of places.
    """
    memo = {n: narrow(evaluate(n, env), axis, start, length) for n in early}
    inputs = {name: narrow(value, axis, start, length) for name, value in env.inputs.items()}
    offset = env.query_offset + (start if axis == "T" else 0)
    sizes = {**env.sizes, axis: length}
    return Env(sizes, inputs, env.dtype, env.device, query_offset=offset, memo=memo)


def largest(roots: tuple[Node, ...], sizes: Mapping[str, int], *, without: tuple[str, ...]) -> int:
    """Elements of the largest value under some roots per place of the axes left out."""
    memo: dict[Node, tuple[str, ...]] = {}
    known = dict(sizes)
    known.update({n.axis: n.k for n in walk(*roots) if isinstance(n, TopK)})
    found = 1
    for node in walk(*roots):
        axes = axes_of(node, memo)
        if set(without) <= set(axes):
            count = 1
            for axis in axes:
                count *= 1 if axis in without else max(known[axis], 1)
            found = max(found, count)
    return found


def between(node: Between, env: Env) -> Named:
    """Interval sums for a block of queries: reversed running sums, no differences.

    The memory is queries x history, where the interpreter's own form takes history x history.
    """
    value = evaluate(node.arg, env)
    axes = (*(a for a in value.axes if a != node.over), "T", node.over)
    x = value.aligned(axes).to(env.dtype)
    s = torch.arange(env.sizes[node.over], device=env.device)
    t = torch.arange(env.sizes["T"], device=env.device) + env.query_offset
    seen = s <= t.clamp(0, max(len(s) - 1, 0)).unsqueeze(-1)
    held = torch.where(seen, x, 0.0)
    sums = held.flip(-1).cumsum(-1).flip(-1)
    later = torch.nn.functional.pad(sums[..., 1:], (0, 1)) if len(s) else sums
    return Named(later, axes)
