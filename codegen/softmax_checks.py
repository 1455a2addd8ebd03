"""What the softmax family's kernels do not handle, each with the line that says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attncc.codegen.forms import Refusal, SoftmaxFold
from attncc.codegen.plan import Spec
from attncc.codegen.quantised import storage_problems
from attncc.dsl.axes import Pattern
from attncc.dsl.facts import cascade
from attncc.dsl.graph import axes_of, children, walk
from attncc.dsl.ir import (
    AtQuery,
    Between,
    Contract,
    Index,
    Input,
    Lifetime,
    Lit,
    Map,
    Node,
    Program,
    Red,
    Reduce,
    Select,
    Size,
    Softmax,
    Take,
    Tensor,
)

TOKENS = "T"
FLOATS = ("fp32", "bf16", "fp16")


def problems(program: Program, folds: tuple[SoftmaxFold, ...], spec: Spec) -> Iterator[Refusal]:
    """Every reason why a program's folds have no kernels of this family."""
    for fold in folds:
        yield from _shape_problems(program, fold, spec)
        yield from _fold_problems(fold, spec)
    yield from _tensor_problems(program, folds, spec)
    yield from storage_problems(program, folds, spec.quantised, spec.target)
    weights = {f.weight for f in folds}
    for fold in folds:
        if any(not any(_shares(b, w) for w in weights) for b in fold.beside):
            yield Refusal("a history of the cascade has no value", fold.node.loc)
    closed = frozenset(f.node for f in folds)
    for out in program.outputs:
        inside = [f for f in folds if f.node in set(walk(out.value))]
        if not inside:
            yield Refusal(f"output {out.name} holds no fold", out.value.loc)
            continue
        axes = {*inside[0].batch_axes, *inside[0].row_axes, *inside[0].value_axes}
        over = inside[0].over
        yield from element_problems(out.value, axes, over, Allowed(stop=closed))
        if set(out.pattern.axes) != axes or any(
            f.value_axes != inside[0].value_axes for f in inside
        ):
            yield Refusal(f"output {out.name} has other axes than its folds", inside[0].node.loc)


def _shares(other: Softmax, weight: Node) -> bool:
    return isinstance(weight, Softmax) and other in cascade(weight) and weight.over == other.over


def _fold_problems(fold: SoftmaxFold, spec: Spec) -> Iterator[Refusal]:
    over = fold.over
    rows = {*fold.batch_axes, *fold.row_axes}
    inside = Allowed(
        frozenset(d.node for d in fold.dots), frozenset(inner_sums(fold)), frozenset(betweens(fold))
    )
    yield from element_problems(fold.score, rows | {over}, over, inside)
    if fold.where is not None:
        yield from element_problems(fold.where, rows | {over}, over)
        if isinstance(fold.where, Lit) and not fold.where.value:
            yield Refusal("a mask that is always false", fold.node.loc)
    if fold.sink is not None:
        yield from element_problems(fold.sink, rows, over)
    summed = {a for n in inner_sums(fold) for a in n.over}
    for dot in fold.dots:
        own = {*dot.over, *summed}
        for node in dot.query:
            yield from element_problems(node, rows | own, over)
        for node in dot.key:
            yield from element_problems(node, {*fold.batch_axes, over} | own, over)
        yield from _operand_problems((*dot.query, *dot.key), spec)
    for node in fold.value:
        yield from element_problems(node, {*fold.batch_axes, over, *fold.value_axes}, over)
    yield from _operand_problems(fold.value, spec)
    for gap in betweens(fold):
        if gap.over != over or any(isinstance(n, (Index, AtQuery)) for n in walk(gap.arg)):
            yield Refusal("between of something other than a history tensor", gap.loc)
        yield from element_problems(gap.arg, rows | {over}, over)


def _shape_problems(program: Program, fold: SoftmaxFold, spec: Spec) -> Iterator[Refusal]:
    loc = fold.node.loc
    if TOKENS not in fold.row_axes:
        yield Refusal("a fold whose rows are not tokens T", loc)
    if not fold.value_axes:
        yield Refusal("a value without an axis of its own", loc)
    foreign = program.history_axis != fold.over
    if fold.over != "S" and spec.packed:
        yield Refusal(f"a history along {fold.over} in a packed call", loc)
    if spec.lengths and not spec.packed and "B" not in fold.batch_axes:
        yield Refusal("a cache without a batch axis B", loc)
    below = [n for n in (fold.score, fold.where, *fold.value) if n is not None]
    for node in walk(*below):
        at = node.axis if isinstance(node, (Index, Size)) else TOKENS
        placed = isinstance(node, (Index, Size, AtQuery, Between)) and at in (TOKENS, "S")
        if foreign and placed and program.history_axis is not None:
            yield Refusal(f"a position of the own history in a fold over {fold.over}", node.loc)
    static = dict(spec.static)
    inner = {a for d in fold.dots for a in d.over} | {*fold.value_axes}
    inner |= {a for n in inner_sums(fold) for a in n.over}
    loose = [a for a in sorted(inner) if a == fold.over or a not in static]
    if loose:
        yield Refusal(f"axis {', '.join(loose)} of a product, whose size is not compiled in", loc)


def _tensor_problems(
    program: Program, folds: tuple[SoftmaxFold, ...], spec: Spec
) -> Iterator[Refusal]:
    known = {a for f in folds for a in (*f.batch_axes, *f.row_axes, *f.value_axes, f.over)}
    known |= {a for f in folds for d in f.dots for a in d.over}
    known |= {a for f in folds for n in inner_sums(f) for a in n.over}
    roots = tuple(o.value for o in program.outputs)
    known |= {n.over for n in walk(*roots) if isinstance(n, Take)}
    for t in tensors_of(program, roots):
        if not t.scalar and not set(t.pattern.axes) <= known:
            yield Refusal(f"{t.name} has an axis that the folds do not", t.loc)
        both = any({TOKENS, f.over} <= set(t.pattern.axes) for f in folds)
        if both and (spec.packed or spec.lengths):
            yield Refusal(f"{t.name} has both {TOKENS} and a history in a packed call", t.loc)


def inner_sums(fold: SoftmaxFold) -> list[Contract | Reduce]:
    """Sums over another axis than the history inside the score, with dots below (indexer heads)."""
    dots = {d.node for d in fold.dots}
    found: list[Contract | Reduce] = []
    for node in walk(fold.score):
        if not isinstance(node, (Contract, Reduce)) or node in dots or fold.over in node.over:
            continue
        if isinstance(node, Reduce) and node.red is not Red.SUM:
            continue
        if fold.over in axes_of(node) and any(n in dots for n in walk(node)):
            found.append(node)
    return found


def betweens(fold: SoftmaxFold) -> list[Between]:
    """Sums over the positions between a key and the query, inside the score."""
    return [n for n in walk(fold.score) if isinstance(n, Between)]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Nodes that something else than element-wise code computes."""

    stop: frozenset[Node] = frozenset()
    sums: frozenset[Node] = frozenset()
    gaps: frozenset[Node] = frozenset()


def element_problems(
    root: Node, axes: set[str], over: str, allowed: Allowed = Allowed()
) -> Iterator[Refusal]:
    """Anything below a node that is not element-wise code over loads on the given axes."""
    stack = [(root, axes)]
    while stack:
        node, axes = stack.pop()
        if node in allowed.stop or node in allowed.gaps:
            continue
        if isinstance(node, (Contract, Reduce)) and node in allowed.sums:
            stack += [(c, axes | {*node.over}) for c in children(node)]
            continue
        if not isinstance(node, (Input, Lit, Size, Index, Map, AtQuery, Select, Take)):
            name = type(node).__name__.lower()
            yield Refusal(f"a {name} inside element-wise code of a fold", node.loc)
            continue
        extra = set(axes_of(node)) - axes
        if extra:
            yield Refusal(f"axis {min(extra)} has no place here", node.loc)
        if isinstance(node, AtQuery):
            if node.over != over or any(isinstance(n, (Index, AtQuery)) for n in walk(node.arg)):
                yield Refusal("at_query of something other than a history tensor", node.loc)
            yield from element_problems(node.arg, axes | {over}, over)
        elif isinstance(node, (Select, Take)):
            stack += [(c, axes | {node.over}) for c in children(node)]
        else:
            stack += [(c, axes) for c in children(node)]


def _operand_problems(nodes: Iterable[Node], spec: Spec) -> Iterator[Refusal]:
    dtypes = dict(spec.dtypes) | {s.name: s.operand for s in spec.quantised}
    for node in walk(*nodes):
        if isinstance(node, Input) and node.axes and dtypes.get(node.name) not in FLOATS:
            yield Refusal(f"an operand stored as {dtypes.get(node.name)}", node.loc)


def mergeable(program: Program, folds: tuple[SoftmaxFold, ...], spec: Spec) -> bool:
    """Whether a merge kernel, which knows rows but not sequences, can finish the folds."""
    names = set()
    for node in outside(program, folds):
        if isinstance(node, (AtQuery, Size)) or (isinstance(node, Index) and node.axis == TOKENS):
            return False
        if isinstance(node, Input) and not program.tensor(node.name).scalar:
            names.add(node.name)
    kept = (tensor_pattern(program, spec, program.tensor(n)) for n in names)
    return not spec.packed or all("B" not in p.axes for p in kept)


def outside(program: Program, folds: tuple[SoftmaxFold, ...]) -> Iterator[Node]:
    """Nodes of the epilogue and the sinks, without what is below the folds."""
    closed = {f.node for f in folds}
    stack = [o.value for o in program.outputs]
    stack += list({f.sink: None for f in folds if f.sink is not None})
    while stack:
        node = stack.pop()
        if node not in closed:
            yield node
            stack.extend(children(node))


def tensors_of(program: Program, roots: Iterable[Node]) -> list[Tensor]:
    """Tensors of the signature that are read below the roots."""
    names = {n.name for n in walk(*roots) if isinstance(n, Input)}
    return [t for t in program.tensors if t.name in names]


def tensor_pattern(program: Program, spec: Spec, t: Tensor) -> Pattern:
    """Memory axes of an input as the kernel sees them: packed rows have no B, pages their own."""
    pages = dict(spec.pages)
    if t.name in pages:
        return pages[t.name]
    rows = {TOKENS, "S"} & set(t.pattern.axes)
    if spec.packed and rows and not (spec.lengths and t.lifetime is Lifetime.CACHE):
        return t.pattern.without("B")
    return t.pattern
