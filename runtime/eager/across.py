"""Affine states in chunks whose outputs read them across the axis of their rows.

A chunk's rows ``u`` and the state ``S`` that it starts with are those of
:mod:`attncc.runtime.eager.affine`; a read-out of token t is

    since_t (vector_t . S) + sum_j (vector_t . u_j) w(j -> t) a_j

along the axis of the rows' vectors ``a``, with the products of decays ``w`` and ``since`` there.
"""

from __future__ import annotations

import torch

from attncc.codegen.forms import AcrossForm
from attncc.dsl.interp import Env, Named, evaluate
from attncc.runtime.call import Call
from attncc.runtime.eager import blocks
from attncc.runtime.eager.affine import chunk_elements, rows_of, written
from attncc.runtime.eager.chunks import CHUNK, SEEN, TOKEN, Preparation, rounded
from attncc.runtime.eager.named import contract, join, narrow, plus, stack, times
from attncc.runtime.eager.pieces import Piece, pieces


def run(call: Call, across: AcrossForm, *, chunk: int = 64, round_operands: bool = False) -> None:
    """Run a scan in fp32 (fp64 for fp64 inputs); states are rounded where they are stored.

    Args:
        call: the bound call; its outputs and final states are written.
        across: the form of its program.
        chunk: tokens of a chunk.
        round_operands: see ``operands`` of :func:`attncc.runtime.eager.affine.advance`.
    """
    operands, name = call.dtype if round_operands else None, across.form.state
    for piece in pieces(call):
        state = piece.held(name)
        if state.data.numel():
            state = _run_piece(piece, across, state, chunk, operands)
        piece.store(call.final_states[name], call.patterns[name], state)


def _run_piece(
    piece: Piece, across: AcrossForm, state: Named, chunk: int, operands: torch.dtype | None
) -> Named:
    call, axis = piece.call, piece.call.program.scan
    assert axis is not None
    tokens = piece.sizes[axis]
    chunk = max(1, min(chunk, tokens))
    each = chunk_elements(across.form, piece.sizes, chunk)
    size = chunk * max(1, blocks.budget(call.device) // each)
    for start in range(0, tokens, size):
        env = piece.tokens_env(axis, start, min(size, tokens - start))
        state = _advance(env, across, state, axis, min(chunk, env.sizes[axis]), operands)
        for o, node in zip(call.program.outputs, across.outputs, strict=True):
            value = evaluate(node, env)
            piece.store(call.outputs[o.name], call.patterns[o.name], value, start)
    return state


def _advance(
    env: Env, across: AcrossForm, state: Named, axis: str, chunk: int, operands: torch.dtype | None
) -> Named:
    """The state after the environment's tokens; its read-outs become inputs there."""
    form, over = across.form, (across.over,)
    made = Preparation(form, env, axis, chunk, operands)
    chunks, vectors = made.chunks(), made.vectors()
    reach = [t * made.slots + made.slots for t in range(chunk)]
    within = made.weights.pick(reach, made.left, TOKEN, SEEN)
    since = made.weights.column(reach, 0, TOKEN)
    asked = {r.name: rounded(made.token(r.vector), operands) for r in across.reads}
    limits = [(t + 1) * made.rows for t in range(chunk)]
    visible = made.visible(limits, TOKEN)
    found: dict[str, list[Named]] = {name: [] for name in asked}
    for n in range(chunks.count):
        part, lead = chunks.at(n), rounded(state, operands)
        u = rows_of(part, lead, form.active, operands)
        assert u is not None
        held = rounded(u, operands)
        for name, vector in asked.items():
            own = _at(vector, n)
            score = times(
                contract(own, held, over), Named(visible.data.to(env.dtype), visible.axes)
            )
            weighed = times(score, None if within is None else _at(within, n))
            read = times(contract(own, lead, over), None if since is None else _at(since, n))
            found[name].append(plus(read, contract(weighed, _at(vectors, n), (SEEN,))))
        state = written(part, state, u, operands)
    for name, values in found.items():
        whole = join(stack(values, CHUNK), CHUNK, TOKEN, axis)
        env.inputs = {**env.inputs, name: narrow(whole, axis, 0, env.sizes[axis])}
    return state


def _at(value: Named, chunk: int) -> Named:
    return value.select(CHUNK, chunk) if CHUNK in value.axes else value
