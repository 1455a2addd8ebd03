"""What the softmax family's kernels do not handle, each with the line that says so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attncc.codegen.forms import Refusal, SoftmaxFold
from attncc.codegen.plan import Spec
from attncc.dsl.axes import Pattern
from attncc.dsl.graph import axes_of, children, walk
from attncc.dsl.ir import (
    AtQuery,
    Index,
    Input,
    Lifetime,
    Lit,
    Map,
    Node,
    Program,
    Select,
    Size,
    Tensor,
)

TOKENS = "T"
FLOATS = ("fp32", "bf16", "fp16")


def problems(program: Program, fold: SoftmaxFold, spec: Spec) -> Iterator[Refusal]:
    """Every reason why a fold has no kernels of this family."""
    yield from _shape_problems(program, fold, spec)
    over, softmax = fold.over, fold.softmax
    rows = {*fold.batch_axes, *fold.row_axes}
    dots = frozenset(d.node for d in fold.dots)
    yield from _element_problems(softmax.score, rows | {over}, over, dots)
    if softmax.where is not None:
        yield from _element_problems(softmax.where, rows | {over}, over)
        if isinstance(softmax.where, Lit) and not softmax.where.value:
            yield Refusal("a mask that is always false", softmax.loc)
    if softmax.sink is not None:
        yield from _element_problems(softmax.sink, rows, over)
    for dot in fold.dots:
        for node in dot.query:
            yield from _element_problems(node, rows | {*dot.over}, over)
        for node in dot.key:
            yield from _element_problems(node, {*fold.batch_axes, over, *dot.over}, over)
        yield from _operand_problems((*dot.query, *dot.key), spec)
    for node in fold.value:
        yield from _element_problems(node, {*fold.batch_axes, over, *fold.value_axes}, over)
    yield from _operand_problems(fold.value, spec)
    for out in program.outputs:
        axes = rows | {*fold.value_axes}
        yield from _element_problems(out.value, axes, over, frozenset({fold.node}))
        if set(out.pattern.axes) != axes:
            yield Refusal(f"output {out.name} has other axes than its fold", fold.node.loc)


def _shape_problems(program: Program, fold: SoftmaxFold, spec: Spec) -> Iterator[Refusal]:
    loc = fold.node.loc
    if TOKENS not in fold.row_axes:
        yield Refusal("a softmax whose rows are not tokens T", loc)
    if not fold.value_axes:
        yield Refusal("a value without an axis of its own", loc)
    if fold.over != "S" and (spec.packed or spec.lengths):
        yield Refusal(f"a history along {fold.over} in a packed call or beside a cache", loc)
    if spec.lengths and program.history_axis != fold.over:
        yield Refusal("a cache beside a history that does not grow", loc)
    if spec.lengths and not spec.packed and "B" not in fold.batch_axes:
        yield Refusal("a cache without a batch axis B", loc)
    static = dict(spec.static)
    inner = {a for d in fold.dots for a in d.over} | {*fold.value_axes}
    if fold.over in inner or not inner <= static.keys():
        yield Refusal("a contracted axis whose size is not compiled in", loc)
    known = {*fold.batch_axes, *fold.row_axes, *inner, fold.over}
    for t in tensors_of(program, tuple(o.value for o in program.outputs)):
        if not t.scalar and not set(t.pattern.axes) <= known:
            yield Refusal(f"{t.name} has an axis that the fold does not", t.loc)
        both = {TOKENS, fold.over} <= set(t.pattern.axes)
        if both and (spec.packed or spec.lengths):
            yield Refusal(f"{t.name} has both {TOKENS} and {fold.over} in a packed call", t.loc)


def _element_problems(
    root: Node, axes: set[str], over: str, stop: frozenset[Node] = frozenset()
) -> Iterator[Refusal]:
    """Anything below a node that is not element-wise code over loads on the given axes."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node in stop:
            continue
        if not isinstance(node, (Input, Lit, Size, Index, Map, AtQuery, Select)):
            name = type(node).__name__.lower()
            yield Refusal(f"a {name} inside element-wise code of a softmax", node.loc)
            continue
        extra = set(axes_of(node)) - axes
        if extra:
            yield Refusal(f"axis {min(extra)} has no place here", node.loc)
        if isinstance(node, AtQuery):
            if node.over != over or any(isinstance(n, (Index, AtQuery)) for n in walk(node.arg)):
                yield Refusal("at_query of something other than a history tensor", node.loc)
            yield from _element_problems(node.arg, axes | {over}, over)
        else:
            stack.extend(children(node))


def _operand_problems(nodes: Iterable[Node], spec: Spec) -> Iterator[Refusal]:
    dtypes = dict(spec.dtypes)
    for node in walk(*nodes):
        if isinstance(node, Input) and node.axes and dtypes.get(node.name) not in FLOATS:
            yield Refusal(f"an operand stored as {dtypes.get(node.name)}", node.loc)


def mergeable(program: Program, fold: SoftmaxFold, spec: Spec) -> bool:
    """Whether a merge kernel, which knows rows but not sequences, can finish the fold."""
    names = set()
    for node in outside(program, fold):
        if isinstance(node, (AtQuery, Size)) or (isinstance(node, Index) and node.axis == TOKENS):
            return False
        if isinstance(node, Input) and not program.tensor(node.name).scalar:
            names.add(node.name)
    kept = (tensor_pattern(program, spec, program.tensor(n)) for n in names)
    return not spec.packed or all("B" not in p.axes for p in kept)


def _finish_roots(program: Program, fold: SoftmaxFold) -> tuple[Node, ...]:
    sink = fold.softmax.sink
    return (*(o.value for o in program.outputs), *(() if sink is None else (sink,)))


def outside(program: Program, fold: SoftmaxFold) -> Iterator[Node]:
    """Nodes of the epilogue and the sink, without what is below the fold."""
    stack = list(_finish_roots(program, fold))
    while stack:
        node = stack.pop()
        if node != fold.node:
            yield node
            stack.extend(children(node))


def tensors_of(program: Program, roots: Iterable[Node]) -> list[Tensor]:
    """Tensors of the signature that are read below the roots."""
    names = {n.name for n in walk(*roots) if isinstance(n, Input)}
    return [t for t in program.tensors if t.name in names]


def tensor_pattern(program: Program, spec: Spec, t: Tensor) -> Pattern:
    """Memory axes of an input as the kernel sees them: packed rows have no B."""
    rows = {TOKENS, "S"} & set(t.pattern.axes)
    if spec.packed and rows and not (spec.lengths and t.lifetime is Lifetime.CACHE):
        return t.pattern.without("B")
    return t.pattern
