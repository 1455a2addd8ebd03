"""The verifier: every mistake of a traced program, found at once.

Each check is a generator of errors over the program; :func:`verify` runs the table and raises what
it found. It also runs between compiler passes, where anything it finds is the compiler's own bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attncc.dsl.axes import history_dim, union
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
    LOGIC,
    AtQuery,
    Between,
    Contract,
    Cumulative,
    Fn,
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
from attncc.dsl.verify_selections import HISTORY, check_selections


def _declared(program: Program) -> set[str]:
    found = {a for t in program.tensors for a in t.pattern.axes}
    return found | {n.axis for n in walk(*program.roots) if isinstance(n, TopK)}


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


def _histories(program: Program) -> Iterator[AttnccError]:
    """T is the tail of a cache, so every cache says along which axis it grows."""
    for t in program.tensors:
        if t.lifetime is Lifetime.CACHE and history_dim(t.pattern) is None:
            yield LifetimeError(
                "a cache grows along its history axis",
                op=program.name, argument=t.name, expected="an axis S, or blocks (Sb C)",
                found=str(t.pattern), loc=t.loc,
            )  # fmt: skip


def _windows(program: Program) -> Iterator[AttnccError]:
    """A window is pushed once a token and comes back as its push."""
    names = [t.name for t in program.tensors if t.lifetime is Lifetime.WINDOW]
    pushes = [n for n in walk(*program.roots) if isinstance(n, Push)]
    for node in pushes:
        window = node.window
        if not (isinstance(window, Input) and window.lifetime is Lifetime.WINDOW):
            yield LifetimeError(
                "push takes a window of the signature, once a token",
                op=program.name, expected="an ac.Window", found=type(window).__name__, loc=node.loc,
            )  # fmt: skip
        elif node.over not in window.axes or node.over in axes_of(node.row):
            yield UnknownAxisError(
                "the window has the axis of its rows, and a row does not",
                op=program.name, argument=window.name, axis=node.over, expected="a window's axis",
                found=f"window {' '.join(window.axes)}, row {' '.join(axes_of(node.row))}",
                loc=node.loc,
            )  # fmt: skip
    updates = {s.name: s.value for s in program.states}
    for name in names:
        mine = {n.over for n in pushes if isinstance(n.window, Input) and n.window.name == name}
        back = {n for n in walk(updates[name]) if isinstance(n, Push)} if name in updates else set()
        if len(mine) != 1 or not any(_pushes(n, name) for n in back):
            yield LifetimeError(
                "a window comes back as its push along one axis",
                op=program.name, argument=name, expected=f"ac.push({name}, row, axis)",
                found=f"pushed along {' '.join(sorted(mine)) or 'nothing'}",
                loc=updates[name].loc if name in updates else program.tensor(name).loc,
            )  # fmt: skip


def _pushes(node: Push, name: str) -> bool:
    return isinstance(node.window, Input) and node.window.name == name


def _closes(node: Node) -> tuple[str, ...]:
    match node:
        case Contract(over=over) | Reduce(over=over):
            return over
        case Softmax(over=axis) | TopK(over=axis) | Take(over=axis):
            return (axis,)
        case Cumulative(over=axis) | AtQuery(over=axis) | Between(over=axis):
            return (axis,)
        case _:
            return ()


def _operand_axes(node: Node, memo: dict[Node, tuple[str, ...]]) -> tuple[str, ...]:
    match node:
        case Softmax(score=operand) | TopK(score=operand) | Take(table=operand):
            return axes_of(operand, memo)
        case _:
            return union(*(axes_of(c, memo) for c in children(node)))


def _folds(program: Program) -> Iterator[AttnccError]:
    """Axes that are reduced must be there, and a history is closed once."""
    history = {a for t in program.tensors if t.lifetime in HISTORY for a in t.pattern.axes}
    history -= {a for t in program.tensors if t.lifetime not in HISTORY for a in t.pattern.axes}
    closed: dict[Node, frozenset[str]] = {}
    axes: dict[Node, tuple[str, ...]] = {}
    for node in walk(*program.roots):
        below = frozenset[str]().union(*(closed[c] for c in children(node)))
        have = _operand_axes(node, axes)
        for axis in _closes(node):
            if axis in have:
                continue
            if axis in history and axis in below:
                yield FoldClosedTwiceError(
                    "the axis was already reduced in an operand",
                    op=program.name, axis=axis, loc=node.loc,
                    help="reduce once, over the product of everything that has the axis",
                )  # fmt: skip
            else:
                yield UnknownAxisError(
                    "no operand has the axis",
                    op=program.name, axis=axis, loc=node.loc,
                    expected=f"one of: {' '.join(have) or '(none)'}", found=axis,
                )  # fmt: skip
        ends = _closes(node) if isinstance(node, (Contract, Reduce, TopK)) else ()
        closed[node] = (below - frozenset(axes_of(node, axes))) | frozenset(ends)


def _names(program: Program) -> Iterator[AttnccError]:
    declared = _declared(program)
    for node in walk(*program.roots):
        named = node.axis if isinstance(node, (Size, Index)) else None
        if isinstance(node, (AtQuery, Between)):
            named = "T"  # the query's own position
        if named is not None and named not in declared:
            yield UnknownAxisError(
                "the axis is never declared",
                op=program.name, axis=named, expected=f"one of: {' '.join(sorted(declared))}",
                found=named, loc=node.loc,
            )  # fmt: skip
    if program.scan is not None and program.scan not in declared:
        yield UnknownAxisError(
            "no tensor has the axis to scan", op=program.name, axis=program.scan,
            expected=f"one of: {' '.join(sorted(declared))}", found=program.scan, loc=program.loc,
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
    declared = _declared(program)
    for out in program.outputs:
        have = axes_of(out.value) + ((program.scan,) if program.scan else ())
        want = out.pattern.axes
        for axis in have:
            if axis not in want and axis in declared:
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
    """Truth values and numbers do not mix; a mask is counted with ``where(mask, 1, 0)``."""
    memo: dict[Node, Kind] = {}
    for node in walk(*program.roots):
        for i, arg in enumerate(_compared(node)):
            truth = kind_of(arg, memo) is Kind.BOOL
            wants = _wants_truth(node, i, memo)
            if truth != wants:
                what = node.fn.value if isinstance(node, Map) else type(node).__name__.lower()
                yield KindError(
                    f"operand {i + 1} of {what}",
                    op=program.name, expected="a truth value" if wants else "a number",
                    found="a truth value" if truth else "a number", loc=node.loc,
                )  # fmt: skip


def _compared(node: Node) -> tuple[Node, ...]:
    """The operands whose kind matters, but not ``where=``, which :func:`_masks` looks at."""
    match node:
        case Softmax(score=score, sink=sink):
            return (score,) if sink is None else (score, sink)
        case TopK(score=score):
            return (score,)
        case Map() | Contract() | Reduce() | Cumulative() | Between() | Push():
            return children(node)
        case _:
            return ()


def _wants_truth(node: Node, operand: int, memo: dict[Node, Kind]) -> bool:
    if not isinstance(node, Map):
        return False
    if node.fn is Fn.WHERE and operand > 0:  # two truth values or two numbers
        return kind_of(node.args[1], memo) is Kind.BOOL
    return node.fn in LOGIC or node.fn is Fn.WHERE


def _sinks(program: Program) -> Iterator[AttnccError]:
    for node in walk(*program.roots):
        if isinstance(node, Softmax) and node.sink is not None and node.over in axes_of(node.sink):
            yield FreeAxisError(
                "a sink is one logit beside the whole axis, so it cannot have the axis itself",
                op=program.name, argument="sink", axis=node.over,
                expected="a sink without it", found=" ".join(axes_of(node.sink)), loc=node.loc,
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
    _lifetimes, _histories, _names, check_selections, _folds, _kinds, _masks, _sinks, _windows,
    _states, _outputs,
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
