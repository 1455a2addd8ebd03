"""Softmax folds, vectorised: blocks of queries, and of the history, merged online.

Score, mask, value and sink are whatever the declaration says: the interpreter's evaluator computes
them on the block, so that this file knows only the fold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attncc.codegen.forms import Band, MaskForm, SoftmaxFold, SoftmaxForm
from attncc.dsl.facts import only_softmax
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.interp import Env, Named, evaluate, lse, softmax_parts
from attncc.dsl.ir import Between, Contract, Node, Softmax, TopK
from attncc.runtime.call import Call
from attncc.runtime.eager import blocks
from attncc.runtime.eager.picks import picks
from attncc.runtime.eager.pieces import Piece, pieces
from attncc.runtime.merge import Partial, merge


def run(call: Call, form: SoftmaxForm) -> None:
    """Run an op of folds: fp32 accumulation, memory of a few blocks of scores.

    Args:
        call: the bound call; its caches receive ``new_rows``, its outputs and lse are written.
        form: the folds of its program.

    Raises:
        CacheError: a cache has no room; nothing is written.
    """
    for piece in pieces(replace(call, program=form.program)):
        run_rows(piece, form)


def run_rows(piece: Piece, form: SoftmaxForm | None) -> None:
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
        history = () if form is None else tuple(f.over for f in form.folds)
        size = _query_rows(roots, piece.sizes, history, blocks.budget(call.device))
    for start in range(0, tokens, max(size, 1)):
        count = min(size, tokens - start)
        rows = blocks.block(env, early, "T", start, count) if "T" in piece.sizes else env
        _evaluate_rows(piece, rows, form, start)


def _query_rows(
    roots: tuple[Node, ...], sizes: dict[str, int], history: tuple[str, ...], budget: int
) -> int:
    """Queries of a block: with all the history in the budget, or up to 128 with 128 keys."""
    rows = budget // blocks.largest(roots, sizes, without=("T",))
    for axis in history:
        tile = budget // (blocks.largest(roots, sizes, without=("T", axis)) * 128)
        rows = max(rows, min(tile, 128))
    return max(rows, 1)


def _evaluate_rows(piece: Piece, rows: Env, form: SoftmaxForm | None, start: int) -> None:
    call = piece.call
    for node in walk(*call.program.roots):
        if isinstance(node, Between) and node not in rows.memo:
            rows.memo[node] = blocks.between(node, rows)
        elif isinstance(node, TopK) and node not in rows.memo and rows.dtype == torch.float32:
            rows.memo[node] = picks(node, rows)
    logs = {} if form is None else _Folds(form, rows).close()
    for o in call.program.outputs:
        value = evaluate(o.value, rows)
        piece.store(call.outputs[o.name], call.patterns[o.name], value, start)
    if call.lse is None or call.lse_axes is None:
        return
    node = only_softmax(call.program)
    piece.store(call.lse, call.lse_axes, logs[node] if node in logs else lse(node, rows), start)


class _Folds:
    """The folds of a block of queries; each history is passed over once."""

    def __init__(self, form: SoftmaxForm, rows: Env) -> None:
        self.form = form
        self.rows = rows
        self.partials: dict[Softmax, Partial] = {}

    def close(self) -> dict[Softmax, Named]:
        """Leave each fold's value among the rows' values; gives back the lse of each softmax."""
        logs = {}
        for folds in self.form.passes:
            weight = folds[0].weight
            if isinstance(weight, Softmax):
                logs[weight] = self._softmax(weight, folds)
            else:
                self._sum(folds)
        return logs

    def _softmax(self, weight: Softmax, folds: tuple[SoftmaxFold, ...]) -> Named:
        axes = _row_axes(weight)
        own = _core(weight)
        partial = self.partial(own)
        shape = [self.rows.sizes[a] for a in axes]
        u = Named(partial.u, (*_row_axes(own), _COLUMNS)).aligned((*axes, _COLUMNS))
        m, l = (
            Named(x, _row_axes(own)).aligned(axes).expand(shape) for x in (partial.m, partial.l)
        )
        partial = Partial(u.expand(*shape, -1), m, l)
        logits = [Named(self.partial(other).lse, _row_axes(other)) for other in weight.beside]
        if weight.sink is not None:
            logits.append(evaluate(weight.sink, self.rows))
        for logit in logits:
            at = logit.aligned(axes).to(self.rows.dtype).expand(shape)
            partial = partial.with_sink(at)
        self._store(own, folds, partial.o, axes)
        return Named(partial.lse, axes)

    def _store(
        self, own: Softmax, folds: tuple[SoftmaxFold, ...], o: torch.Tensor, axes: tuple[str, ...]
    ) -> None:
        first = 0
        for fold in self._valued(own):
            width = _width(fold, self.rows)
            if fold in folds:
                full = (*axes, *fold.value_axes)
                data = o.narrow(-1, first, width).reshape([self.rows.sizes[a] for a in full])
                self.rows.memo[fold.node] = Named(data, full)
            first += width

    def _valued(self, own: Softmax) -> list[SoftmaxFold]:
        """The folds whose weights are those of a softmax, up to its sum."""
        weights = ((f, f.weight) for f in self.form.folds)
        return [f for f, w in weights if isinstance(w, Softmax) and _core(w) == own]

    def partial(self, own: Softmax) -> Partial:
        """A softmax without sink and neighbours, folded online with the values of all its folds."""
        if own not in self.partials:
            folds = self._valued(own)
            mask = folds[0].mask if folds else None
            roots = [own.score, own.where, *(v for f in folds for v in f.value)]
            partial: Partial | None = None
            for part in self._parts(own.over, mask, [r for r in roots if r is not None]):
                new = _partial(own, folds, part)
                partial = new if partial is None else merge((partial, new))
            assert partial is not None
            self.partials[own] = partial
        return self.partials[own]

    def _sum(self, folds: tuple[SoftmaxFold, ...]) -> None:
        roots = [folds[0].weight, *(v for f in folds for v in f.value)]
        for part in self._parts(folds[0].over, folds[0].mask, roots):
            for fold in folds:
                value, before = evaluate(fold.node, part), self.rows.memo.get(fold.node)
                if before is not None:
                    value = Named(before.data + value.aligned(before.axes), before.axes)
                self.rows.memo[fold.node] = value

    def _parts(self, axis: str, mask: MaskForm | None, roots: list[Node]) -> Iterator[Env]:
        """The visible history in blocks; one, which may be empty, if there is none."""
        early = blocks.whole_nodes(tuple(roots), axis, set())
        low, high = _visible(mask, axis, self.rows)
        per_key = blocks.largest(tuple(roots), self.rows.sizes, without=(axis,))
        size = max(1, blocks.budget(self.rows.device) // per_key)
        for start in range(low, max(high, low + 1), size):
            yield blocks.block(self.rows, early, axis, start, max(min(size, high - start), 0))


_COLUMNS = "<columns>"


def _core(softmax: Softmax) -> Softmax:
    return replace(softmax, sink=None, beside=())


def _partial(own: Softmax, folds: list[SoftmaxFold], part: Env) -> Partial:
    """The fold over one block of the history."""
    axes = _row_axes(own)
    shape = [part.sizes[a] for a in axes]
    parts = softmax_parts(own, part)
    part.memo[own] = Named(parts.weight, parts.axes)
    sums = [parts.weight.new_zeros([*shape, 0])]
    for fold in folds:
        u = evaluate(Contract((own, *fold.value), (own.over,)), part)
        full = (*axes, *fold.value_axes)
        data = u.aligned(full).expand([part.sizes[a] for a in full])
        sums.append(data.reshape(*shape, _width(fold, part)))
    m, l = (
        Named(x.squeeze(-1), parts.axes[:-1]).aligned(axes).expand(shape)
        for x in (parts.m, parts.total)
    )
    return Partial(torch.cat(sums, -1), m, l)


def _row_axes(softmax: Softmax) -> tuple[str, ...]:
    return tuple(a for a in axes_of(softmax) if a != softmax.over)


def _width(fold: SoftmaxFold, env: Env) -> int:
    n = 1
    for axis in fold.value_axes:
        n *= env.sizes[axis]
    return n


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
