"""Scans of any body, token by token: several states, windows, updates that are not affine.

What does not depend on a state is computed for a range of tokens at once; the loop evaluates the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from attncc.codegen.terms import depends_on_state
from attncc.dsl.axes import Pattern
from attncc.dsl.graph import children
from attncc.dsl.interp import Env, Named, evaluate
from attncc.dsl.ir import Node, Program
from attncc.runtime.bind import window_axes
from attncc.runtime.call import Call
from attncc.runtime.eager import blocks
from attncc.runtime.eager.named import narrow, rename, stack
from attncc.runtime.eager.pieces import Piece, pieces


def run(call: Call, tokens: Mapping[str, torch.Tensor] | None = None) -> None:
    """Run a scan in fp32 (fp64 for fp64 inputs); states are rounded where they are stored.

    Args:
        call: the bound call.
        tokens: for some states, a tensor ``[B, T, ...]`` that receives the state after each token
            (the state's other memory axes follow B and T).
    """
    early = _free_nodes(call.program)
    for piece in pieces(call):
        _run_piece(piece, early, tokens or {})


@lru_cache(maxsize=512)
def _free_nodes(program: Program) -> tuple[Node, ...]:
    """The topmost nodes that no state reaches."""
    found: dict[Node, None] = {}
    todo: list[Node] = list(program.roots)
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if depends_on_state(node):
            todo.extend(children(node))
        else:
            found[node] = None
    return tuple(found)


def _run_piece(piece: Piece, early: tuple[Node, ...], each: Mapping[str, torch.Tensor]) -> None:
    call = piece.call
    states = {name: piece.held(name) for name in call.program.state_names}
    axis = call.program.scan
    assert axis is not None
    tokens = piece.sizes[axis]
    most = blocks.largest(early, piece.sizes, without=())
    size = max(1, blocks.budget(call.device) // most)
    for start in range(0, tokens, size):
        env = piece.tokens_env(axis, start, min(size, tokens - start))
        values = {node: evaluate(node, env) for node in early}
        rows: dict[str, list[Named]] = {o.name: [] for o in call.program.outputs}
        for t in range(env.sizes[axis]):
            memo = {node: value.select(axis, t) for node, value in values.items()}
            step = Env(env.sizes, states, env.dtype, env.device, token=start + t, memo=memo)
            for o in call.program.outputs:
                rows[o.name].append(evaluate(o.value, step))
            states = {s.name: _carried(piece, s.name, s.value, step) for s in call.program.states}
            for name, target in each.items():
                inner = call.patterns[name].without("B").dims
                piece.store(target[:, start + t], Pattern((("B",), *inner)), states[name])
        for o in call.program.outputs:
            value = rename(stack(rows[o.name], "#t"), "#t", axis)
            piece.store(call.outputs[o.name], call.patterns[o.name], value, start)
    for name, value in states.items():
        piece.store(call.final_states[name], call.patterns[name], value)


def _carried(piece: Piece, name: str, node: Node, step: Env) -> Named:
    """A state after the token; of a window the last W - 1 rows."""
    value = evaluate(node, step)
    axes = piece.call.patterns[name].axes
    window = window_axes(piece.call.program).get(name)
    if window is not None:
        value = narrow(value, window, 1, piece.sizes[window] - 1)
    shape = [piece.sizes[a] - (a == window) for a in axes]
    return Named(value.aligned(axes).expand(shape), axes)
