"""The interpreter: what every node means, in fp64 (the oracle) or fp32.

It works on one dense batch of named tensors, one token at a time for scans, and rounds nowhere:
rounding happens where a caller stores a result. Nothing here is fast, and nothing here is shared
with the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import torch

from attncc.dsl.axes import Pattern, union
from attncc.dsl.graph import walk
from attncc.dsl.ir import (
    AtQuery,
    Between,
    Contract,
    Cumulative,
    Fn,
    Gather,
    Index,
    Input,
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
    Take,
    TopK,
)

Data = torch.Tensor


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor whose dimensions carry axis names."""

    data: Data
    axes: tuple[str, ...]

    def aligned(self, axes: tuple[str, ...]) -> Data:
        """The data with exactly these dimensions in this order (size 1 where the value has no such axis)."""
        order = [self.axes.index(a) for a in axes if a in self.axes]
        data = self.data.permute(order)
        for i, axis in enumerate(axes):
            if axis not in self.axes:
                data = data.unsqueeze(i)
        return data

    def select(self, axis: str, at: int) -> Named:
        """One position of an axis; the value itself if it has no such axis."""
        if axis not in self.axes:
            return self
        dim = self.axes.index(axis)
        return Named(self.data.select(dim, at), self.axes[:dim] + self.axes[dim + 1 :])


def unpack(tensor: Data, pattern: Pattern, sizes: Mapping[str, int]) -> Named:
    """Split grouped memory axes: a stored tensor as a named one."""
    shape = [sizes[a] for a in pattern.axes]
    return Named(tensor.reshape(shape), pattern.axes)


def pack(value: Named, pattern: Pattern, sizes: Mapping[str, int]) -> Data:
    """Lay a named value out as a pattern says (axes it lacks are broadcast)."""
    data = value.aligned(pattern.axes).expand([sizes[a] for a in pattern.axes])
    return data.reshape([_product(sizes, dim) for dim in pattern.dims])


def _product(sizes: Mapping[str, int], names: tuple[str, ...]) -> int:
    n = 1
    for name in names:
        n *= sizes[name]
    return n


@dataclass(slots=True)
class Env:
    """What a body is evaluated in."""

    sizes: Mapping[str, int]
    inputs: Mapping[str, Named]
    dtype: torch.dtype
    device: torch.device
    query_offset: int = 0  # absolute position of T = 0
    token: int = 0  # absolute position of the scan's token
    own_history: bool = True
    memo: dict[Node, Named] = field(default_factory=dict)


def _real(x: Data, env: Env) -> Data:
    return x if x.dtype == env.dtype else x.to(env.dtype)


def _map(node: Map, env: Env) -> Named:
    values = [evaluate(a, env) for a in node.args]
    axes = union(*(v.axes for v in values))
    xs = [v.aligned(axes) for v in values]
    return Named(_apply(node.fn, xs, env), axes)


_PLAIN = {
    Fn.ADD: torch.add,
    Fn.SUB: torch.sub,
    Fn.MUL: torch.mul,
    Fn.NEG: torch.neg,
    Fn.ABS: torch.abs,
    Fn.LT: torch.lt,
    Fn.LE: torch.le,
    Fn.GT: torch.gt,
    Fn.GE: torch.ge,
    Fn.EQ: torch.eq,
    Fn.NE: torch.ne,
    Fn.AND: torch.logical_and,
    Fn.OR: torch.logical_or,
    Fn.NOT: torch.logical_not,
    Fn.MIN: torch.minimum,
    Fn.MAX: torch.maximum,
    Fn.WHERE: torch.where,
}
_REAL = {
    Fn.DIV: torch.div,
    Fn.EXP: torch.exp,
    Fn.LOG: torch.log,
    Fn.SQRT: torch.sqrt,
    Fn.RSQRT: torch.rsqrt,
    Fn.TANH: torch.tanh,
    Fn.SIGMOID: torch.sigmoid,
    Fn.RELU: torch.relu,
    Fn.SILU: torch.nn.functional.silu,
    Fn.SOFTPLUS: torch.nn.functional.softplus,
}


def _apply(fn: Fn, xs: list[Data], env: Env) -> Data:
    if fn in _REAL:
        xs = [_real(x, env) for x in xs]
        if fn is Fn.SOFTPLUS:  # torch switches to the identity above 20: exact log1p form instead
            return torch.relu(xs[0]) + torch.log1p(torch.exp(-xs[0].abs()))
        return _REAL[fn](*xs)
    values = xs[1:] if fn is Fn.WHERE else xs
    if fn not in (Fn.AND, Fn.OR, Fn.NOT) and any(x.is_floating_point() for x in values):
        values = [_real(x, env) for x in values]
    xs = [xs[0], *values] if fn is Fn.WHERE else values
    return _PLAIN[fn](*xs)


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
    dims = [value.axes.index(a) for a in node.over]
    kept = tuple(a for a in value.axes if a not in node.over)
    data = _real(value.data, env)
    match node.red:
        case Red.SUM:
            return Named(data.sum(dims), kept)
        case Red.MAX:
            return Named(data.amax(dims), kept)
        case Red.MIN:
            return Named(data.amin(dims), kept)
        case _:
            assert_never(node.red)


@dataclass(frozen=True, slots=True)
class SoftmaxParts:
    """Masked weights exp(score - m), the shared maximum and the sum, sink included."""

    weight: Data
    m: Data
    total: Data
    axes: tuple[str, ...]  # of weight; the softmax axis is last, size 1 in m and total


def softmax_parts(node: Softmax, env: Env) -> SoftmaxParts:
    """Evaluate a softmax with the contract's rules: masked weight 0, empty rows total 0 and m -inf."""
    score = evaluate(node.score, env)
    mask = evaluate(node.where, env) if node.where is not None else None
    axes = union(score.axes, mask.axes if mask is not None else ())
    axes = (*(a for a in axes if a != node.over), node.over)
    x = _real(score.aligned(axes), env).expand([env.sizes[a] for a in axes])
    seen = None if mask is None else mask.aligned(axes).expand(x.shape)
    if seen is not None:
        x = torch.where(seen, x, -torch.inf)
    m = x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -torch.inf)
    sink = None
    if node.sink is not None:
        sink = _real(evaluate(node.sink, env).aligned(axes), env)
        m = torch.maximum(m, sink)
    base = torch.where(m == -torch.inf, 0.0, m)
    weight = torch.exp(x - base)
    if seen is not None:
        weight = torch.where(seen, weight, 0.0)
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - base)
    return SoftmaxParts(weight, m, total, axes)


def lse(node: Softmax, env: Env) -> Named:
    """Natural-log sum of exponentials of a softmax, -inf for a row that sees nothing."""
    parts = softmax_parts(node, env)
    value = torch.where(parts.total == 0, -torch.inf, parts.m + torch.log(parts.total))
    return Named(value.squeeze(-1), parts.axes[:-1])


def _softmax(node: Softmax, env: Env) -> Named:
    parts = softmax_parts(node, env)
    return Named(torch.where(parts.total == 0, 0.0, parts.weight / parts.total), parts.axes)


def _topk(node: TopK, env: Env) -> Named:
    score = evaluate(node.score, env)
    mask = evaluate(node.where, env) if node.where is not None else None
    axes = union(score.axes, mask.axes if mask is not None else ())
    axes = (*(a for a in axes if a != node.over), node.over)
    shape = [env.sizes[a] for a in axes]
    x = _real(score.aligned(axes), env).expand(shape) + 0.0
    seen = torch.ones_like(x, dtype=torch.bool)
    if mask is not None:
        seen = mask.aligned(axes).expand(shape)
    order = torch.arange(shape[-1], device=env.device).expand(shape)
    # least significant key first, each pass stable: index, score, NaN, visibility
    value = torch.where(torch.isnan(x), -torch.inf, x)
    for key in (-value, torch.isnan(x).to(torch.int8), (~seen).to(torch.int8)):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    order = order[..., : node.k]
    picked = torch.where(seen.gather(-1, order), order, -1)
    short = node.k - picked.shape[-1]
    if short > 0:
        picked = torch.nn.functional.pad(picked, (0, short), value=-1)
    return Named(picked, (*axes[:-1], node.axis))


def _gather(node: Gather, env: Env) -> Named:
    value, index = evaluate(node.arg, env), evaluate(node.index, env)
    rest = tuple(a for a in value.axes if a != node.over)
    axes = union(index.axes, rest)
    return _lookup(value, node.over, index, axes, zero_below=True)


def _lookup(
    value: Named, over: str, index: Named, axes: tuple[str, ...], *, zero_below: bool
) -> Named:
    sizes = dict(zip(value.axes, value.data.shape, strict=True))
    sizes.update(zip(index.axes, index.data.shape, strict=True))
    shape = [sizes[a] for a in axes]
    at = index.aligned(axes).expand(shape).long()
    length = sizes[over]
    if not length:
        return Named(value.data.new_zeros(shape), axes)
    data = value.aligned((*axes, over)).expand([*shape, length])
    picked = data.gather(-1, at.clamp(0, length - 1).unsqueeze(-1)).squeeze(-1)
    return Named(torch.where(at < 0, 0, picked) if zero_below else picked, axes)


def _take(node: Take, env: Env) -> Named:
    table, index = evaluate(node.table, env), evaluate(node.index, env)
    axes = union(index.axes, (a for a in table.axes if a != node.over))
    return _lookup(table, node.over, index, axes, zero_below=False)


def _positions(axis: str, env: Env) -> Data:
    start = env.query_offset if axis == "T" else 0
    return torch.arange(start, start + env.sizes[axis], device=env.device)


def _at_query(node: AtQuery, env: Env) -> Named:
    value = evaluate(node.arg, env)
    at = Named(_positions("T", env), ("T",))
    axes = tuple("T" if a == node.over else a for a in value.axes)
    return _lookup(value, node.over, at, axes, zero_below=False)


def _between(node: Between, env: Env) -> Named:
    value = evaluate(node.arg, env)
    axes = (*(a for a in value.axes if a != node.over), node.over)
    x = _real(value.aligned(axes), env)
    s = _positions(node.over, env)
    after = torch.where(s[None, :] > s[:, None], x.unsqueeze(-2), 0.0).cumsum(-1)  # [.., s, j]
    at = _positions("T", env).clamp(0, max(len(s) - 1, 0))
    return Named(after[..., at], (*axes, "T"))


def _push(node: Push, env: Env) -> Named:
    window, row = evaluate(node.window, env), evaluate(node.row, env)
    axes = (*(a for a in union(window.axes, row.axes) if a != node.over), node.over)
    kept = window.aligned(axes)
    new = row.aligned(axes)
    shape = torch.broadcast_shapes(kept.shape[:-1], new.shape[:-1])
    kept, new = kept.expand(*shape, kept.shape[-1]), new.expand(*shape, 1)
    return Named(torch.cat([_real(kept, env), _real(new, env)], -1), axes)


def _cumulative(node: Cumulative, env: Env) -> Named:
    value = evaluate(node.arg, env)
    return Named(_real(value.data, env).cumsum(value.axes.index(node.over)), value.axes)


def _leaf(node: Input | Lit | Size | Index, env: Env) -> Named:
    match node:
        case Input(name=name):
            return env.inputs[name]
        case Lit(value=value):
            dtype = env.dtype if isinstance(value, float) else None
            return Named(torch.tensor(value, dtype=dtype, device=env.device), ())
        case Size(axis=axis):
            return Named(torch.tensor(env.sizes[axis], device=env.device), ())
        case Index(axis=axis, scalar=scalar):
            if scalar:
                return Named(torch.tensor(env.token, device=env.device), ())
            return Named(_positions(axis, env), (axis,))


def evaluate(node: Node, env: Env) -> Named:
    """The value of a node; each shared node is computed once per environment."""
    found = env.memo.get(node)
    if found is None:
        found = env.memo[node] = _evaluate(node, env)
    return found


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
        case Cumulative():
            return _cumulative(node, env)
        case TopK():
            return _topk(node, env)
        case Gather():
            return _gather(node, env)
        case Take():
            return _take(node, env)
        case Select(arg=arg, over=axis, at=at):
            return evaluate(arg, env).select(axis, at)
        case AtQuery():
            return _at_query(node, env)
        case Between():
            return _between(node, env)
        case Push():
            return _push(node, env)
        case _:
            assert_never(node)


@dataclass(frozen=True, slots=True)
class Result:
    """Unrounded results in the compute dtype, laid out by their patterns."""

    states: dict[str, Data]
    outputs: dict[str, Data]
    lse: Data | None = None  # axes of lse_axes, only on request and for one softmax
    lse_axes: tuple[str, ...] = ()


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
        tensors: each present input in its pattern's layout (states included), host scalars as
        numbers. sizes: the size of every axis. dtype: fp64 or fp32; everything is computed in it.
        return_lse: also give the natural-log lse of the op's softmax. position: absolute position
        of the first token of a scan.
    """
    device = next((t.device for t in tensors.values() if isinstance(t, Data)), torch.device("cpu"))
    named: dict[str, Named] = {}
    for t in program.tensors:
        if t.name not in tensors:
            continue
        value = tensors[t.name]
        if not isinstance(value, Data):
            named[t.name] = Named(torch.tensor(value, dtype=dtype, device=device), ())
            continue
        held = dict(sizes)
        if t.lifetime is Lifetime.WINDOW:
            axis = _window_axis(program, t.name)
            held[axis] = sizes[axis] - 1
        data = value.to(dtype) if value.is_floating_point() else value
        named[t.name] = unpack(data, t.pattern, held)
    if program.scan is not None:
        return _scan(program, named, sizes, dtype, device, position)
    offset = (
        sizes["S"] - sizes["T"] if program.history_axis and "S" in sizes and "T" in sizes else 0
    )
    env = Env(sizes, named, dtype, device, query_offset=offset)
    outputs = {o.name: pack(evaluate(o.value, env), o.pattern, sizes) for o in program.outputs}
    if not return_lse:
        return Result({}, outputs)
    (node,) = {n for n in walk(*program.roots) if isinstance(n, Softmax)}
    value = lse(node, env)
    return Result({}, outputs, value.data, value.axes)


def _window_axis(program: Program, name: str) -> str:
    for node in walk(*program.roots):
        if isinstance(node, Push) and isinstance(node.window, Input) and node.window.name == name:
            return node.over
    raise KeyError(name)


def _scan(
    program: Program, named: dict[str, Named], sizes: Mapping[str, int], dtype: torch.dtype,
    device: torch.device, position: int,
) -> Result:  # fmt: skip
    assert program.scan is not None
    steps: dict[str, list[Data]] = {o.name: [] for o in program.outputs}
    patterns = {o.name: o.pattern.without(program.scan) for o in program.outputs}
    for t in range(sizes[program.scan]):
        inputs = {name: value.select(program.scan, t) for name, value in named.items()}
        env = Env(sizes, inputs, dtype, device, token=position + t)
        for o in program.outputs:
            step = evaluate(o.value, env)
            axes = patterns[o.name].axes
            steps[o.name].append(step.aligned(axes).expand([sizes[a] for a in axes]))
        new = {s.name: evaluate(s.value, env) for s in program.states}
        for name, value in new.items():
            axes = program.tensor(name).pattern.axes
            data = value.aligned(axes)
            if program.tensor(name).lifetime is Lifetime.WINDOW:
                dim = axes.index(_window_axis(program, name))
                data = data.narrow(dim, 1, data.shape[dim] - 1)
            shape = named[name].data.shape if name in named else data.shape
            named[name] = Named(data.expand(shape), axes)
    states = {s.name: named[s.name].data.clone() for s in program.states}
    for name, data in states.items():
        p = program.tensor(name).pattern
        states[name] = data.reshape([_dim_size(data, p, d) for d in range(p.rank)])
    outputs = {}
    for o in program.outputs:
        axes = patterns[o.name].axes
        shape = [sizes[a] for a in axes]
        rows = steps[o.name]
        data = torch.stack(rows) if rows else torch.zeros([0, *shape], dtype=dtype, device=device)
        outputs[o.name] = pack(Named(data, (program.scan, *axes)), o.pattern, sizes)
    return Result(states, outputs)


def _dim_size(data: Data, pattern: Pattern, dim: int) -> int:
    at = sum(len(d) for d in pattern.dims[:dim])
    n = 1
    for i in range(len(pattern.dims[dim])):
        n *= data.shape[at + i]
    return n
