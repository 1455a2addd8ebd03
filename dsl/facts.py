"""Facts about whole programs that a caller and the interpreter need to agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from attncc.dsl.axes import history_dim
from attncc.dsl.errors import RefusedError, SizeError
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime, Program, Push, Softmax, Tensor


def query_offset(program: Program, sizes: Mapping[str, int]) -> int:
    """Where query 0 stands: T is the tail of the op's own history, but not of a foreign memory."""
    own = [t for t in program.tensors if t.lifetime is Lifetime.CACHE]
    others = [t for t in program.tensors if t.lifetime is not Lifetime.MEMORY]
    own += [t for t in others if "S" in t.pattern.axes]
    dim = history_dim(own[0].pattern) if own else None
    return 0 if dim is None or "T" not in sizes else prod(sizes[a] for a in dim) - sizes["T"]


def check_traced(program: Program, sizes: Mapping[str, int]) -> None:
    """Refuse sizes other than those that ``unroll`` saw.

    Raises:
        SizeError: an unrolled axis has another size now.
    """
    for axis, size in program.sizes:
        if sizes[axis] != size:
            raise SizeError(
                "the program was traced with another size",
                op=program.name, axis=axis, expected=size, found=sizes[axis],
            )  # fmt: skip


def window_axis(program: Program, name: str) -> str:
    """The axis of a window's rows.

    Raises:
        KeyError: nothing is pushed into a window of that name.
    """
    for node in walk(*program.roots):
        if isinstance(node, Push) and isinstance(node.window, Input) and node.window.name == name:
            return node.over
    raise KeyError(name)


def stored_sizes(program: Program, t: Tensor, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Sizes of a tensor as it is stored: a window keeps one row less than the body sees."""
    if t.lifetime is not Lifetime.WINDOW:
        return sizes
    axis = window_axis(program, t.name)
    return {**sizes, axis: sizes[axis] - 1}


def cascade(node: Softmax) -> frozenset[Softmax]:
    """The histories that share a sum of exponentials, each without sink and neighbours."""
    return frozenset({replace(node, sink=None, beside=()), *node.beside})


def only_softmax(program: Program) -> Softmax:
    """The softmax whose lse a call can ask for.

    Raises:
        RefusedError: the program is a scan, or has none or several.
    """
    nodes = [n for n in walk(*program.roots) if isinstance(n, Softmax)]
    inner = {b for n in nodes for b in n.beside}
    found = {cascade(n): n for n in nodes if n not in inner}
    if len(found) != 1 or program.scan is not None:
        raise RefusedError(
            "lse belongs to one softmax over a history",
            op=program.name, expected="exactly one", found=len(found), loc=program.loc,
        )  # fmt: skip
    return next(iter(found.values()))
