"""Affine states in chunks: one algorithm for every flat table.

Each chunk's own system, weights and read-outs are prepared for many chunks at once
(:mod:`attncc.runtime.eager.chunks`); the loop over chunks only carries the state:

    u  = (I - L)^-1 (const + coef * (b . S))      the chunk's rows
    y  = q . S + P u                              its read-outs
    S' = keep * S + a (x) u                       its end
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attncc.codegen.forms import AffineForm
from attncc.dsl.graph import axes_of
from attncc.dsl.interp import Env, Named
from attncc.runtime.call import Call
from attncc.runtime.eager import blocks
from attncc.runtime.eager.chunks import (
    CHUNK,
    ROW,
    SEEN,
    TOKEN,
    Chunks,
    Preparation,
    Side,
    rounded,
)
from attncc.runtime.eager.named import contract, join, narrow, plus, rename, stack, times
from attncc.runtime.eager.pieces import Piece, pieces


def advance(
    env: Env, form: AffineForm, state: Named, axis: str, chunk: int, operands: torch.dtype | None
) -> Named:
    """Carry a state over some tokens; its read-outs become inputs of the environment.

    Args:
        env: the tokens' values, vectorised over them.
        form: the flat table.
        state: the state before the first token, in fp32 (fp64 for fp64 inputs).
        axis: the scan's axis.
        chunk: tokens of a chunk.
        operands: round the operands of contractions (row and read vectors, the state, the rows,
            the in-chunk inverse and read-out matrix) to this dtype, where a kernel keeps them so.
            Sums stay fp32.

    Returns:
        The state after the last token.
    """
    chunks = Preparation(form, env, axis, max(1, min(chunk, env.sizes[axis])), operands).chunks()
    found: dict[str, list[Named]] = {r.name: [] for r in form.reads}
    for n in range(chunks.count):
        state, reads = _step(chunks.at(n), state, form.active, operands)
        for name, value in reads.items():
            found[name].append(value)
    for name, values in found.items():
        whole = join(stack(values, CHUNK), CHUNK, TOKEN, axis)
        env.inputs = {**env.inputs, name: narrow(whole, axis, 0, env.sizes[axis])}
    return state


def _prepared(
    piece: Piece, form: AffineForm, low: int, high: int, chunk: int, operands: torch.dtype | None
) -> Iterator[tuple[int, Env, Chunks]]:
    """The chunks of a range of tokens, some at a time so that memory stays bounded."""
    axis = piece.call.program.scan
    assert axis is not None
    chunk = max(1, min(chunk, high - low))
    size = chunk * max(
        1, blocks.budget(piece.call.device) // chunk_elements(form, piece.sizes, chunk)
    )
    for start in range(low, high, size):
        env = piece.tokens_env(axis, start, min(size, high - start))
        yield start, env, Preparation(form, env, axis, chunk, operands).chunks()


def chunk_elements(form: AffineForm, sizes: dict[str, int], chunk: int) -> int:
    """Elements that the preparation of one chunk holds, about."""

    def count(axes: tuple[str, ...]) -> int:
        n = 1
        for a in axes:
            n *= max(sizes[a], 1)
        return n

    rows = chunk * max(len(form.rows), 1)
    positions = chunk * len(form.decays) + 1
    each = any(set(form.active) & set(axes_of(d)) for d in form.decays)
    pairs = (positions**2 + rows**2) * (count(form.active) if each else 1)
    vectors = rows * (count(form.active) + count(form.passive))
    return 2 * count(form.system) * (pairs + rows**2 + vectors)


def _step(
    part: Chunks, state: Named, active: tuple[str, ...], operands: torch.dtype | None
) -> tuple[Named, dict[str, Named]]:
    """One chunk: the state after it, and its read-outs by name."""
    lead = rounded(state, operands)
    u = rows_of(part, lead, active, operands)
    reads = {out.name: _read(out.state, lead, active) for out in part.outs}
    if u is not None and part.write is not None:
        for out in part.outs:
            if out.rows is not None:
                own = contract(out.rows, rounded(u, operands), (SEEN,))
                reads[out.name] = plus(reads[out.name], own)
    return written(part, state, u, operands), reads


def written(part: Chunks, state: Named, u: Named | None, operands: torch.dtype | None) -> Named:
    """The state after a chunk that adds these rows."""
    new = times(state, part.keep)
    if u is None or part.write is None:
        return new
    u = rounded(times(u, part.write.factor), operands)
    return plus(new, contract(part.write.vector, u, (SEEN,)))


def rows_of(
    part: Chunks, lead: Named, active: tuple[str, ...], operands: torch.dtype | None
) -> Named | None:
    """What a chunk's rows add to the state, given the one before it as products take it."""
    u = part.const
    if part.read is not None:
        got = _read(part.read, lead, active)
        u = got if u is None else plus(got, u)
    if part.solve is not None and u is not None:
        u = contract(part.solve, rename(rounded(u, operands), ROW, SEEN), (SEEN,))
    return None if u is None else rename(u, ROW, SEEN)


def _read(side: Side, state: Named, active: tuple[str, ...]) -> Named:
    return times(contract(side.vector, state, active), side.factor)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a range of tokens does to the state it starts with: ``S' = A S + B``.

    Attributes:
        a: axes of the system, the active axes, and the active axes primed (``K'``): the ones that
            meet the state. Axes along which it does not differ are absent.
        b: axes of the state.
        active: the active axes.
    """

    a: Named
    b: Named
    active: tuple[str, ...]

    def apply(self, state: Named) -> Named:
        """The state after the range."""
        primed = state
        for axis in self.active:
            primed = rename(primed, axis, f"{axis}'")
        return plus(contract(self.a, primed, [f"{x}'" for x in self.active]), self.b)

    def then(self, later: Summary) -> Summary:
        """This range followed by a later one (the order matters): ``(A2 A1, A2 B1 + B2)``."""
        first, second = self.a, later.a
        for axis in self.active:
            first, second = rename(first, axis, f"#{axis}"), rename(second, f"{axis}'", f"#{axis}")
        a = contract(second, first, [f"#{x}" for x in self.active])
        return Summary(a, later.apply(self.b), self.active)


def identity(state: Named, active: tuple[str, ...]) -> Summary:
    """The summary of no tokens, for states like the given one: ``(I, 0)``."""
    a = Named(torch.ones((), dtype=state.data.dtype, device=state.data.device), ())
    sizes = dict(zip(state.axes, state.data.shape, strict=True))
    for axis in active:
        eye = torch.eye(sizes[axis], dtype=state.data.dtype, device=state.data.device)
        a = times(a, Named(eye, (axis, f"{axis}'")))
    return Summary(a, Named(torch.zeros_like(state.data), state.axes), active)


def summary(call: Call, form: AffineForm, low: int, high: int, *, chunk: int = 64) -> Summary:
    """What tokens ``low .. high`` of a dense call do to the state, in fp32.

    Args:
        call: a dense call; nothing is written.
        form: the flat table of its program.
        low: first token.
        high: one past the last token.
        chunk: tokens of a chunk.
    """
    assert not call.packed and call.lengths is None
    (piece,) = pieces(call)
    start = identity(piece.held(form.state), form.active)
    a, b = start.a, start.b
    for _, _, chunks in _prepared(piece, form, low, high, chunk, None):
        for n in range(chunks.count):
            part = replace(chunks.at(n), outs=())
            a, _ = _step(replace(part, const=None), a, form.active, None)
            b, _ = _step(part, b, form.active, None)
    return Summary(a, b, form.active)
