"""One chunk of an affine state, prepared from the flat table for all chunks at once.

Within a chunk of C tokens the state passes P = C * decays positions; a row writes at one of them
and reads at another. What lies between is the product of the decays passed, multiplied as values:
right for a decay of 0 and for negative ones, which logarithms and ratios are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attncc.codegen.forms import AffineForm
from attncc.dsl.axes import union
from attncc.dsl.interp import Env, Named, evaluate
from attncc.dsl.ir import Node
from attncc.runtime.eager.named import (
    contract,
    join,
    pad,
    split,
    stack,
    times,
    with_axis,
)

# Axes of the preparation; the signature's names start with a letter.
CHUNK, TOKEN, ROW, SEEN = "#n", "#t", "#i", "#j"


@dataclass(frozen=True, slots=True)
class Side:
    """A vector along the active axes, and a factor beside the contraction it takes part in."""

    vector: Named
    factor: Named | None

    def at(self, chunk: int) -> Side:
        """The vector of one chunk."""
        factor = None if self.factor is None else self.factor.select(CHUNK, chunk)
        return Side(self.vector.select(CHUNK, chunk), factor)


@dataclass(frozen=True, slots=True)
class ReadOut:
    """A read-out: of the state at the chunk's start, and of the chunk's own rows."""

    name: str
    state: Side
    rows: Named | None


@dataclass(frozen=True, slots=True)
class Chunks:
    """What the state pass needs of each chunk; None where the table has nothing.

    Attributes:
        count: number of chunks.
        read: the rows' reads of the state at the chunk's start, times their coefficients.
        const: the rows' constants.
        solve: inverse of the in-chunk system, ``(I - L)^-1``.
        write: the rows' vectors with the decays up to the chunk's end.
        keep: product of all decays of the chunk.
        outs: the read-outs.
    """

    count: int
    read: Side | None
    const: Named | None
    solve: Named | None
    write: Side | None
    keep: Named | None
    outs: tuple[ReadOut, ...]

    def at(self, n: int) -> Chunks:
        """One chunk's part."""

        def one(x: Named | None) -> Named | None:
            return None if x is None else x.select(CHUNK, n)

        outs = (ReadOut(o.name, o.state.at(n), one(o.rows)) for o in self.outs)
        return replace(
            self, count=1, read=self.read and self.read.at(n), const=one(self.const),
            solve=one(self.solve), write=self.write and self.write.at(n), keep=one(self.keep),
            outs=tuple(outs),
        )  # fmt: skip


def rounded(value: Named, dtype: torch.dtype | None) -> Named:
    """An operand as a kernel keeps it: rounded to a storage dtype, or as it is for None."""
    if dtype is None or dtype.itemsize >= value.data.element_size():
        return value
    return Named(value.data.to(dtype).to(value.data.dtype), value.axes)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Products of decays between positions of a chunk, ``[..., from, to]``; None if there are none.

    ``value`` has the axes ``#r`` (position reached) and ``#w`` (position left) last.
    """

    value: Named | None
    per_active: bool

    def pick(self, reach: Sequence[int], leave: Sequence[int], row: str, col: str) -> Named | None:
        """Products for some pairs; 1 where ``reach`` comes before ``leave``."""
        if self.value is None:
            return None
        data = self.value.data
        r, w = (torch.tensor(x, dtype=torch.long, device=data.device) for x in (reach, leave))
        axes = (*self.value.axes[:-2], row, col)
        return Named(data.index_select(-2, r).index_select(-1, w), axes)

    def column(self, reach: Sequence[int], leave: int, axis: str) -> Named | None:
        """Products from one position."""
        picked = self.pick(reach, [leave], axis, "#one")
        return None if picked is None else picked.select("#one", 0)

    def row(self, reach: int, leave: Sequence[int], axis: str) -> Named | None:
        """Products up to one position."""
        picked = self.pick([reach], leave, "#one", axis)
        return None if picked is None else picked.select("#one", 0)


class Preparation:
    """Builds :class:`Chunks` for a range of tokens.

    Args:
        form: the flat table.
        env: the tokens' values, vectorised over them.
        axis: the scan's axis.
        chunk: tokens of a chunk.
        operands: storage dtype that operands of contractions are rounded to, or None.
    """

    def __init__(
        self, form: AffineForm, env: Env, axis: str, chunk: int, operands: torch.dtype | None
    ) -> None:
        self.form, self.env, self.axis, self.chunk, self.operands = form, env, axis, chunk, operands
        self.slots, self.rows = len(form.decays), len(form.rows)
        self.missing = -env.sizes[axis] % chunk
        self.weights = self._weights()
        tokens = range(chunk)
        self.left = [t * self.slots + r.write_slot for t in tokens for r in form.rows]
        self.end = chunk * self.slots

    def chunks(self) -> Chunks:
        """Everything the state pass needs."""
        form, rows = self.form, self.form.rows
        count = (self.env.sizes[self.axis] + self.missing) // self.chunk
        vectors = self.vectors() if rows else None
        read = const = solve = write = None
        if any(r.const is not None for r in rows):
            const = self._rows([r.const for r in rows], ROW)
        if vectors is not None and any(r.b is not None for r in rows):
            read, solve = self._system(vectors)
        if vectors is not None:
            write = self._side(vectors, self.weights.row(self.end, self.left, SEEN), None)
        keep = self.weights.row(self.end, [0], SEEN)
        keep = None if keep is None else keep.select(SEEN, 0)
        outs = tuple(self._out(i, vectors) for i in range(len(form.reads)))
        return Chunks(count, read, const, solve, write, keep, outs)

    # -- values of tokens

    def token(self, node: Node | None, fill: float = 0.0) -> Named:
        """A token's value for all tokens, the last chunk filled up, cut into chunks."""
        value = self._zero() if node is None else evaluate(node, self.env)
        data = value.data if value.data.dtype == self.env.dtype else value.data.to(self.env.dtype)
        value = with_axis(Named(data, value.axes), self.axis, self.env.sizes[self.axis])
        return split(pad(value, self.axis, self.missing, fill), self.axis, CHUNK, TOKEN, self.chunk)

    def _zero(self) -> Named:
        return Named(torch.zeros((), dtype=self.env.dtype, device=self.env.device), ())

    def _rows(self, nodes: Sequence[Node | None], axis: str) -> Named:
        """Values of the table's rows; row r of token t stands at t * rows + r. Pads are 0."""
        values = stack([self.token(n) for n in nodes], "#r")
        return join(values, TOKEN, "#r", axis)

    def vectors(self) -> Named:
        """The rows' vectors, with every active axis."""
        value = self._rows([r.a for r in self.form.rows], SEEN)
        for axis in self.form.active:
            value = with_axis(value, axis, self.env.sizes[axis])
        return value

    def _weights(self) -> _Weights:
        if not self.slots:
            return _Weights(None, False)
        decays = stack([self.token(d, 1.0) for d in self.form.decays], "#r")
        flat = join(decays, TOKEN, "#r", "#p").data
        reached = torch.ones(
            (*flat.shape[:-1], flat.shape[-1] + 1), dtype=flat.dtype, device=flat.device
        )
        steps = [reached]
        for p in range(flat.shape[-1]):  # a decay multiplies what left before it
            reached = reached * flat[..., p : p + 1]
            reached[..., p + 1 :] = 1.0
            steps.append(reached)
        product = torch.stack(steps, -2)
        axes = tuple(a for a in decays.axes if a not in (TOKEN, "#r"))
        return _Weights(
            Named(product, (*axes, "#x", "#w")), bool(set(self.form.active) & set(axes))
        )

    # -- the pieces of the algorithm

    def _side(self, vector: Named, weight: Named | None, factor: Named | None) -> Side:
        """A vector with its decays: inside it where they differ along it, else beside it."""
        if weight is not None and self.weights.per_active:
            return Side(rounded(times(vector, weight), self.operands), factor)
        beside = weight if factor is None else times(factor, weight)
        return Side(rounded(vector, self.operands), beside)

    def _gram(self, vector: Named, seen: Named, weight: Named | None, visible: Named) -> Named:
        """``sum_active vector * seen * weight`` where the row is visible, else 0."""
        vector, seen = rounded(vector, self.operands), rounded(seen, self.operands)
        inside = weight is not None and self.weights.per_active
        gram = contract(times(vector, weight if inside else None), seen, self.form.active)
        gram = times(gram, None if inside else weight)
        axes = union(gram.axes, visible.axes)
        return Named(torch.where(visible.aligned(axes), gram.aligned(axes), 0.0), axes)

    def visible(self, limits: Sequence[int], axis: str) -> Named:
        """Whether a read sees a row: rows before it in the chunk, given by number."""
        seen = torch.arange(self.chunk * self.rows, device=self.env.device)
        limit = torch.tensor(limits, device=self.env.device).unsqueeze(-1)
        return Named(seen < limit, (axis, SEEN))

    def _system(self, seen: Named) -> tuple[Side, Named]:
        rows = self.form.rows
        tokens = range(self.chunk)
        vector = self._rows([r.b for r in rows], ROW)
        coef = self._coefficients()
        reach = [t * self.slots + r.read_slot for t in tokens for r in rows]
        limits = [t * self.rows + r.rows_visible for t in tokens for r in rows]
        weight = self.weights.pick(reach, self.left, ROW, SEEN)
        gram = self._gram(vector, seen, weight, self.visible(limits, ROW))
        read = self._side(vector, self.weights.column(reach, 0, ROW), coef)
        return read, rounded(_inverse(times(gram, coef)), self.operands)

    def _coefficients(self) -> Named | None:
        rows = self.form.rows
        if all(r.coef is None for r in rows if r.b is not None):
            return None  # rows without a read have the vector 0
        one = Named(torch.ones((), dtype=self.env.dtype, device=self.env.device), ())
        values = [self.token(r.coef) if r.coef is not None else one for r in rows]
        return join(with_axis(stack(values, "#r"), TOKEN, self.chunk), TOKEN, "#r", ROW)

    def _out(self, number: int, seen: Named | None) -> ReadOut:
        read = self.form.reads[number]
        tokens = range(self.chunk)
        vector = self.token(read.vector)
        reach = [t * self.slots + read.slot for t in tokens]
        state = self._side(vector, self.weights.column(reach, 0, TOKEN), None)
        if seen is None:
            return ReadOut(read.name, state, None)
        limits = [t * self.rows + read.rows_visible for t in tokens]
        weight = self.weights.pick(reach, self.left, TOKEN, SEEN)
        gram = self._gram(vector, seen, weight, self.visible(limits, TOKEN))
        return ReadOut(read.name, state, rounded(gram, self.operands))


def _inverse(lower: Named) -> Named:
    """``(I - L)^-1`` of a strictly lower triangular L, by substitution."""
    axes = (*(a for a in lower.axes if a not in (ROW, SEEN)), ROW, SEEN)
    data = lower.aligned(axes)
    eye = torch.eye(data.shape[-1], dtype=data.dtype, device=data.device)
    solved = torch.linalg.solve_triangular(
        eye - data, eye.expand(data.shape), upper=False, unitriangular=True
    )
    return Named(solved, axes)
