"""Scans whose carried objects all have a form: no loop over tokens runs the body.

For some tokens at a time each carried object is computed in the order of the forms, for all of
these tokens at once: windows by sliding over the rows, element-wise states by an associative scan,
affine states in chunks. The outputs are then ordinary tensor code over the tokens.
"""

from __future__ import annotations

from typing import assert_never

import torch

from attncc.codegen.forms import AffineForm, Carries, Carry, DiagonalForm, WindowForm
from attncc.dsl.axes import union
from attncc.dsl.interp import Env, Named, evaluate
from attncc.dsl.ir import Node
from attncc.runtime.call import Call
from attncc.runtime.eager import affine, blocks
from attncc.runtime.eager.named import with_axis
from attncc.runtime.eager.pieces import Piece, pieces


def run(call: Call, carries: Carries, *, chunk: int = 64, round_operands: bool = False) -> None:
    """Run a scan in fp32 (fp64 for fp64 inputs); states are rounded where they are stored.

    Args:
        call: the bound call; its outputs and final states are written.
        carries: the forms of everything its program carries.
        chunk: tokens of a chunk of affine states.
        round_operands: see ``operands`` of :func:`attncc.runtime.eager.affine.advance`; this is
            the eager reference of bf16 and fp16 kernels.
    """
    operands = call.dtype if round_operands else None
    for piece in pieces(call):
        held = {f.state: piece.held(f.state) for f in carries.forms}
        if all(held[f.state].data.numel() for f in carries.forms if not _window(f)):
            held = _run_piece(piece, carries, held, chunk, operands)
        for name, value in held.items():
            piece.store(call.final_states[name], call.patterns[name], value)


def _window(form: Carry) -> bool:
    return isinstance(form, WindowForm)  # of width 1 it holds nothing


def _run_piece(
    piece: Piece, carries: Carries, held: dict[str, Named], chunk: int,
    operands: torch.dtype | None,
) -> dict[str, Named]:  # fmt: skip
    call, axis = piece.call, piece.call.program.scan
    assert axis is not None
    tokens = piece.sizes[axis]
    chunk = max(1, min(chunk, tokens))
    each = max(_elements(f, piece, held[f.state], chunk) for f in carries.forms)
    size = chunk * max(1, blocks.budget(call.device) // each)
    for start in range(0, tokens, size):
        env = piece.tokens_env(axis, start, min(size, tokens - start))
        for form in carries.forms:
            held[form.state] = _advance(env, form, held[form.state], axis, chunk, operands)
        for o, node in zip(call.program.outputs, carries.outputs, strict=True):
            value = evaluate(node, env)
            piece.store(call.outputs[o.name], call.patterns[o.name], value, start)
    return held


def _elements(form: Carry, piece: Piece, state: Named, chunk: int) -> int:
    """Elements that a chunk of a carried object takes, about."""
    if isinstance(form, AffineForm):
        return affine.chunk_elements(form, piece.sizes, chunk)
    return 4 * chunk * max(state.data.numel(), 1)


def _advance(
    env: Env, form: Carry, state: Named, axis: str, chunk: int, operands: torch.dtype | None
) -> Named:
    """A carried object after the environment's tokens; what others need of it is put there."""
    match form:
        case AffineForm():
            return affine.advance(env, form, state, axis, chunk, operands)
        case DiagonalForm():
            return _scan(env, form, state, axis)
        case WindowForm():
            return _slide(env, form, state, axis)
        case _:
            assert_never(form)


def _slide(env: Env, form: WindowForm, kept: Named, axis: str) -> Named:
    """Every token's window is a view of the kept rows followed by the tokens' rows."""
    over = form.push.over
    row = with_axis(_real(form.push.row, env), axis, env.sizes[axis])
    axes = tuple(a for a in union(kept.axes, row.axes) if a not in (over, axis))
    sizes = dict(zip((*row.axes, *kept.axes), (*row.data.shape, *kept.data.shape), strict=True))
    shape = [sizes[a] for a in axes]
    rows = torch.cat(
        [
            kept.aligned((*axes, over)).expand(*shape, -1),
            row.aligned((*axes, axis)).expand(*shape, -1),
        ],
        -1,
    )
    width = sizes[over] + 1
    env.memo[form.push] = Named(rows.unfold(-1, width, 1), (*axes, axis, over))
    return Named(rows[..., rows.shape[-1] - width + 1 :], (*axes, over))


def _scan(env: Env, form: DiagonalForm, state: Named, axis: str) -> Named:
    """``S' = decay * S + add`` for all tokens, by doubling the span that a token knows.

    Decays multiply as values: right for 0 and negative ones, which sums of logarithms are not.
    """
    shape = [env.sizes[axis], *state.data.shape]
    add = _tokens(form.add, 0.0, env, state, axis).expand(shape)
    decay = _tokens(form.decay, 1.0, env, state, axis)
    values = torch.cat([torch.addcmul(add[:1], decay[:1], state.data), add[1:]])
    span = 1
    while span < shape[0]:
        grown = torch.addcmul(values[span:], decay[span:], values[:-span])
        values = torch.cat([values[:span], grown])
        decay = torch.cat([decay[:span], decay[span:] * decay[:-span]])
        span *= 2
    before = torch.cat([state.data[None], values[:-1]])
    env.inputs = {**env.inputs, form.state: Named(before, (axis, *state.axes))}
    return Named(values[-1], state.axes)


def _tokens(node: Node | None, neutral: float, env: Env, state: Named, axis: str) -> torch.Tensor:
    """A value as ``[T, ...]`` over the state's axes, of size 1 where it does not differ."""
    if node is None:
        value = Named(torch.full((), neutral, dtype=env.dtype, device=env.device), ())
    else:
        value = _real(node, env)
    value = with_axis(value, axis, env.sizes[axis])
    return value.aligned((axis, *state.axes))


def _real(node: Node, env: Env) -> Named:
    value = evaluate(node, env)
    return Named(value.data.to(env.dtype), value.axes)
