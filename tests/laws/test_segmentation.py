"""Segmentation invariance: however a sequence is cut, the result is the same.

whole = pieces = token by token = beside bad neighbours = in pages = in a pool = split in two.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl.axes import Pattern
from attncc.dsl.interp import pack, unpack
from attncc.dsl.ir import Lifetime
from attncc.runtime.eager import affine
from tests.drawn.bounds import as_dict, hold, magnitude
from tests.drawn.calls import Point, arguments, offsets, values
from tests.drawn.known import Known
from tests.drawn.source import Drawn
from tests.examples import examples
from tests.runtime import eager_ops as ops
from tests.runtime.eager_ops import call_of
from tests.strategies_ops import folds, randoms, scans

Op = Drawn | Known
Tensors = dict[str, Any]
Results = dict[str, torch.Tensor]

FOLDS = [
    Known(ac.ops.attention, (("Hkv", 2), ("G", 3), ("D", 8), ("E", 5))),
    Known(ops.soft_cap, (("Hkv", 1), ("G", 2), ("D", 4), ("E", 4))),
    Known(ops.sink_window, (("Hkv", 2), ("G", 1), ("D", 8), ("E", 8))),
    Known(ops.documents, (("H", 2), ("D", 4))),
    Known(ops.forgetting, (("H", 2), ("D", 4))),
    Known(ops.difference, (("H", 2), ("D", 4), ("E", 3))),
]
SCANS = [
    Known(ac.ops.gated_delta_rule, (("Hk", 2), ("G", 2), ("K", 8), ("V", 5))),
    Known(ops.delta_product, (("N", 3), ("H", 2), ("K", 6), ("V", 4))),
    Known(ops.kda, (("H", 2), ("K", 5), ("V", 4))),
    Known(ops.rwkv7, (("H", 2), ("K", 5), ("V", 4)), (("w", "gate"), ("a", "unit"))),
    Known(ops.two_slots, (("H", 2), ("K", 5), ("V", 4)), (("c", "coef"),)),
    Known(ops.retention, (("H", 1), ("G", 2), ("K", 4), ("V", 4))),
]
BATCH = 2


# --- a sequence and its parts ---------------------------------------------------------------------


def layout(op: Op, name: str) -> tuple[Pattern, str | None]:
    """Memory axes of an argument, and its axis of rows."""
    tensor = next(t for t in op.op.declaration.tensors if t.name == name)
    return tensor.pattern, next((a for a in ("T", "S") if a in tensor.pattern.axes), None)


def part(op: Op, kwargs: Tensors, low: int, high: int, tokens: int) -> Tensors:
    """Rows ``low .. high`` of everything that has rows."""
    found = {}
    for name, x in kwargs.items():
        pattern, axis = layout(op, name)
        if axis is not None:
            dim = pattern.dim_of(axis)
            each = x.shape[dim] // tokens
            x = x.narrow(dim, low * each, (high - low) * each)
        found[name] = x
    return found


def joined(op: Op, outs: Sequence[Results], states: Results) -> Results:
    """Outputs end to end along T, and the last states."""
    patterns = dict(op.op.declaration.outputs)
    found = {n: torch.cat([o[n] for o in outs], p.dim_of("T")) for n, p in patterns.items()}
    return found | states


def states_of(op: Op) -> list[str]:
    held = (Lifetime.STATE, Lifetime.WINDOW)
    return [t.name for t in op.op.declaration.tensors if t.lifetime in held]


def only_outputs(op: Op, result: object) -> Results:
    named = as_dict(result)
    (first, *_) = (n for n, _ in op.op.declaration.outputs)
    named = {first: named["o"]} if named.keys() == {"o"} else named
    return {n: x for n, x in named.items() if n in dict(op.op.declaration.outputs)}


def drawn_cuts(r: Random, tokens: int) -> list[int]:
    edges = sorted(r.randint(0, tokens) for _ in range(3))
    return [b - a for a, b in pairwise([0, *edges, tokens])]


def spoiled(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.nan) if x.is_floating_point() else x


# --- ways to cut ----------------------------------------------------------------------------------


def in_pieces(op: Op, kwargs: Tensors, tokens: int, cuts: Sequence[int], cache: Any) -> Results:
    """Pieces through a cache, or carried by the states."""
    outs, held, at = [], {}, 0
    names = states_of(op)
    for n in cuts:
        more = {"cache": cache} if cache is not None else {}
        piece = part(op, kwargs, at, at + n, tokens) | held
        result = op.op(**piece, **more, sizes=dict(op.sizes), backend="torch")
        held = {name: as_dict(result)[name] for name in names}
        outs.append(only_outputs(op, result))
        at += n
    return joined(op, outs, held)


def dense_cache(op: Op, kwargs: Tensors, tokens: int) -> Any:
    if op.scan:
        return None
    held = {}
    for t in op.op.declaration.tensors:
        if t.lifetime is Lifetime.CACHE:
            x = kwargs[t.name]
            shape = list(x.shape)
            shape[t.pattern.dim_of("S")] = tokens + 3
            held[t.name] = spoiled(x.new_zeros(shape))
    return ac.DenseCache(held, torch.zeros(BATCH, dtype=torch.int32))


def paged_cache(op: Op, kwargs: Tensors, tokens: int, r: Random) -> Any:
    page = r.choice((1, 4, 16))
    each = -(-tokens // page) + 1
    spare = r.choice((0, 3))
    table = torch.randperm(
        BATCH * each + spare, generator=torch.Generator().manual_seed(r.randint(0, 9999))
    )[: BATCH * each].int().view(BATCH, each)  # fmt: skip
    held = {}
    for t in op.op.declaration.tensors:
        if t.lifetime is Lifetime.CACHE:
            x, shape = kwargs[t.name], list(kwargs[t.name].shape)
            shape[t.pattern.dim_of("B")] = BATCH * each + spare
            shape[t.pattern.dim_of("S")] = page
            held[t.name] = spoiled(x.new_zeros(shape))
    return ac.PagedCache(held, table, torch.zeros(BATCH, dtype=torch.int32))


def pieces(op: Op, kwargs: Tensors, tokens: int, r: Random) -> Results:
    return in_pieces(op, kwargs, tokens, drawn_cuts(r, tokens), dense_cache(op, kwargs, tokens))


def token_by_token(op: Op, kwargs: Tensors, tokens: int, r: Random) -> Results:
    return in_pieces(op, kwargs, tokens, [1] * tokens, dense_cache(op, kwargs, tokens))


def in_pages(op: Op, kwargs: Tensors, tokens: int, r: Random) -> Results:
    return in_pieces(op, kwargs, tokens, drawn_cuts(r, tokens), paged_cache(op, kwargs, tokens, r))


def beside_neighbours(op: Op, kwargs: Tensors, tokens: int, r: Random) -> Results:
    """Each sequence packed between two that hold NaN, and empty ones."""
    lengths = [r.choice((1, 5)), tokens, 0, tokens, r.choice((0, 3))]
    own = (1, 3)
    flat, fixed = {}, {}
    for name, x in kwargs.items():
        pattern, axis = layout(op, name)
        if axis is not None:
            rows = []
            for b, n in enumerate(lengths):
                y = part(op, {name: x}, 0, min(n, tokens), tokens)[name]
                y = y.select(pattern.dim_of("B"), own.index(b) if b in own else 0)
                rows.append(y if b in own else spoiled(y))
            lengths = [min(n, tokens) for n in lengths]
            flat[name] = torch.cat(rows, pattern.without("B").dim_of(axis))
        elif "B" in pattern.axes:
            dim = pattern.dim_of("B")
            wide = x.index_select(dim, torch.tensor([0, 0, 0, 1, 0]))
            fixed[name] = wide
        else:
            fixed[name] = x
    result = op.op(
        **flat, **fixed, cu_seqlens=offsets(lengths), sizes=dict(op.sizes), backend="torch"
    )
    starts = list(accumulate([0, *lengths]))
    found = {}
    for name, pattern in op.op.declaration.outputs:
        dim = pattern.without("B").dim_of("T")
        x = only_outputs(op, result)[name]
        rows = [x.narrow(dim, starts[b], tokens) for b in own]
        found[name] = torch.stack(rows, pattern.dim_of("B"))
    for name in states_of(op):
        dim = layout(op, name)[0].dim_of("B")
        found[name] = as_dict(result)[name].index_select(dim, torch.tensor(own))
    return found


def uneven(op: Op, kwargs: Tensors, tokens: int, r: Random) -> Results:
    """Packed pieces through one cache, each sequence cut in places of its own."""
    cuts = [drawn_cuts(r, tokens) for _ in range(BATCH)]
    cache, at = dense_cache(op, kwargs, tokens), [0] * BATCH
    outs: list[list[Results]] = [[] for _ in range(BATCH)]
    for lengths in zip(*cuts, strict=True):
        flat: Tensors = {}
        for name, x in kwargs.items():
            pattern, axis = layout(op, name)
            flat[name] = x
            if axis is not None:
                rows = [
                    part(op, {name: x}, a, a + n, tokens)[name].select(pattern.dim_of("B"), b)
                    for b, (a, n) in enumerate(zip(at, lengths, strict=True))
                ]
                flat[name] = torch.cat(rows, pattern.without("B").dim_of(axis))
        result = op.op(
            **flat, cache=cache, cu_seqlens=offsets(lengths), sizes=dict(op.sizes), backend="torch"
        )
        for b, (start, n) in enumerate(zip(accumulate([0, *lengths]), lengths, strict=False)):
            own = {}
            for name, pattern in op.op.declaration.outputs:
                dim = pattern.without("B").dim_of("T")
                x = only_outputs(op, result)[name].narrow(dim, start, n)
                own[name] = x.unsqueeze(pattern.dim_of("B"))
            outs[b].append(own)
        at = [a + n for a, n in zip(at, lengths, strict=True)]
    each = [joined(op, own, {}) for own in outs]
    return {n: torch.cat([e[n] for e in each], p.dim_of("B")) for n, p in op.op.declaration.outputs}


def in_a_pool(op: Op, kwargs: Tensors, tokens: int, r: Random) -> Results:
    """Pieces that read and write slots of a pool; the other slots keep their bits."""
    slots = r.sample(range(5), BATCH)
    pools: dict[str, Any] = {}
    for name in states_of(op):
        x, dim = kwargs[name], layout(op, name)[0].dim_of("B")
        room = torch.full([*x.shape[:dim], 5, *x.shape[dim + 1 :]], 7.5)
        room.index_copy_(dim, torch.tensor(slots), x)
        pools[name] = ac.StatePool(room, torch.tensor(slots, dtype=torch.int32))
    outs, at = [], 0
    for n in drawn_cuts(r, tokens):
        piece = part(op, {k: x for k, x in kwargs.items() if k not in pools}, at, at + n, tokens)
        result = op.op(**piece, **pools, sizes=dict(op.sizes), backend="torch")
        outs.append(only_outputs(op, result))
        at += n
    held = {}
    for name, pool in pools.items():
        dim = layout(op, name)[0].dim_of("B")
        held[name] = pool.pool.index_select(dim, torch.tensor(slots))
        rest = [i for i in range(5) if i not in slots]
        assert bool((pool.pool.index_select(dim, torch.tensor(rest)) == 7.5).all())
    return joined(op, outs, held)


def split_in_two(op: Op, kwargs: Tensors, tokens: int, r: Random) -> Results:
    """The state alone: two halves summarised apart, and one after the other applied to it."""
    call = call_of(op.op, **kwargs, sizes=dict(op.sizes))
    form = analyse(call.program).affine
    if form is None or not tokens:
        return {}
    cut = r.randint(0, tokens)
    both = affine.summary(call, form, 0, cut).then(affine.summary(call, form, cut, tokens))
    pattern = call.patterns[form.state]
    start = unpack(kwargs[form.state], pattern, call.sizes)
    return {form.state: pack(both.apply(start), pattern, call.sizes)}


Way = Callable[[Op, Tensors, int, Random], Results]
BOTH: tuple[Way, ...] = (pieces, token_by_token, beside_neighbours)
HISTORY_WAYS = (*BOTH, uneven, in_pages)
STATE_WAYS = (*BOTH, in_a_pool, split_in_two)


# --- the law --------------------------------------------------------------------------------------


def holds(op: Op, way: Way, r: Random, tokens: int) -> None:
    """The whole's oracle, cut in some way, within the contract."""
    dtype = r.choice((torch.float32, torch.float32, torch.bfloat16))
    kwargs = arguments(r, op, Point(BATCH, tokens, tokens), dtype, whole=True)
    for name in states_of(op):
        kwargs[name] = values("state", kwargs[name].shape, torch.Generator().manual_seed(1))
    sizes = dict(op.sizes)
    exact = as_dict(op.op.reference(**kwargs, sizes=sizes))
    rough = as_dict(op.op(**kwargs, sizes=sizes, backend="torch"))
    for name, x in way(op, kwargs, tokens, r).items():
        hold(x, exact[name], rough[name], f"{way.__name__} {name}", magnitude(exact))


def by_name(x: object) -> str:
    return getattr(x, "__name__", repr(x))


@pytest.mark.parametrize("way", HISTORY_WAYS, ids=by_name)
@pytest.mark.parametrize("op", FOLDS, ids=by_name)
def test_a_history_cut_anywhere(op: Known, way: Way) -> None:
    for seed, tokens in ((0, 29), (1, 70)):
        holds(op, way, Random(seed), tokens)


@pytest.mark.parametrize("way", STATE_WAYS, ids=by_name)
@pytest.mark.parametrize("op", SCANS, ids=by_name)
def test_a_state_cut_anywhere(op: Known, way: Way) -> None:
    for seed, tokens in ((0, 29), (1, 70)):
        holds(op, way, Random(seed), tokens)


@pytest.mark.parametrize("way", HISTORY_WAYS, ids=by_name)
@examples(25)
@given(drawn=folds(causal=True), r=randoms())
def test_a_random_fold_cut_anywhere(way: Way, drawn: Drawn, r: Random) -> None:
    holds(drawn, way, r, r.choice((5, 1, 12, 33)))


@pytest.mark.parametrize("way", STATE_WAYS, ids=by_name)
@examples(25)
@given(drawn=scans().filter(lambda d: "position" not in d.tags), r=randoms())
def test_a_random_scan_cut_anywhere(way: Way, drawn: Drawn, r: Random) -> None:
    holds(drawn, way, r, r.choice((5, 1, 12, 33)))
