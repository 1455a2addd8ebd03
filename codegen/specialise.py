"""What of a call is compiled in: head dims and groups, never batch or lengths."""

from __future__ import annotations

from collections.abc import Mapping

from attncc.dsl.axes import union
from attncc.dsl.graph import walk
from attncc.dsl.ir import Contract, Lifetime, Program, Reduce, Softmax, TopK
from attncc.dsl.memo import once_a_program

RUNTIME = ("B", "T", "S")
"""Axes whose size is always given at run time."""


@once_a_program
def runtime_axes(program: Program) -> tuple[str, ...]:
    """Axes sized at run time: batch, tokens, histories, and the outermost head axis of the outputs.

    The head axis stays compiled in where the body sums over it, and where no history has it: it
    counts rows of a tile then, not programs.
    """
    summed: set[str] = set()
    histories: set[str] = set()
    for node in walk(*program.roots):
        if isinstance(node, (Contract, Reduce)):
            summed.update(node.over)
        elif isinstance(node, (Softmax, TopK)):
            histories.add(node.over)
    held = (Lifetime.CACHE, Lifetime.MEMORY)
    shared = {a for t in program.tensors if t.lifetime in held for a in t.pattern.axes}
    heads = []
    for out in program.outputs:
        inner = out.pattern.axes[:-1]
        heads += [a for a in inner if a not in RUNTIME and a not in summed and a not in histories]
    if shared:
        heads = [a for a in heads if a in shared]
    states = [a for t in program.tensors if t.name in program.state_names for a in t.pattern.axes]
    if not program.outputs:
        heads = [a for a in states if a not in RUNTIME and a not in summed]
    fixed = {a for a, _ in program.sizes}
    return union(RUNTIME, sorted(histories), [a for a in heads if a not in fixed][:1])


def static_sizes(program: Program, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The sizes that a kernel of this program compiles in, sorted by axis."""
    return tuple((a, sizes[a]) for a in _compiled_axes(program) if a in sizes)


@once_a_program
def _compiled_axes(program: Program) -> tuple[str, ...]:
    loose = runtime_axes(program)
    names = {a for t in program.tensors for a in t.pattern.axes}
    names |= {a for o in program.outputs for a in o.pattern.axes}
    return tuple(sorted(names.difference(loose)))
