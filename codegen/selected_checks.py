"""What the kernels of a selection do not handle, each with the line that says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attncc.codegen.forms import Dot, Refusal, SelectedForm, Selection, SoftmaxFold
from attncc.codegen.plan import Spec
from attncc.codegen.quantised import E4M3, quantised_input
from attncc.codegen.softmax_checks import FLOATS, TOKENS, Allowed, element_problems, outside
from attncc.dsl.graph import axes_of, children, walk
from attncc.dsl.ir import (
    AtQuery,
    Contract,
    Input,
    Lifetime,
    Node,
    Program,
    Reduce,
    Select,
    Take,
)

MOST = 1 << 14
"""The most rows that are picked: they are sorted in one program."""


def selected_problems(form: SelectedForm, spec: Spec) -> Iterator[Refusal]:
    """Every reason why a selection and its folds have no kernels."""
    own, program = form.selection, form.program
    yield from _selection_problems(own, spec)
    for fold in form.folds:
        yield from _fold_problems(form, fold, spec)
    closed = frozenset(f.node for f in form.folds)
    if sum(out.value == own.node for out in program.outputs) > 1:
        yield Refusal("picks that are two results", own.node.loc)
    for out in program.outputs:
        if out.value == own.node:
            dims = out.pattern.dims
            if dims[-1] != (own.node.axis,) or any(len(d) > 1 for d in dims):
                yield Refusal(f"picks laid out as [{out.pattern}]", own.node.loc)
            continue
        inside = [f for f in form.folds if f.node in set(walk(out.value))]
        if not inside:
            yield Refusal(f"output {out.name} holds no fold", out.value.loc)
            continue
        axes = {*inside[0].batch_axes, *inside[0].row_axes, *inside[0].value_axes}
        yield from element_problems(out.value, axes, own.node.over, Allowed(stop=closed))
        if set(out.pattern.axes) != axes:
            yield Refusal(f"output {out.name} has other axes than its fold", inside[0].node.loc)
    yield from _tensor_problems(form, spec)


def _selection_problems(own: Selection, spec: Spec) -> Iterator[Refusal]:
    node, over = own.node, own.node.over
    if node.k > MOST:
        yield Refusal(f"more than {MOST} rows picked of a history", node.loc)
    if not own.dots:
        yield Refusal("a score without a matrix product", node.score.loc)
    static = dict(spec.static)
    if not {*own.heads, *(a for d in own.dots for a in d.over)} <= static.keys():
        yield Refusal("a contracted axis whose size is not compiled in", node.loc)
    products = frozenset(d.node for d in own.dots)
    sums = frozenset(
        n for n in walk(node.score)
        if isinstance(n, (Contract, Reduce)) and n not in products and over in axes_of(n)
    )  # fmt: skip
    rows = {"B", TOKENS, over}
    yield from element_problems(node.score, rows, over, Allowed(products, sums))
    if own.heads:
        yield from _beside(node.score, products, sums)
    if node.where is not None:
        yield from element_problems(node.where, rows, over)
    for inner in walk(node.score, *(n for n in (node.where,) if n is not None)):
        if isinstance(inner, (AtQuery, Take, Select)):
            yield Refusal("a value at another place than its own in a selection", inner.loc)
    for dot in own.dots:
        yield from _dot_problems(own, dot, spec)
    yield from _quantised_problems(node.score, products, spec)


def _beside(
    score: Node, products: frozenset[Contract], sums: frozenset[Contract | Reduce]
) -> Iterator[Refusal]:
    """Products that no sum over heads closes: a tile's columns are heads, not tokens alone."""
    stack, seen = [score], set[Node]()
    while stack:
        inner = stack.pop()
        if inner in sums or inner in seen:
            continue
        seen.add(inner)
        if inner in products:
            yield Refusal("a product beside the sum over heads", inner.loc)
        else:
            stack.extend(children(inner))


def _dot_problems(own: Selection, dot: Dot, spec: Spec) -> Iterator[Refusal]:
    """Products of a query that has tokens and heads, and of a key that has neither."""
    over = own.node.over
    if any({*axes_of(q)} - {"B", TOKENS, *own.heads, *dot.over} for q in dot.query):
        yield Refusal("a query with axes that the selection does not sum", dot.node.loc)
    if any({*axes_of(k)} - {"B", over, *dot.over} for k in dot.key):
        yield Refusal("a key with axes that the selection does not sum", dot.node.loc)
    yield from _stored_problems((*dot.query, *dot.key), spec, plain=True)
    yield from _scale_problems(dot.key, dot.over, spec)


def _fold_problems(form: SelectedForm, fold: SoftmaxFold, spec: Spec) -> Iterator[Refusal]:
    over, first = fold.over, form.folds[0]
    if fold.weight != first.weight or {*fold.batch_axes} != {*first.batch_axes}:
        yield Refusal("several softmaxes of one selection", fold.node.loc)
    if not fold.value_axes:
        yield Refusal("a value without an axis of its own", fold.node.loc)
    static = dict(spec.static)
    if not {*fold.value_axes, *(a for d in fold.dots for a in d.over)} <= static.keys():
        yield Refusal("a contracted axis whose size is not compiled in", fold.node.loc)
    rows = {*fold.batch_axes, *fold.row_axes}
    products = frozenset(d.node for d in fold.dots)
    yield from element_problems(fold.score, rows | {over}, over, Allowed(products))
    if fold.where is not None:
        yield from element_problems(fold.where, rows | {over}, over)
    if fold.sink is not None:
        yield from element_problems(fold.sink, rows, over)
    yield from _operand_problems(fold, spec)
    below = [n for n in (fold.score, fold.where, *fold.value) if n is not None]
    for inner in walk(*below):
        if isinstance(inner, AtQuery):
            yield Refusal("a value at the query's position beside picked rows", inner.loc)


def _operand_problems(fold: SoftmaxFold, spec: Spec) -> Iterator[Refusal]:
    """Operands of a fold's products that are something else than loads and element-wise code."""
    over, rows = fold.over, {*fold.batch_axes, *fold.row_axes}
    for dot in fold.dots:
        for query in dot.query:
            yield from element_problems(query, rows | {*dot.over}, over)
        for key in dot.key:
            yield from element_problems(key, {*fold.batch_axes, over, *dot.over}, over)
        yield from _stored_problems((*dot.query, *dot.key), spec, plain=False)
        yield from _scale_problems(dot.key, dot.over, spec)
    for value in fold.value:
        yield from element_problems(value, {*fold.batch_axes, over, *fold.value_axes}, over)
    yield from _stored_problems(fold.value, spec, plain=False)
    yield from _scale_problems(fold.value, fold.value_axes, spec)


def _scale_problems(
    nodes: tuple[Node, ...], over: tuple[str, ...], spec: Spec
) -> Iterator[Refusal]:  # fmt: skip
    """A quantised operand stands alone, and each of its rows has one scale."""
    names = {s.name for s in spec.quantised}
    for node in nodes:
        held = quantised_input(spec.quantised, node)
        inside = {n.name for n in walk(node) if isinstance(n, Input)} & names
        if inside and (held is None or len(nodes) > 1):
            yield Refusal(f"{min(inside)}, which is quantised, in a product of several", node.loc)
        elif held is not None and over != (held.axis,):
            yield Refusal(f"{held.name} has scales along {held.axis}", node.loc)
        elif held is not None and held.block != dict(spec.static).get(held.axis):
            yield Refusal(f"{held.name} has several scales a row, under a selection", node.loc)


def _stored_problems(
    nodes: tuple[Node, ...], spec: Spec, *, plain: bool
) -> Iterator[Refusal]:  # fmt: skip
    """Operands stored as something that is not multiplied; plain e4m3 may be."""
    for node in walk(*nodes):
        if isinstance(node, Input) and node.axes:
            dtype = spec.operand(node.name)
            if dtype not in FLOATS and not (plain and dtype == E4M3):
                yield Refusal(f"an operand stored as {dtype}", node.loc)


def _quantised_problems(
    score: Node, products: frozenset[Contract], spec: Spec
) -> Iterator[Refusal]:
    """Quantised histories outside the products, or as a query."""
    held = {s.name for s in spec.quantised}
    keys = {k for n in walk(score) if n in products and isinstance(n, Contract) for k in n.args}
    parents = [n for n in walk(score) if n not in products]
    for node in parents:
        if isinstance(node, Input) and node.name in held and node not in keys:
            yield Refusal(f"{node.name}, which is quantised, in element-wise code", node.loc)
    if held and int(spec.target.removeprefix("sm_")) < 89:
        yield Refusal(f"e4m3 needs sm_89, not {spec.target}")


def _tensor_problems(form: SelectedForm, spec: Spec) -> Iterator[Refusal]:
    program, own = form.program, form.selection
    if spec.lengths and not spec.packed:
        for t in program.tensors:
            if t.lifetime is Lifetime.CACHE and "B" not in t.pattern.axes:
                yield Refusal("a cache without a batch axis B", t.loc)
    for t in program.tensors:
        if t.lifetime is Lifetime.MEMORY:
            yield Refusal("a foreign memory beside a selection", t.loc)
        if {TOKENS, own.node.over} <= {*t.pattern.axes} and (spec.packed or spec.lengths):
            yield Refusal(f"{t.name} has both {TOKENS} and a history in a packed call", t.loc)
    for node in outside(only_folds(form), form.folds):
        if isinstance(node, AtQuery):
            yield Refusal("a value at the query's position in an epilogue", node.loc)


def only_folds(form: SelectedForm) -> Program:
    """The program with the outputs that a fold writes; the picks are written by the selection."""
    node = form.selection.node
    return replace(form.program, outputs=tuple(o for o in form.program.outputs if o.value != node))
