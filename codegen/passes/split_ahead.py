"""Splits numbers of rows off that are sums, such as the norm of a key: they are found ahead.

They depend on no state, so a program that carries nothing computes them for all tokens, and the
scan takes them as inputs: what is left of it is element-wise code around its contractions.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.forms import AffineForm
from attncc.codegen.passes.split_rows import free_name, with_tokens
from attncc.codegen.terms import depends_on
from attncc.dsl.axes import Pattern, union
from attncc.dsl.graph import axes_of, rebuild, walk
from attncc.dsl.ir import (
    Contract,
    Input,
    Lifetime,
    Map,
    Node,
    Output,
    Program,
    Reduce,
    Select,
    Tensor,
)


def split_ahead(program: Program, form: AffineForm) -> tuple[tuple[Program, ...], Program] | None:
    """The programs of a scan's numbers of rows, and the scan that takes them; None for no such.

    Args:
        program: a scan with one affine state.
        form: its flat table.
    """
    cut = _Numbers(program, form)
    states = tuple(replace(s, value=cut.visit(s.value)) for s in program.states)
    outputs = tuple(replace(o, value=cut.visit(o.value)) for o in program.outputs)
    if not cut.found:
        return None
    made: dict[Pattern, list[Output]] = {}
    for node, number in cut.found.items():
        pattern = cut.pattern(node)
        made.setdefault(pattern, []).append(Output(number.name, pattern, cut.with_tokens(node)))
    plain = tuple(t for t in program.tensors if t.name not in program.state_names)
    ahead = tuple(
        replace(program, tensors=plain, states=(), outputs=tuple(group), scan=None)
        for group in made.values()
    )
    numbers = [
        Tensor(o.name, o.pattern, Lifetime.ACTIVATION, loc=o.value.loc)
        for group in made.values() for o in group
    ]  # fmt: skip
    core = replace(program, tensors=(*program.tensors, *numbers), states=states, outputs=outputs)
    return ahead, core


class _Numbers:
    """Finds the largest values without the state that are sums, one number a row."""

    def __init__(self, program: Program, form: AffineForm) -> None:
        self.program, self.scan = program, program.scan or "T"
        self.held = frozenset({form.state})
        self.columns = {*form.active, *form.passive} - {"B"}
        self.found: dict[Node, Input] = {}
        self._taken = {t.name for t in program.tensors} | {o.name for o in program.outputs}
        self._memo: dict[Node, Node] = {}
        self._long: dict[Node, Node] = {}

    def visit(self, node: Node) -> Node:
        """The value, with numbers of rows as inputs."""
        if node not in self._memo:
            self._memo[node] = self._visited(node)
        return self._memo[node]

    def _visited(self, node: Node) -> Node:
        if self._is(node):
            return self._as_input(node)
        if isinstance(node, Select) and isinstance(node.arg, Map):  # a factor each, for the table
            picked = (replace(node, arg=a) if node.over in axes_of(a) else a for a in node.arg.args)
            return self.visit(replace(node.arg, args=tuple(picked)))
        return rebuild(node, self.visit)

    def with_tokens(self, node: Node) -> Node:
        """A value of one token as that of all of them."""
        if node not in self._long:
            self._long[node] = with_tokens(self.program, node, self.with_tokens)
        return self._long[node]

    def pattern(self, node: Node) -> Pattern:
        """Layout of a number: sequences and tokens outermost."""
        return Pattern(tuple((a,) for a in union(["B", self.scan], axes_of(node))))

    def _is(self, node: Node) -> bool:
        if depends_on(node, self.held) or self.columns & set(axes_of(node)):
            return False
        under = list(walk(node))
        inputs = {n.name for n in under if isinstance(n, Input)}
        moves = any(self.scan in self.program.tensor(n).pattern.axes for n in inputs)
        sums = any(isinstance(n, (Contract, Reduce)) for n in under)
        return moves and sums and "B" in axes_of(node)

    def _as_input(self, node: Node) -> Input:
        if node not in self.found:
            name = free_name("number", len(self.found), self._taken)
            axes = tuple(a for a in self.pattern(node).axes if a != self.scan)
            self.found[node] = Input(name, axes, Lifetime.ACTIVATION, loc=node.loc)
        return self.found[node]
