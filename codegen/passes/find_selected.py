"""A top-k over the op's own history, and the folds over what it picks: two stages, in order."""

from __future__ import annotations

from collections.abc import Iterator

from attncc.codegen.forms import Refusal, SelectedForm, Selection, SoftmaxFold
from attncc.codegen.passes.expand_folds import Stop, expand_folds
from attncc.codegen.passes.find_masks import find_mask
from attncc.codegen.passes.find_softmax import find_dots
from attncc.codegen.terms import factors
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, children, rebuild, walk
from attncc.dsl.ir import (
    Contract,
    Fn,
    Gather,
    Index,
    Input,
    Lit,
    Map,
    Node,
    Program,
    Red,
    Reduce,
    Softmax,
    TopK,
)

ROWS = ("B", "T")
"""What has one selection each: the tokens of every sequence."""


def find_selected(program: Program) -> SelectedForm | Refusal | None:
    """The selection of a program and the folds over what it picks, or why there are none.

    Returns:
        The two stages; the reason (with its line) why there are none; None without any top-k.
    """
    found = [n for n in walk(*program.roots) if isinstance(n, TopK)]
    if not found:
        return None
    if len(found) > 1:
        return Refusal("several selections in one op", found[1].loc)
    try:
        program = expand_folds(program)
        [node] = [n for n in walk(*program.roots) if isinstance(n, TopK)]
        selection = _selection(program, node)
        folds = tuple(_folds(program, node))
    except Stop as stop:
        return stop.refusal
    return _check_rest(program, SelectedForm(selection, folds, program))


def _selection(program: Program, node: TopK) -> Selection:
    """The stage that closes the history."""
    if node.over != program.history_axis:
        raise Stop(Refusal("a selection from a history that is not the op's own", node.loc))
    if {*axes_of(node)} != {*ROWS, node.axis}:
        raise Stop(Refusal("a selection whose rows are not the tokens of sequences", node.loc))
    dots = find_dots(node.score, node.over)
    products = {d.node for d in dots}
    sums = [
        n for n in walk(node.score)
        if isinstance(n, (Contract, Reduce)) and n not in products
        and node.over in axes_of(n) and any(c in products for c in walk(n))
    ]  # fmt: skip
    for inner in sums:
        if isinstance(inner, Reduce) and inner.red is not Red.SUM:
            raise Stop(Refusal("heads that are not added up", inner.loc))
    heads = {tuple(sorted(n.over)) for n in sums}
    if len(heads) > 1:
        raise Stop(Refusal("sums over different heads in one score", node.score.loc))
    mask = None if node.where is None else find_mask(node.where, key=node.over)
    return Selection(node, dots, next(iter(heads), ()), mask)


def _folds(program: Program, node: TopK) -> Iterator[SoftmaxFold]:
    """The weighted sums over the picked rows."""
    for closing in walk(*program.roots):
        if not isinstance(closing, Contract) or node.axis not in closing.over:
            continue
        parts = [f for arg in closing.args for f in factors(arg)]
        inside = [p for p in parts if isinstance(p, Softmax) and p.over == node.axis]
        if len(inside) != 1 or closing.over != (node.axis,):
            raise Stop(Refusal("picked rows are summed without a softmax", closing.loc))
        [weight] = inside
        if not hides_empty(weight.where, node):
            raise Stop(Refusal("a softmax that does not hide the places of -1", weight.loc))
        yield _fold(closing, weight, tuple(p for p in parts if p is not weight), node)


def _fold(closing: Contract, weight: Softmax, value: tuple[Node, ...], node: TopK) -> SoftmaxFold:
    own = _Ungathered(node)
    where = _beside_empty(weight.where, node)
    core = Softmax(
        own(weight.score), node.over, None if where is None else own(where), weight.sink,
        loc=weight.loc,
    )  # fmt: skip
    value = tuple(own(v) for v in value)
    dots = find_dots(core.score, node.over)
    if any("T" in axes_of(v) for v in value):
        raise Stop(Refusal("a picked row that depends on the query", closing.loc))
    value_all = union(*(axes_of(v) for v in value))
    keyed = {*value_all, *(a for d in dots for k in d.key for a in axes_of(k)), "B"}
    rows = union(ROWS, (a for a in axes_of(core.score) if a != node.over))
    return SoftmaxFold(
        closing, core, node.over, dots, None, value,
        tuple(a for a in rows if a in keyed), tuple(a for a in rows if a not in keyed),
        tuple(a for a in value_all if a not in rows and a != node.over),
    )  # fmt: skip


class _Ungathered:
    """Rewrites ``x[J]`` to ``x``, and J itself to the position: the kernel goes to J's rows."""

    def __init__(self, node: TopK) -> None:
        self.node = node
        self.memo: dict[Node, Node] = {node: Index(node.over, loc=node.loc)}

    def __call__(self, node: Node) -> Node:
        if node not in self.memo:
            if isinstance(node, Gather):
                self.memo[node] = self._row(node)
            elif isinstance(node, (Input, Index)) and self.node.over in axes_of(node):
                raise Stop(Refusal("the history is read beside the picked rows", node.loc))
            else:
                self.memo[node] = rebuild(node, self)
        return self.memo[node]

    def _row(self, node: Gather) -> Node:
        if node.index != self.node:
            raise Stop(Refusal("rows picked by another selection", node.loc))
        if any(isinstance(n, (Gather, TopK)) for n in walk(node.arg)):
            raise Stop(Refusal("a row that is picked twice", node.loc))
        if "T" in axes_of(node.arg):
            raise Stop(Refusal("a picked row that depends on the query", node.loc))
        return node.arg


def hides_empty(where: Node | None, node: TopK) -> bool:
    """Whether a mask has ``J >= 0`` among what must all be true."""
    match where:
        case Map(fn=Fn.AND, args=args):
            return any(hides_empty(a, node) for a in args)
        case Map(fn=Fn.GE, args=(picked, Lit(value=0))):
            return picked == node
        case _:
            return False


def _beside_empty(where: Node | None, node: TopK) -> Node | None:
    """A mask without ``J >= 0``."""
    if not isinstance(where, Map) or where.fn is not Fn.AND:
        return None if hides_empty(where, node) else where
    left, right = (_beside_empty(a, node) for a in where.args)
    if left is None or right is None:
        return left or right
    return Map(Fn.AND, (left, right), loc=where.loc)


def _check_rest(program: Program, form: SelectedForm) -> SelectedForm | Refusal:
    """Outside the two stages nothing may read the history or the picks."""
    node = form.selection.node
    closed = {f.node for f in form.folds}
    stack: list[Node] = [r for r in program.roots if r != node]  # the picks may be a result
    seen: set[Node] = set()
    while stack:
        inner = stack.pop()
        if inner in closed or inner in seen:
            continue
        seen.add(inner)
        if isinstance(inner, (Softmax, TopK, Gather)) or node.over in axes_of(inner):
            return Refusal("the picks or the history are also read elsewhere", inner.loc)
        stack.extend(children(inner))
    if not form.folds and node not in program.roots:
        return Refusal("no fold closes the picked rows", program.loc)
    return form
