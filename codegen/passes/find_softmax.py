"""Folds of a history: which contractions close one, with what score and value."""

from __future__ import annotations

from attncc.codegen.forms import Dot, Refusal, SoftmaxFold, SoftmaxForm
from attncc.codegen.passes.expand_folds import Stop, expand_folds, holds_softmax
from attncc.codegen.passes.find_masks import find_mask
from attncc.codegen.terms import factors, product
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, children, walk
from attncc.dsl.ir import Contract, Input, Lifetime, Node, Program, Softmax, TopK


def find_dots(score: Node, over: str) -> tuple[Dot, ...]:
    """The contractions of a score that become matrix products of a query and a key side."""
    found = []
    for node in walk(score):
        if not isinstance(node, Contract):
            continue
        query = tuple(a for a in node.args if over not in axes_of(a))
        key = tuple(a for a in node.args if over in axes_of(a))
        if not key:
            continue
        if over not in node.over and any("T" in axes_of(a) for a in key):
            continue  # a sum of scores over another axis (indexer heads)
        if not query:
            raise Stop(Refusal("a contraction of history tensors alone inside the score", node.loc))
        if any("T" in axes_of(a) for a in key):
            raise Stop(Refusal("a key operand that depends on the query", node.loc))
        found.append(Dot(node, query, key, node.over))
    return tuple(found)


def _split(node: Contract, histories: frozenset[str]) -> tuple[Node, tuple[Node, ...]] | None:
    """Weight and value factors of a contraction that closes a history, else None."""
    parts = [f for arg in node.args for f in factors(arg)]
    inside = [p for p in parts if isinstance(p, Softmax) and p.over in node.over]
    if inside:
        if len(inside) > 1 or len(node.over) > 1:
            raise Stop(
                Refusal("a product of two softmaxes, or one summed over further axes", node.loc)
            )
        return inside[0], tuple(p for p in parts if p is not inside[0])
    if len(node.over) != 1 or node.over[0] not in histories:
        return None
    over = node.over[0]
    if any(holds_softmax(p, over) for p in parts):
        raise Stop(Refusal("probabilities are used non-linearly", node.loc))
    score = [p for p in node.args if {"T", over} <= set(axes_of(p))]
    value = tuple(p for p in node.args if p not in score)
    return (product(score), value) if score and value else None


def _fold(node: Contract, histories: frozenset[str]) -> SoftmaxFold | None:
    """The fold a contraction closes, or None if it closes no history."""
    parts = _split(node, histories)
    if parts is None:
        return None
    weight, value = parts
    over = node.over[0]
    value_all = union(*(axes_of(v) for v in value))
    if any("T" in axes_of(v) for v in value):
        raise Stop(Refusal("a value that depends on the query as well as on the key", node.loc))
    fold = SoftmaxFold(node, weight, over, (), None, value, (), (), ())
    dots = find_dots(fold.score, over)
    score_axes = tuple(a for a in axes_of(weight) if a != over)
    key_axes = set(value_all) | {a for d in dots for k in d.key for a in axes_of(k)}
    return SoftmaxFold(
        node, weight, over, dots,
        None if fold.where is None else find_mask(fold.where, key=over), value,
        tuple(a for a in score_axes if a in key_axes),
        tuple(a for a in score_axes if a not in key_axes),
        tuple(a for a in value_all if a not in score_axes and a != over),
    )  # fmt: skip


def histories(program: Program) -> frozenset[str]:
    """Axes that a plain sum may close: those of histories alone."""
    held = (Lifetime.CACHE, Lifetime.MEMORY)
    own = {a for t in program.tensors if t.lifetime in held for a in t.pattern.axes}
    others = {a for t in program.tensors if t.lifetime not in held for a in t.pattern.axes}
    others |= {a for o in program.outputs for a in o.pattern.axes}
    return frozenset(own - others - {"B", "T"})


def find_softmax(program: Program) -> SoftmaxForm | Refusal:
    """The score form of a program, or the reason why it has none."""
    if program.scan is not None:
        return Refusal("a scan folds a state, not a history", program.loc)
    later = [n for n in walk(*program.roots) if isinstance(n, TopK)]
    if later:
        return Refusal("top-k opens a second stage", later[0].loc)
    known = histories(program)
    try:
        program = expand_folds(program)
        nodes = [n for n in walk(*program.roots) if isinstance(n, Contract)]
        folds = [f for n in nodes if (f := _fold(n, known)) is not None]
    except Stop as stop:
        return stop.refusal
    if not folds:
        return Refusal("no fold closes a history", program.loc)
    return _check_rest(program, tuple(folds))


def _check_rest(program: Program, folds: tuple[SoftmaxFold, ...]) -> SoftmaxForm | Refusal:
    """Outside the folds nothing may read the history."""
    closed = {f.node for f in folds}
    over = {f.over for f in folds}
    stack: list[Node] = list(program.roots)
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in closed or node in seen:
            continue
        seen.add(node)
        if isinstance(node, Softmax) or (isinstance(node, Input) and over & set(node.axes)):
            return Refusal("the history is also read outside its fold", node.loc)
        stack.extend(children(node))
    return SoftmaxForm(folds, program)
