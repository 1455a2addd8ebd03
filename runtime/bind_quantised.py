"""The quantised histories of a call: their scales fit them, and the op may be given them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from attncc.dsl.axes import block_axis, scales_of
from attncc.dsl.errors import CacheError, DtypeError, SizeError
from attncc.dsl.graph import children, walk
from attncc.dsl.ir import Contract, Gather, Input, Lifetime, Node, Program, Tensor, TopK
from attncc.dsl.memo import once_a_program
from attncc.runtime import checks
from attncc.runtime.caches import scaled_axis
from attncc.runtime.call import Call
from attncc.runtime.quantised import BLOCKS, E4M3, E8M0, Scales, as_bytes


def check_scales(
    call: Call, given: Mapping[str, torch.Tensor], declared: Iterable[Tensor]
) -> dict[str, Scales]:
    """The scales of a call's quantised histories.

    Args:
        call: the call but for its scales; its histories' data have passed their checks.
        given: scales by the history's name.
        declared: the tensors of the signature.

    Raises:
        CacheError: scales for something that is no history, or has no rows.
        DtypeError: data other than e4m3, scales other than fp32 and ue8m0, or a history that is
            compared, looked up or computed with element by element.
        SizeError, RankError, StrideError, DeviceError: scales that do not fit the data.
    """
    op, found = call.program.name, {}
    named = {t.name: t for t in declared}
    for name, scales in given.items():
        if name not in call.tensors or "S" not in named[name].pattern.axes:
            raise CacheError("scales of no history", op=op, argument=name)
        only_contracted(call.program, name)
        found[name] = _check(call, named[name], scales)
    return found


def _check(call: Call, t: Tensor, scales: torch.Tensor) -> Scales:
    op, label = call.program.name, f"scales[{t.name}]"
    axis = scaled_axis(op, t)
    pattern = scales_of(call.patterns[t.name], axis)
    checks.dtype(op, t.name, call.tensors[t.name], (E4M3,), "scales belong to e4m3 data")
    allowed = (torch.float32, torch.uint8, E8M0)
    checks.dtype(op, label, scales, allowed, "scales are fp32, or ue8m0 in uint8")
    checks.rank(op, label, scales, pattern)
    checks.dense(op, label, scales)
    checks.device(op, label, scales, call.device)
    blocks, width = scales.shape[-2], call.sizes[axis]
    if not blocks or width % blocks or (blocks > 1 and width // blocks not in BLOCKS):
        raise SizeError(
            "scales for blocks of another size",
            op=op, argument=label, axis=axis,
            expected=f"one for the row, or for blocks of {', '.join(map(str, BLOCKS))}",
            found=f"{blocks} for {width} elements",
        )  # fmt: skip
    block = width // blocks
    sizes = {**call.sizes, block_axis(axis): blocks}
    wanted = tuple(sizes[a] for a in pattern.axes)
    if scales.shape != wanted:
        raise SizeError(
            "scales do not fit the history",
            op=op, argument=label, expected=f"[{pattern}] = {wanted}", found=tuple(scales.shape),
        )  # fmt: skip
    return Scales(as_bytes(scales), pattern, axis, block)


def only_contracted(program: Program, name: str) -> None:
    """Every use of a history is an operand of a contraction, perhaps of gathered rows.

    Raises:
        DtypeError: it is compared, looked up with, or computed with element by element.
    """
    parents: dict[Node, list[Node]] = {}
    for node in walk(*program.roots):
        for child in children(node):
            parents.setdefault(child, []).append(node)
    stack: list[Node] = [n for n in walk(*program.roots) if isinstance(n, Input) and n.name == name]
    while stack:
        for parent in parents.get(stack.pop(), []):
            if isinstance(parent, Gather):
                stack.append(parent)
            elif not isinstance(parent, Contract):
                raise DtypeError(
                    "only a history that is contracted can be quantised",
                    op=program.name, argument=name, expected="an operand of ac.dot, nothing else",
                    found=type(parent).__name__.lower(), loc=parent.loc,
                )  # fmt: skip


@once_a_program
def selecting(program: Program) -> frozenset[str]:
    """Queries that only choose what is read: they may be plain e4m3, with scales in the weights."""
    scores = [n.score for n in walk(*program.roots) if isinstance(n, TopK)]
    inside = {n for n in walk(*scores) if isinstance(n, Input)}
    outside = {n for n in _until_picked(program) if isinstance(n, Input)}
    return frozenset(
        n.name for n in inside - outside if n.axes and n.lifetime is Lifetime.ACTIVATION
    )


def _until_picked(program: Program) -> set[Node]:
    """Every node but those that only selections read."""
    found: set[Node] = set()
    stack: list[Node] = list(program.roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(() if isinstance(node, TopK) else children(node))
    return found
