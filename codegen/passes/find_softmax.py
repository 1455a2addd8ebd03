"""Softmax folds: which contractions close a history, with what score and value."""

from __future__ import annotations

from attncc.codegen.forms import Dot, Refusal, SoftmaxFold, SoftmaxForm
from attncc.codegen.passes.find_masks import find_mask
from attncc.codegen.terms import factors
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, children, walk
from attncc.dsl.ir import Contract, Input, Node, Program, Softmax, TopK


class _Stop(Exception):
    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


def _dots(score: Node, over: str) -> tuple[Dot, ...]:
    found = []
    for node in walk(score):
        if not isinstance(node, Contract):
            continue
        query = tuple(a for a in node.args if over not in axes_of(a))
        key = tuple(a for a in node.args if over in axes_of(a))
        if not key:
            continue
        if not query:
            raise _Stop(
                Refusal("a contraction of history tensors alone inside the score", node.loc)
            )
        if any("T" in axes_of(a) for a in key):
            raise _Stop(Refusal("a key operand that depends on the query", node.loc))
        found.append(Dot(node, query, key, node.over))
    return tuple(found)


def _fold(node: Contract) -> SoftmaxFold | None:
    """The fold a contraction closes, or None if no softmax over its axes is a factor."""
    parts = [f for arg in node.args for f in factors(arg)]
    inside = [p for p in parts if isinstance(p, Softmax) and p.over in node.over]
    if not inside:
        return None
    if len(inside) > 1 or len(node.over) > 1:
        raise _Stop(
            Refusal("a product of two softmaxes, or one summed over further axes", node.loc)
        )
    softmax = inside[0]
    over = softmax.over
    value = tuple(p for p in parts if p is not softmax)
    value_all = union(*(axes_of(v) for v in value))
    if any("T" in axes_of(v) for v in value):
        raise _Stop(Refusal("a value that depends on the query as well as on the key", node.loc))
    dots = _dots(softmax.score, over)
    score_axes = set(axes_of(softmax))
    key_axes = set(value_all) | {a for d in dots for k in d.key for a in axes_of(k)}
    batch = tuple(a for a in axes_of(softmax) if a in key_axes and a != over)
    rows = tuple(a for a in axes_of(softmax) if a not in key_axes and a != over)
    return SoftmaxFold(
        node, softmax, over, dots,
        None if softmax.where is None else find_mask(softmax.where, key=over),
        value, batch, rows, tuple(a for a in value_all if a not in score_axes and a != over),
    )  # fmt: skip


def find_softmax(program: Program) -> SoftmaxForm | Refusal:
    """The score form of a program, or the reason why it has none."""
    if program.scan is not None:
        return Refusal("a scan folds a state, not a history", program.loc)
    nodes = list(walk(*program.roots))
    later = [n for n in nodes if isinstance(n, TopK)]
    if later:
        return Refusal("top-k opens a second stage", later[0].loc)
    try:
        folds = [f for n in nodes if isinstance(n, Contract) and (f := _fold(n)) is not None]
    except _Stop as stop:
        return stop.refusal
    if not folds:
        return Refusal("no softmax closes a history", program.loc)
    return _check_rest(program, tuple(folds))


def _check_rest(program: Program, folds: tuple[SoftmaxFold, ...]) -> SoftmaxForm | Refusal:
    """Outside the folds nothing may read the history."""
    closed = {f.node for f in folds}
    over = {f.over for f in folds}
    stack: list[Node] = list(program.roots)
    while stack:
        node = stack.pop()
        if node in closed:
            continue
        if isinstance(node, Softmax) or (isinstance(node, Input) and over & set(node.axes)):
            return Refusal("the history is also read outside its fold", node.loc)
        stack.extend(children(node))
    return SoftmaxForm(folds)
