"""Calls that give a partial result: the fold over part of a history, to be merged with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attncc.dsl.errors import ArgumentError
from attncc.dsl.facts import cascade
from attncc.dsl.graph import rebuild
from attncc.dsl.ir import Fn, Map, Node, Program, Softmax
from attncc.runtime.call import Call
from attncc.runtime.merge import Partial

if TYPE_CHECKING:
    from attncc.codegen.forms import SoftmaxForm


@lru_cache(maxsize=512)
def without_sinks(program: Program) -> Program:
    """The program whose outputs are one softmax fold, without the sink: that is added once, last.

    Raises:
        ArgumentError: the op is something else, or computes on after its fold.
    """
    from attncc.codegen.passes.associate import typical
    from attncc.codegen.pipeline import analyse  # the whole generator: imported when it is asked

    form = analyse(typical(program)).softmax
    if form is None or not _is_fold(form) or not _last(program, form):
        raise ArgumentError(
            "a partial is offered for ops that are one softmax fold and nothing more",
            op=program.name, argument="return_partial",
            expected="one output, dot(softmax(...), v, axis), its value axis innermost",
        )  # fmt: skip
    memo: dict[Node, Node] = {}

    def visit(node: Node) -> Node:
        if node not in memo:
            own = replace(node, sink=None) if isinstance(node, Softmax) and node.sink else node
            memo[node] = rebuild(own, visit)
        return memo[node]

    return replace(
        program, outputs=tuple(replace(o, value=visit(o.value)) for o in program.outputs)
    )


def _is_fold(form: SoftmaxForm) -> bool:
    """One output, and it is a fold, or the sum of a cascade's folds."""
    weights = [f.weight for f in form.folds]
    sums = {cascade(w) for w in weights if isinstance(w, Softmax)}
    if len(form.program.outputs) != 1 or len(sums) != 1:
        return False
    closed = {f.node for f in form.folds}
    stack, met = [form.program.outputs[0].value], []
    while stack:
        node = stack.pop()
        if node in closed:
            met.append(node)
        elif isinstance(node, Map) and node.fn is Fn.ADD:
            stack.extend(node.args)
        else:
            return False
    return len(met) == len(form.folds) == len(next(iter(sums)))


def _last(program: Program, form: SoftmaxForm) -> bool:
    """Whether the value axes are the innermost memory axis."""
    return program.outputs[0].pattern.dims[-1:] == (form.folds[0].value_axes,)


def partial_of(call: Call, named: Mapping[str, torch.Tensor]) -> Partial:
    """A call's results as a partial, natural log."""
    return Partial.of(named[call.program.outputs[0].name], named["lse"])
