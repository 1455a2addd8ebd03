"""The interpreter: what every node means, in fp64 (the oracle) or fp32.

It works on one dense batch of named tensors, one token at a time for scans, and rounds nowhere:
rounding happens where a caller stores a result. Nothing here is fast, and nothing here is shared
with the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from typing import assert_never

import torch

from attncc.dsl.axes import union
from attncc.dsl.elementwise import apply
from attncc.dsl.errors import ArgumentError
from attncc.dsl.facts import check_traced, only_softmax, query_offset, stored_sizes, window_axis
from attncc.dsl.graph import children, walk
from attncc.dsl.ir import (
    AtQuery,
    Between,
    Contract,
    Cumulative,
    Gather,
    Index,
    Input,
    Kind,
    Lifetime,
    Lit,
    Map,
    Node,
    Program,
    Push,
    Red,
    Reduce,
    Select,
    Size,
    Softmax,
    StateUpdate,
    Take,
    TopK,
)
from attncc.dsl.masked import best, weights
from attncc.dsl.named import Env, Named, Result, SoftmaxParts, extents, lookup, pack, unpack

__all__ = [
    "Env", "Named", "Result", "SoftmaxParts", "evaluate", "interpret", "lse", "pack",
    "softmax_parts", "unpack",
]  # fmt: skip

Data = torch.Tensor


# --- nodes ----------------------------------------------------------------------------------------


def _real(x: Data, env: Env) -> Data:
    return x if x.dtype == env.dtype else x.to(env.dtype)


def _map(node: Map, env: Env) -> Named:
    values = [evaluate(a, env) for a in node.args]
    axes = union(*(v.axes for v in values))
    return Named(apply(node.fn, [v.aligned(axes) for v in values], env.dtype), axes)


def _contract(node: Contract, env: Env) -> Named:
    values = [evaluate(a, env) for a in node.args]
    axes = union(*(v.axes for v in values))
    letter = {a: chr(ord("a") + i) for i, a in enumerate(axes)}
    kept = tuple(a for a in axes if a not in node.over)
    spec = ",".join("".join(letter[a] for a in v.axes) for v in values)
    spec += "->" + "".join(letter[a] for a in kept)
    return Named(torch.einsum(spec, *(_real(v.data, env) for v in values)), kept)


def _reduce(node: Reduce, env: Env) -> Named:
    value = evaluate(node.arg, env)
    kept = tuple(a for a in value.axes if a not in node.over)
    data = _real(value.aligned((*kept, *node.over)), env).flatten(len(kept))
    match node.red:
        case Red.SUM:
            return Named(data.sum(-1), kept)
        case Red.MAX:  # of nothing: -inf
            return Named(torch.nn.functional.pad(data, (0, 1), value=-torch.inf).amax(-1), kept)
        case Red.MIN:
            return Named(torch.nn.functional.pad(data, (0, 1), value=torch.inf).amin(-1), kept)
        case _:
            assert_never(node.red)


def _history(
    node: Softmax | TopK, env: Env, *more: Named | None
) -> tuple[Data, list[Data | None], tuple[str, ...]]:
    """The score with the folded axis last, and other operands broadcast to its rows."""
    score = evaluate(node.score, env)
    given = [score, *(v for v in more if v is not None)]
    axes = union(*(v.axes for v in given))
    axes = (*(a for a in axes if a != node.over), node.over)
    x = _real(score.aligned(axes), env).expand(extents(axes, *given))
    return x, [None if v is None else v.aligned(axes) for v in more], axes


def softmax_parts(node: Softmax, env: Env) -> SoftmaxParts:
    """Evaluate a softmax: a masked weight is 0, an empty row has total 0 and m -inf."""
    where = None if node.where is None else evaluate(node.where, env)
    x, (seen, sink), axes = _history(node, env, where, _beside(node, env))
    weight, m, total = weights(
        x,
        None if seen is None else seen.expand(x.shape),
        None if sink is None else _real(sink, env).expand(*x.shape[:-1], 1),
    )
    return SoftmaxParts(weight, m, total, axes)


def _beside(node: Softmax, env: Env) -> Named | None:
    """Everything else in the sum of exponentials, as one logit: the sink, the other histories."""
    logits = [] if node.sink is None else [evaluate(node.sink, env)]
    logits += [lse(other, env) for other in node.beside]
    if not logits:
        return None
    axes = union(*(v.axes for v in logits))
    return Named(reduce(torch.logaddexp, (_real(v.aligned(axes), env) for v in logits)), axes)


def lse(node: Softmax, env: Env) -> Named:
    """Natural-log sum of exponentials of a softmax, -inf for a row that sees nothing."""
    parts = softmax_parts(node, env)
    value = torch.where(parts.total == 0, -torch.inf, parts.m + torch.log(parts.total))
    return Named(value.squeeze(-1), parts.axes[:-1])


def _softmax(node: Softmax, env: Env) -> Named:
    parts = softmax_parts(node, env)
    data = torch.where(parts.total == 0, 0.0, parts.weight / parts.total)
    if node.where is not None:  # also in a row that holds a NaN
        seen = evaluate(node.where, env).aligned(parts.axes)
        data = torch.where(seen, data, 0.0)
    return Named(data, parts.axes)


def _topk(node: TopK, env: Env) -> Named:
    where = None if node.where is None else evaluate(node.where, env)
    x, (seen,), axes = _history(node, env, where)
    visible = torch.ones_like(x, dtype=torch.bool) if seen is None else seen.expand(x.shape)
    return Named(best(x, visible, node.k), (*axes[:-1], node.axis))


def _positions(axis: str, env: Env) -> Data:
    start = env.query_offset if axis == "T" else 0
    return torch.arange(start, start + env.sizes[axis], device=env.device)


def _between(node: Between, env: Env) -> Named:
    """Each interval is summed by itself: a difference of running sums would be NaN at -inf."""
    value = evaluate(node.arg, env)
    axes = (*(a for a in value.axes if a not in (node.over, "T")), "T", node.over)
    x = _real(value.aligned(axes), env).unsqueeze(-2)  # [.., t, 1, j]
    s = _positions(node.over, env)
    inside = (s > s[:, None]) & (s <= _positions("T", env)[:, None, None])  # [t, s, j]
    return Named(torch.where(inside, x, 0.0).sum(-1), axes)


def _push(node: Push, env: Env) -> Named:
    window, row = evaluate(node.window, env), evaluate(node.row, env)
    axes = (*(a for a in union(window.axes, row.axes) if a != node.over), node.over)
    shape = extents(axes[:-1], window, row)
    kept = _real(window.aligned(axes), env).expand(*shape, -1)
    return Named(torch.cat([kept, _real(row.aligned(axes), env).expand(*shape, 1)], -1), axes)


def _leaf(node: Input | Lit | Size | Index, env: Env) -> Named:
    match node:
        case Input(name=name):
            return env.inputs[name]
        case Lit(value=value):
            dtype = env.dtype if isinstance(value, float) else None
            return Named(torch.tensor(value, dtype=dtype, device=env.device), ())
        case Size(axis=axis):
            return Named(torch.tensor(env.sizes[axis], device=env.device), ())
        case Index(scalar=True):
            return Named(torch.tensor(env.token, device=env.device), ())
        case Index(axis=axis):
            return Named(_positions(axis, env), (axis,))


def evaluate(node: Node, env: Env) -> Named:
    """The value of a node; each shared node is computed once per environment.

    ``env.memo`` may hold values put in from outside (a fold's result, a piece of a larger value):
    what lies below them is not looked at, and need not be possible to evaluate.
    """
    stack = [node]  # operands first, so that deep programs need no deep Python stack
    while stack:
        top = stack[-1]
        missing = [] if top in env.memo else [c for c in children(top) if c not in env.memo]
        stack.extend(missing)
        if not missing:
            stack.pop()
            if top not in env.memo:
                env.memo[top] = _evaluate(top, env)
    return env.memo[node]


def _evaluate(node: Node, env: Env) -> Named:  # noqa: C901 - one arm a node kind
    match node:
        case Input() | Lit() | Size() | Index():
            return _leaf(node, env)
        case Map():
            return _map(node, env)
        case Contract():
            return _contract(node, env)
        case Reduce():
            return _reduce(node, env)
        case Softmax():
            return _softmax(node, env)
        case Cumulative(arg=arg, over=axis):
            value = evaluate(arg, env)
            return Named(_real(value.data, env).cumsum(value.axes.index(axis)), value.axes)
        case TopK():
            return _topk(node, env)
        case Gather(arg=arg, index=index, over=axis):
            return lookup(evaluate(arg, env), axis, evaluate(index, env), zero_below=True)
        case Take(table=table, index=index, over=axis):
            return lookup(evaluate(table, env), axis, evaluate(index, env), zero_below=False)
        case Select(arg=arg, over=axis, at=place):
            return evaluate(arg, env).select(axis, place)
        case AtQuery(arg=arg, over=axis):
            at = Named(_positions("T", env), ("T",))
            return lookup(evaluate(arg, env), axis, at, zero_below=False)
        case Between():
            return _between(node, env)
        case Push():
            return _push(node, env)
        case _:
            assert_never(node)


# --- whole programs -------------------------------------------------------------------------------


def interpret(
    program: Program,
    tensors: Mapping[str, Data | float],
    sizes: Mapping[str, int],
    *,
    dtype: torch.dtype = torch.float64,
    return_lse: bool = False,
    position: int = 0,
) -> Result:
    """Run a program on dense tensors.

    Args:
        program: the traced declaration.
        tensors: each present input in its pattern's layout, host scalars as numbers. A state that
            is not there starts at zero. Whole numbers (ids) stay whole.
        sizes: the size of every axis; a window's axis counts the rows in the body, one more than
            are kept.
        dtype: fp64 or fp32; everything is computed in it.
        return_lse: also give the natural-log lse of the op's softmax.
        position: absolute position of the first token of a scan.

    Raises:
        ArgumentError: an input that the program reads is missing.
        RankError, SizeError: a tensor that does not fit its pattern, or an unrolled axis whose
            size is not the traced one.
        RefusedError: lse of a program that does not have exactly one softmax.
    """
    device = next((t.device for t in tensors.values() if isinstance(t, Data)), torch.device("cpu"))
    sizes = {**sizes, **{n.axis: n.k for n in walk(*program.roots) if isinstance(n, TopK)}}
    check_traced(program, sizes)
    env = Env(sizes, {}, dtype, device, query_offset(program, sizes), position)
    env.inputs = dict(_named(program, tensors, env))
    softmax = only_softmax(program) if return_lse else None
    return _whole(program, env, softmax) if program.scan is None else _scan(program, env)


def _named(
    program: Program, tensors: Mapping[str, Data | float], env: Env
) -> Iterator[tuple[str, Named]]:
    read = {n.name for n in walk(*program.roots) if isinstance(n, Input)}
    for t in program.tensors:
        carried = t.lifetime in (Lifetime.STATE, Lifetime.WINDOW)
        value = tensors.get(t.name)
        if value is None:
            if carried:
                shape = [stored_sizes(program, t, env.sizes)[a] for a in t.pattern.axes]
                zero = torch.zeros(shape, dtype=env.dtype, device=env.device)
                yield t.name, Named(zero, t.pattern.axes)
            elif t.name in read:
                raise ArgumentError(
                    "an input that the program reads is missing", op=program.name, argument=t.name
                )
        elif not isinstance(value, Data):
            dtype = torch.int64 if t.kind is Kind.INT else env.dtype
            yield t.name, Named(torch.tensor(value, dtype=dtype, device=env.device), ())
        else:
            whole = not (value.is_floating_point() or value.dtype == torch.bool or carried)
            data = value if whole else value.to(env.dtype)
            yield t.name, unpack(data, t.pattern, stored_sizes(program, t, env.sizes))


def _whole(program: Program, env: Env, softmax: Softmax | None) -> Result:
    outputs = {o.name: pack(evaluate(o.value, env), o.pattern, env.sizes) for o in program.outputs}
    value = None if softmax is None else lse(softmax, env)
    return Result({}, outputs) if value is None else Result({}, outputs, value.data, value.axes)


def _scan(program: Program, env: Env) -> Result:
    assert program.scan is not None
    steps: dict[str, list[Data]] = {o.name: [] for o in program.outputs}
    now = dict(env.inputs)
    for t in range(env.sizes[program.scan]):
        token = {name: value.select(program.scan, t) for name, value in now.items()}
        step = replace(env, inputs=token, token=env.token + t, memo={})
        for o in program.outputs:
            axes = o.pattern.without(program.scan).axes
            data = evaluate(o.value, step).aligned(axes)
            steps[o.name].append(data.expand([env.sizes[a] for a in axes]))
        now |= {s.name: _carried(program, s, step) for s in program.states}
    outputs = {}
    for o in program.outputs:
        axes = o.pattern.without(program.scan).axes
        none = torch.zeros([0, *(env.sizes[a] for a in axes)], dtype=env.dtype, device=env.device)
        data = torch.stack(steps[o.name]) if steps[o.name] else none
        outputs[o.name] = pack(Named(data, (program.scan, *axes)), o.pattern, env.sizes)
    held = {s.name: program.tensor(s.name) for s in program.states}
    shapes = {name: stored_sizes(program, t, env.sizes) for name, t in held.items()}
    states = {name: pack(now[name], t.pattern, shapes[name]) for name, t in held.items()}
    return Result({name: data.clone() for name, data in states.items()}, outputs)


def _carried(program: Program, update: StateUpdate, env: Env) -> Named:
    """A state after a token; a window drops its oldest row."""
    axes = program.tensor(update.name).pattern.axes
    data = _real(evaluate(update.value, env).aligned(axes), env)
    if program.tensor(update.name).lifetime is Lifetime.WINDOW:
        dim = axes.index(window_axis(program, update.name))
        data = data.narrow(dim, 1, data.shape[dim] - 1)
    return Named(data, axes)
