"""Chooses the order of contractions with several operands by the work that it costs.

Every binary order of a contraction's operands is looked at. One is possible if its products beside
the fold are products of stored tensors, none as large as the scores, and if what meets the
probabilities is summed over the history and nothing else. Of those the fewest multiplications win
(matrix chain order; here with named axes, and with one product that must be the fold).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from attncc.codegen.association import FIRST, Association
from attncc.codegen.forms import Refusal
from attncc.codegen.passes.find_loose import find_loose, flat
from attncc.codegen.passes.order_operands import Order, Search
from attncc.dsl.axes import Pattern
from attncc.dsl.graph import axes_of, rebuild, walk
from attncc.dsl.ir import Contract, Input, Lifetime, Lit, Node, Output, Program, Size, Tensor
from attncc.dsl.memo import once_a_program

MOST = 6
"""Operands of one contraction: 945 orders."""

USUAL = {"B": 1, "T": 4096, "S": 4096}
"""Sizes that nobody says; other axes count as 64. A decode step has one token."""


def bucketed(sizes: Mapping[str, int], phase: str) -> dict[str, int]:
    """Sizes that decide: of batch, tokens and history the next power of two."""
    usual = USUAL | ({"T": 1} if phase == "decode" else {})
    found = {**usual, **sizes}
    return {a: 1 << max(n - 1, 0).bit_length() if a in FIRST else n for a, n in found.items()}


@once_a_program
def is_open(program: Program) -> bool:
    """Whether a program has contractions whose order sizes must choose."""
    return program.scan is None and bool(find_loose(flat(program)))


_FOUND: dict[tuple[object, ...], tuple[Program, Association | Refusal]] = {}
_BUILT: dict[tuple[object, ...], Association] = {}


def associate(
    program: Program, sizes: Mapping[str, int], phase: str,
    stored: frozenset[str] = frozenset(),
) -> Association | Refusal:  # fmt: skip
    """The cheapest possible order.

    Args:
        program: an open one (:func:`is_open`).
        sizes: of every axis, of one sequence each; missing ones are usual.
        phase: ``prefill`` or ``decode``.
        stored: inputs that no matrix product of the runtime takes (quantised histories).

    Returns:
        The order, one object for each program and order, or the reason why there is none.
    """
    decided = tuple(sorted(bucketed(sizes, phase).items()))
    key = (id(program), decided, stored)
    if key not in _FOUND:
        _FOUND[key] = (program, _chosen(program, dict(decided), stored))
    return _FOUND[key][1]


@once_a_program
def typical(program: Program) -> Program:
    """The program itself, or that of an order whose folds are the outputs: for layouts of results.

    Where every order has products after the fold, the fewest.
    """
    if not is_open(program):
        return program
    found = _chosen(program, {}, frozenset(), lambda o: (len(o.after), len(o.before), o.rank))
    return program if isinstance(found, Refusal) else found.program


def _chosen(
    program: Program, sizes: Mapping[str, int], stored: frozenset[str],
    rank: Callable[[Order], tuple[object, ...]] = lambda o: o.rank,
) -> Association | Refusal:  # fmt: skip
    whole = flat(program)
    orders: dict[Contract, Order] = {}
    totals: list[list[int]] = []
    roots = {o.value: o.name for o in whole.outputs}
    for loose in find_loose(whole):
        if len(loose.leaves) > MOST:
            return Refusal(f"a contraction of more than {MOST} operands", loose.node.loc)
        made = {p.name: p for o in orders.values() for p in o.before}
        search = Search(whole, loose, sizes, stored, roots.get(loose.node), made)
        found = sorted(search.orders(), key=rank)
        if not found:
            return Refusal(
                "no order of this contraction has one sum over the history and products of stored "
                "tensors beside it", loose.node.loc,
            )  # fmt: skip
        orders[loose.node] = found[0]
        totals.append([o.flops for o in found])
    lost = _lost(whole, orders, sizes)
    key = (id(program), tuple(o.products for o in orders.values()), tuple(lost.items()))
    if not sizes or key not in _BUILT:
        built = _rebuilt(whole, orders, lost)
        if not sizes:
            return built
        _BUILT[key] = built
    others = tuple(sorted({n for each in totals for n in each[1:]}))
    same = _BUILT[key]
    return replace(same, flops=sum(each[0] for each in totals), others=others)


# --- the program of an order -----------------------------------------------------------------


def _lost(
    program: Program, orders: Mapping[Contract, Order], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Axes whose size the body asks for and that products have summed: the fold has numbers."""
    asked = {n.axis for n in walk(*program.roots) if isinstance(n, Size)}
    products = [p for o in orders.values() for p in (*o.before, *o.after)]
    return {a: sizes.get(a, 64) for p in products for a in p.over if a in asked and a not in FIRST}


def _rebuilt(
    program: Program, orders: Mapping[Contract, Order], lost: Mapping[str, int]
) -> Association:
    memo: dict[Node, Node] = {}

    def visit(node: Node) -> Node:
        if node not in memo:
            order = orders.get(node) if isinstance(node, Contract) else None
            if order is not None:
                left, right = (tuple(map(visit, side)) for side in (order.left, order.right))
                memo[node] = Contract((*left, *right), order.over, loc=node.loc)
            elif isinstance(node, Size) and node.axis in lost:
                memo[node] = Lit(lost[node.axis], loc=node.loc)
            else:
                memo[node] = rebuild(node, visit)
        return memo[node]

    outputs = tuple(_output(o, visit(o.value), o.value in orders) for o in program.outputs)
    before = tuple(dict.fromkeys(p for o in orders.values() for p in o.before))
    after = tuple(p for o in orders.values() for p in o.after)
    inputs = {n.name: n for n in walk(*(o.value for o in outputs)) if isinstance(n, Input)}
    read = {name for p in before for name in (p.left, p.right)}
    histories_read = any(t.lifetime is Lifetime.CACHE and t.name in read for t in program.tensors)
    tensors = [
        t
        for t in program.tensors
        if t.name in inputs or (t.lifetime is Lifetime.CACHE and not histories_read)
    ]
    known = {t.name for t in program.tensors}
    tensors += [
        Tensor(n.name, Pattern(tuple((a,) for a in n.axes)), n.lifetime, loc=n.loc)
        for n in inputs.values()
        if n.name not in known
    ]
    core = replace(program, tensors=tuple(tensors), outputs=outputs)
    return Association(core, before, after, 0, ())


def _output(output: Output, value: Node, ordered: bool) -> Output:
    """An output of the folds: where a product finishes it, with the fold's own axes."""
    axes = axes_of(value)
    if not ordered or set(axes) == set(output.pattern.axes):
        return replace(output, value=value)
    kept = (tuple(a for a in dim if a in axes) for dim in output.pattern.dims)
    new = tuple((a,) for a in axes if a not in output.pattern.axes)
    return Output(output.name, Pattern((*(d for d in kept if d), *new)), value)
