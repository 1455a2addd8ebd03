"""Affine states that outputs read across: along another axis than the one corrections contract.

The table of the updates is found without the outputs. An output then sums a version of the state
over a passive axis: what it gives has the active axis, along which rows are written. Inside a chunk
that is ``prefix (q . S0) + sum_j (q . u_j) w(j -> t) a_j``, with ``u_j`` and ``a_j`` of the table's
rows and the products of decays ``w`` along the columns of the result.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.forms import AcrossForm, AffineForm, Read, Refusal
from attncc.codegen.passes.affine_chain import Chain
from attncc.codegen.passes.affine_values import Stop, Version
from attncc.codegen.passes.find_affine import find_affine
from attncc.codegen.terms import factors, product
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, rebuild, walk
from attncc.dsl.ir import Contract, Input, Lifetime, Node, Program


def find_across(program: Program) -> AcrossForm | Refusal:
    """The form of a scan, or the first line that stands in its way."""
    core = replace(program, outputs=())
    form = find_affine(core)
    if isinstance(form, Refusal):
        return form
    reads = _Reads(program, form)
    try:
        outputs = tuple(reads.visit(o.value) for o in program.outputs)
    except Stop as stop:
        return stop.refusal
    if not reads.found:
        return Refusal("no output reads the state", program.loc)
    for node in walk(*outputs):
        if reads.over in axes_of(node):
            return Refusal(f"an output has the axis {reads.over} beside its reads", node.loc)
    return AcrossForm(core, form, reads.over, tuple(reads.found), outputs)


class _Reads:
    """Rewrites outputs: each read across becomes an input of its own name."""

    def __init__(self, program: Program, form: AffineForm) -> None:
        self.form = form
        self.axes = program.tensor(form.state).pattern.axes
        self.chain = Chain(form.state, self.axes, form.active)
        self.chain.value(program.states[0].value)
        self.over = ""
        self.found: list[Read] = []
        self._memo: dict[Node, Node] = {}

    def visit(self, node: Node) -> Node:
        """The value with its reads replaced.

        Raises:
            Stop: it reads the state in another way.
        """
        if node not in self._memo:
            self._memo[node] = self._visited(node)
        return self._memo[node]

    def _visited(self, node: Node) -> Node:
        if not self.chain.held(node):
            return node
        if isinstance(node, Input):
            raise Stop(f"the state {node.name} is used other than through its reads", node.loc)
        if not isinstance(node, Contract):
            return rebuild(node, self.visit)
        parts = [f for arg in node.args for f in factors(arg)]
        matrices = [p for p in parts if self.chain.is_matrix(p)]
        if not matrices:
            return rebuild(node, self.visit)
        rest = [p for p in parts if p not in matrices]
        if len(matrices) > 1 or any(map(self.chain.held, rest)):
            raise Stop("a product of two values of the state is not affine", node.loc)
        return self._read(node, matrices[0], rest)

    def _read(self, node: Contract, matrix: Node, rest: list[Node]) -> Input:
        events = len(self.chain.events)
        if self.chain.value(matrix) != Version(events):
            raise Stop("an output reads a state that is not its token's last", node.loc)
        if len(node.over) != 1 or node.over[0] not in self.form.passive or not rest:
            raise Stop(f"an output sums the state over {' '.join(node.over)}", node.loc)
        vector, over = product(rest), node.over[0]
        if set(axes_of(vector)) - {over, "B", *self.form.system}:
            raise Stop("a read vector has an axis of the columns that are read", node.loc)
        if self.over not in ("", over):
            raise Stop(f"outputs read along {self.over} and {over}", node.loc)
        self.over = over
        axes = tuple(a for a in union(self.axes, axes_of(vector)) if a != over)
        known = next((r for r in self.found if r.vector == vector), None)
        if known is None:
            slots, rows = len(self.form.decays), len(self.form.rows)
            known = Read(f"across{len(self.found)}", vector, slots, rows, node.loc)
            self.found.append(known)
        return Input(known.name, axes, Lifetime.WORKSPACE, loc=node.loc)
