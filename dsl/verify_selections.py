"""What may be selected: rows of a history, read from that same history."""

from __future__ import annotations

from collections.abc import Iterator

from attncc.dsl.axes import history_dim
from attncc.dsl.errors import AttnccError, SelectionError
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Gather, Input, Lifetime, Node, Program, Tensor, TopK

HISTORY = (Lifetime.CACHE, Lifetime.MEMORY)


def check_selections(program: Program) -> Iterator[AttnccError]:
    """A top-k closes a history; what it picks are rows of that history and of no other."""
    held = {a for t in program.tensors for a in _rows(t)}
    histories = held - {
        a for t in program.tensors if t.lifetime not in HISTORY for a in t.pattern.axes
    } - {"B"}  # fmt: skip
    for node in walk(*program.roots):
        if isinstance(node, TopK) and node.over not in histories:
            yield SelectionError(
                "a top-k picks rows of a history",
                op=program.name, axis=node.over, loc=node.loc,
                expected=f"one of: {' '.join(sorted(histories)) or '(no history)'}",
                found=node.over,
            )  # fmt: skip
        elif isinstance(node, Gather):
            yield from _gathers(program, node)


def _rows(held: Tensor) -> tuple[str, ...]:
    """Axes along which a history's rows may lie; a memory does not say which of its own it is."""
    match held.lifetime:
        case Lifetime.CACHE:
            return history_dim(held.pattern) or ()
        case Lifetime.MEMORY:
            return held.pattern.axes
        case _:
            return ()


def _gathers(program: Program, node: Gather) -> Iterator[AttnccError]:
    """Rows that were picked by position are those of the history that was scored."""
    if node.over not in axes_of(node.arg):
        yield SelectionError(
            "rows are picked of the history that was scored, and of no other",
            op=program.name, axis=node.over, loc=node.loc,
            expected=f"a tensor with {node.over}",
            found=" ".join(axes_of(node.arg)) or "(no axis)",
        )  # fmt: skip
        return
    index = node.index
    assert isinstance(index, TopK)
    scored, read = (_owners(n, node.over) for n in (index.score, node.arg))
    if scored and read and not scored & read:
        yield SelectionError(
            "rows are picked of the history that was scored, and of no other",
            op=program.name, axis=node.over, loc=node.loc,
            expected=" ".join(sorted(o.value for o in scored)),
            found=" ".join(sorted(o.value for o in read)),
        )  # fmt: skip


def _owners(root: Node, axis: str) -> set[Lifetime]:
    """Whose histories along an axis a value is made from."""
    return {
        n.lifetime for n in walk(root)
        if isinstance(n, Input) and axis in n.axes and n.lifetime in HISTORY
    }  # fmt: skip
