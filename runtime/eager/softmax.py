"""Softmax folds, vectorised: blocks of queries, and of the history, merged online.

Score, mask, value and sink are whatever the declaration says: the interpreter's evaluator computes
them on the block, so that this file knows only the fold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attncc.codegen.forms import Band, MaskForm, SoftmaxFold, SoftmaxForm
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.interp import Env, Named, lse, softmax_parts
from attncc.dsl.ir import Between, Contract, Node, Softmax
from attncc.runtime.call import Call
from attncc.runtime.eager import blocks
from attncc.runtime.eager.evaluate import evaluate
from attncc.runtime.eager.pieces import Piece, pieces
from attncc.runtime.merge import Partial, merge


def run(call: Call, form: SoftmaxForm) -> None:
    """Run an op of softmax folds: fp32 accumulation, memory of a few blocks of scores.

    Args:
        call: the bound call; its caches receive ``new_rows``, its outputs and lse are written.
        form: the folds of its program.

    Raises:
        CacheError: a cache has no room; nothing is written.
    """
    for piece in pieces(call):
        run_rows(piece, _groups(form))


@dataclass(frozen=True, slots=True)
class Group:
    """Folds that share one softmax."""

    softmax: Softmax
    folds: tuple[SoftmaxFold, ...]

    @property
    def mask(self) -> MaskForm | None:
        """What is visible."""
        return self.folds[0].mask

    @property
    def roots(self) -> tuple[Node, ...]:
        """What is evaluated for a block of the history."""
        score = (self.softmax.score, self.softmax.where)
        return tuple(n for n in (*score, *(v for f in self.folds for v in f.value)) if n)


def _groups(form: SoftmaxForm) -> tuple[Group, ...]:
    found: dict[Softmax, list[SoftmaxFold]] = {}
    for fold in form.folds:
        found.setdefault(fold.softmax, []).append(fold)
    return tuple(Group(softmax, tuple(folds)) for softmax, folds in found.items())


def run_rows(piece: Piece, groups: tuple[Group, ...]) -> None:
    """Evaluate a piece's outputs in blocks of queries, with its folds computed online."""
    call = piece.call
    if not any(o.numel() for o in call.outputs.values()):
        return
    env, roots = piece.env(), call.program.roots
    folds = blocks.holds_fold(roots)
    early = blocks.whole_nodes(roots, "T", folds)
    tokens = piece.sizes.get("T", 1)
    size = tokens
    if not any(blocks.crosses(n, "T") for n in folds):
        history = tuple(g.softmax.over for g in groups)
        size = _query_rows(roots, piece.sizes, history, blocks.budget(call.device))
    for start in range(0, tokens, max(size, 1)):
        count = min(size, tokens - start)
        rows = blocks.block(env, early, "T", start, count) if "T" in piece.sizes else env
        _evaluate_rows(piece, rows, groups, start)


def _query_rows(
    roots: tuple[Node, ...], sizes: dict[str, int], history: tuple[str, ...], budget: int
) -> int:
    """Queries of a block: with all the history in the budget, or up to 128 with 128 keys."""
    rows = budget // blocks.largest(roots, sizes, without=("T",))
    for axis in history:
        tile = budget // (blocks.largest(roots, sizes, without=("T", axis)) * 128)
        rows = max(rows, min(tile, 128))
    return max(rows, 1)


def _evaluate_rows(piece: Piece, rows: Env, groups: tuple[Group, ...], start: int) -> None:
    call = piece.call
    for node in walk(*call.program.roots):
        if isinstance(node, Between) and node not in rows.memo:
            rows.memo[node] = blocks.between(node, rows)
    logs = {g.softmax: _fold(g, rows) for g in groups}
    for o in call.program.outputs:
        value = evaluate(o.value, rows)
        piece.store(call.outputs[o.name], call.patterns[o.name], value, start)
    if call.lse is None or call.lse_axes is None:
        return
    if not groups:
        node = next(n for n in walk(*call.program.roots) if isinstance(n, Softmax))
        logs = {node: lse(node, rows)}
    piece.store(call.lse, call.lse_axes, next(iter(logs.values())), start)


def _fold(group: Group, rows: Env) -> Named:
    """Fold a history online; leaves each fold's value in ``rows`` and returns the lse."""
    softmax, axis = group.softmax, group.softmax.over
    early = blocks.whole_nodes(group.roots, axis, set())
    low, high = _visible(group.mask, axis, rows)
    per_key = blocks.largest(group.roots, rows.sizes, without=(axis,))
    size = max(1, blocks.budget(rows.device) // per_key)
    partial: Partial | None = None
    for start in range(low, max(high, low + 1), size):
        part = blocks.block(rows, early, axis, start, min(size, high - start))
        new = _partial(group, part)
        partial = new if partial is None else merge((partial, new))
    assert partial is not None
    axes = _row_axes(softmax)
    if softmax.sink is not None:
        sink = evaluate(softmax.sink, rows).aligned(axes).to(rows.dtype)
        partial = partial.with_sink(sink)
    outputs, first = partial.o, 0
    for fold in group.folds:
        width = _width(fold, rows)
        full = (*axes, *fold.value_axes)
        own = outputs.narrow(-1, first, width).reshape([rows.sizes[a] for a in full])
        rows.memo[fold.node] = Named(own, full)
        first += width
    return Named(partial.lse, axes)


def _row_axes(softmax: Softmax) -> tuple[str, ...]:
    return tuple(a for a in axes_of(softmax) if a != softmax.over)


def _width(fold: SoftmaxFold, env: Env) -> int:
    n = 1
    for axis in fold.value_axes:
        n *= env.sizes[axis]
    return n


def _partial(group: Group, part: Env) -> Partial:
    """The fold over one block of the history, without the sink."""
    softmax = group.softmax
    axes = _row_axes(softmax)
    shape = [part.sizes[a] for a in axes]
    for root in group.roots:
        evaluate(root, part)
    parts = softmax_parts(replace(softmax, sink=None), part)
    part.memo[softmax] = Named(parts.weight, parts.axes)
    sums = []
    for fold in group.folds:
        u = evaluate(Contract((softmax, *fold.value), (softmax.over,)), part)
        full = (*axes, *fold.value_axes)
        data = u.aligned(full).expand([part.sizes[a] for a in full])
        sums.append(data.reshape(*shape, _width(fold, part)))
    m, l = (
        Named(x.squeeze(-1), parts.axes[:-1]).aligned(axes).expand(shape)
        for x in (parts.m, parts.total)
    )
    return Partial(torch.cat(sums, -1), m, l)


def _visible(mask: MaskForm | None, axis: str, rows: Env) -> tuple[int, int]:
    """A range of the history outside which a block of queries sees nothing."""
    length = rows.sizes[axis]
    if mask is None or not rows.sizes.get("T", 1):
        return 0, length
    ranges = []
    for clause in mask.clauses:
        low, high = 0, length
        for band in clause.bands:
            low, high = _bound(band, rows, low, high)
        low = min(low, length)
        ranges.append((low, max(low, high)))
    if not ranges:
        return 0, 0
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _bound(band: Band, rows: Env, low: int, high: int) -> tuple[int, int]:
    """Where ``t * T + s * S + offset >= 0`` for some query of the block."""
    first = rows.query_offset
    last = first + rows.sizes.get("T", 1) - 1
    offset = evaluate(band.offset, rows).data
    if not offset.numel():
        return low, high
    reach = int(offset.max()) + max(band.t * first, band.t * last)
    if band.s < 0:
        return low, min(high, reach // -band.s + 1)
    return max(low, -(reach // band.s)), high
