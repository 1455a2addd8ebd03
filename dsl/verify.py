"""The verifier: every mistake of a traced program, found at once.

Each check is a generator of errors over the program; :func:`verify` runs the table and raises what
it found. It also runs between compiler passes, where anything it finds is the compiler's own bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attncc.dsl.axes import union
from attncc.dsl.errors import (
    AttnccError,
    FoldClosedTwiceError,
    FreeAxisError,
    KindError,
    LifetimeError,
    MaskError,
    MissingAxisError,
    SeveralErrors,
    StateAxesError,
    UnknownAxisError,
)
from attncc.dsl.graph import axes_of, children, kind_of, walk
from attncc.dsl.ir import (
    COMPARISONS,
    LOGIC,
    AtQuery,
    Between,
    Contract,
    Cumulative,
    Fn,
    Gather,
    Index,
    Input,
    Kind,
    Lifetime,
    Map,
    Node,
    Program,
    Push,
    Reduce,
    Size,
    Softmax,
    Take,
    TopK,
)

HISTORY = (Lifetime.CACHE, Lifetime.MEMORY)


def _declared(program: Program) -> set[str]:
    found = {a for t in program.tensors for a in t.pattern.axes}
    found |= {n.axis for n in walk(*program.roots) if isinstance(n, TopK)}
    return found | {a for n in walk(*program.roots) if isinstance(n, Push) for a in (n.over,)}


def _lifetimes(program: Program) -> Iterator[AttnccError]:
    for t in program.tensors:
        if t.lifetime in (Lifetime.STATE, Lifetime.WINDOW) and program.scan is None:
            yield LifetimeError(
                "a state is carried from token to token",
                op=program.name,
                argument=t.name,
                expected='scan="T" in the decorator',
                found="no scan",
                loc=t.loc,
            )
        if t.lifetime in HISTORY and program.scan is not None:
            yield LifetimeError(
                "a scan's body sees one token and its states, not a history",
                op=program.name,
                argument=t.name,
                expected="Activation or State",
                found=t.lifetime.value,
                loc=t.loc,
            )
        if t.lifetime in (Lifetime.STATE, Lifetime.WINDOW) and program.scan in t.pattern.axes:
            yield StateAxesError(
                "a state has no axis of tokens",
                op=program.name,
                argument=t.name,
                axis=program.scan,
                found=str(t.pattern),
                loc=t.loc,
            )


def _closes(node: Node) -> tuple[str, ...]:
    match node:
        case Contract(over=over) | Reduce(over=over):
            return over
        case Softmax(over=axis) | TopK(over=axis) | Gather(over=axis) | Take(over=axis):
            return (axis,)
        case Cumulative(over=axis) | AtQuery(over=axis) | Between(over=axis):
            return (axis,)
        case _:
            return ()


def _operand_axes(node: Node) -> tuple[str, ...]:
    match node:
        case Softmax(score=score):
            return axes_of(score)
        case TopK(score=score):
            return axes_of(score)
        case Take(table=table):
            return axes_of(table)
        case Gather(arg=arg):
            return axes_of(arg)
        case _:
            return union(*(axes_of(c) for c in children(node)))


def _folds(program: Program) -> Iterator[AttnccError]:
    """Axes that are reduced must be there, and a history is closed once."""
    history = {a for t in program.tensors if t.lifetime in HISTORY for a in t.pattern.axes}
    history -= {a for t in program.tensors if t.lifetime not in HISTORY for a in t.pattern.axes}
    closed: dict[Node, frozenset[str]] = {}
    for node in walk(*program.roots):
        below = frozenset[str]().union(*(closed[c] for c in children(node)))
        have = _operand_axes(node)
        for axis in _closes(node):
            gone = [c for c in children(node) if axis in closed[c] and axis not in axes_of(c)]
            if axis in history and gone:
                yield FoldClosedTwiceError(
                    "the axis was already reduced in an operand",
                    op=program.name, axis=axis, loc=node.loc,
                    help="reduce once, over the product of everything that has the axis",
                )  # fmt: skip
            elif axis not in have:
                yield UnknownAxisError(
                    "no operand has the axis",
                    op=program.name, axis=axis, loc=node.loc,
                    expected=f"one of: {' '.join(have) or '(none)'}", found=axis,
                )  # fmt: skip
        ends = _closes(node) if isinstance(node, (Contract, Reduce, TopK)) else ()
        closed[node] = (below - frozenset(axes_of(node))) | frozenset(ends)


def _names(program: Program) -> Iterator[AttnccError]:
    declared = _declared(program)
    for node in walk(*program.roots):
        if isinstance(node, (Size, Index)) and node.axis not in declared:
            yield UnknownAxisError(
                "the axis is never declared",
                op=program.name, axis=node.axis, expected=f"one of: {' '.join(sorted(declared))}",
                found=node.axis, loc=node.loc,
            )  # fmt: skip
    for out in program.outputs:
        for axis in out.pattern.axes:
            if axis not in declared:
                yield UnknownAxisError(
                    "the output's pattern names an axis that is never declared",
                    op=program.name, argument=f"out[{out.name}]", axis=axis,
                    expected=f"one of: {' '.join(sorted(declared))}", found=axis, loc=program.loc,
                )  # fmt: skip


def _outputs(program: Program) -> Iterator[AttnccError]:
    for out in program.outputs:
        have = axes_of(out.value) + ((program.scan,) if program.scan else ())
        want = out.pattern.axes
        for axis in have:
            if axis not in want:
                yield FreeAxisError(
                    "the output keeps an axis its pattern does not name",
                    op=program.name,
                    argument=f"out[{out.name}]",
                    axis=axis,
                    expected=str(out.pattern),
                    found=" ".join(have),
                    loc=out.value.loc,
                    help="sum it, name it in out=, or share an axis: (Hkv G) shares Hkv",
                )
        declared = _declared(program)
        for axis in want:
            if axis not in have and axis in declared:
                yield MissingAxisError(
                    "the output lacks an axis its pattern names",
                    op=program.name,
                    argument=f"out[{out.name}]",
                    axis=axis,
                    expected=str(out.pattern),
                    found=" ".join(have) or "(none)",
                    loc=out.value.loc,
                )


def _states(program: Program) -> Iterator[AttnccError]:
    for update in program.states:
        want = {a for a in program.tensor(update.name).pattern.axes if a != program.scan}
        have = set(axes_of(update.value))
        if have != want:
            yield StateAxesError(
                "the state comes back with other axes",
                op=program.name, argument=update.name, expected=" ".join(sorted(want)),
                found=" ".join(sorted(have)) or "(none)", loc=update.value.loc,
            )  # fmt: skip


def _kinds(program: Program) -> Iterator[AttnccError]:
    for node in walk(*program.roots):
        if not isinstance(node, Map):
            continue
        for i, arg in enumerate(node.args):
            truth = kind_of(arg) is Kind.BOOL
            wants = node.fn in LOGIC or (node.fn is Fn.WHERE and i == 0)
            free = node.fn is Fn.WHERE and i > 0
            if truth != wants and not free and not (node.fn in COMPARISONS and not truth):
                yield KindError(
                    f"operand {i + 1} of {node.fn.value}",
                    op=program.name, expected="a truth value" if wants else "a number",
                    found="a truth value" if truth else "a number", loc=node.loc,
                )  # fmt: skip


def _masks(program: Program) -> Iterator[AttnccError]:
    foreign = {a for t in program.tensors if t.lifetime is Lifetime.MEMORY for a in t.pattern.axes}
    foreign -= {
        a for t in program.tensors if t.lifetime is not Lifetime.MEMORY for a in t.pattern.axes
    }
    for node in walk(*program.roots):
        if not isinstance(node, (Softmax, TopK)) or node.where is None:
            continue
        if kind_of(node.where) is not Kind.BOOL:
            yield MaskError(
                "where= is not a truth value",
                op=program.name,
                axis=node.over,
                expected="a comparison",
                found="a number",
                loc=node.loc,
            )
        positions = {n.axis for n in walk(node.where) if isinstance(n, Index)}
        if node.over in foreign and {"T", node.over} <= positions:
            yield MaskError(
                "a causal mask over a foreign memory: its positions are not this sequence's",
                op=program.name,
                axis=node.over,
                expected="a mask of S alone, or a Cache",
                found="T against S",
                loc=node.loc,
            )


CHECKS: tuple[Callable[[Program], Iterator[AttnccError]], ...] = (
    _lifetimes, _names, _folds, _kinds, _masks, _states, _outputs,
)  # fmt: skip


def verify(program: Program) -> None:
    """Raise every mistake of a program: the one error itself, or ``SeveralErrors``."""
    found: dict[str, AttnccError] = {}
    for check in CHECKS:
        for error in check(program):
            found.setdefault(str(error), error)
    errors = tuple(found.values())
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SeveralErrors(errors, op=program.name)


def inputs_of(node: Node) -> set[str]:
    """Names of the inputs a value reads."""
    return {n.name for n in walk(node) if isinstance(n, Input)}
