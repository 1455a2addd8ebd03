"""Splits what follows an affine state's read-outs off, where it needs whole rows of them.

A chunk's kernels hold a block of the passive axis, so they have no sum over it: a norm of the
read-out, for one. Such outputs are computed behind them, by a program that carries nothing. The
*core* is the scan with the read-outs as its outputs; *rows* is everything after them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from attncc.codegen.affine_checks import chunk_refusal, stays_in_chunk
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.terms import depends_on, factors
from attncc.dsl.axes import Pattern, union
from attncc.dsl.graph import axes_of, children, rebuild
from attncc.dsl.ir import (
    Contract,
    Index,
    Input,
    Lifetime,
    Map,
    Node,
    Output,
    Program,
    Red,
    Reduce,
    Tensor,
)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """A scan in parts: one after the other they compute what it does.

    Attributes:
        core: the scan; of its outputs those that a chunk's kernels hold, then the read-outs.
        rows: no scan: the other outputs, over the read-outs and the inputs; None where the core has
            them all.
        read_outs: names of the read-outs, outputs of one and inputs of the other.
        sizes: of axes that the call does not have.
        spread: those of them along which each place of the scan has programs of its own.
        ahead: no scans: numbers of rows that the core takes as inputs
            (:mod:`attncc.codegen.passes.split_ahead`).
    """

    core: Program
    rows: Program | None
    read_outs: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()
    spread: tuple[str, ...] = ()
    ahead: tuple[Program, ...] = ()

    @property
    def between(self) -> tuple[Tensor, ...]:
        """What the parts leave each other."""
        made = [o for p in self.ahead for o in p.outputs]
        made += [o for o in self.core.outputs if o.name in self.read_outs]
        return tuple(Tensor(o.name, o.pattern, Lifetime.ACTIVATION) for o in made)


def split_rows(program: Program, form: AffineForm) -> SplitRows | Refusal:
    """Take a scan apart behind its read-outs.

    Args:
        program: a scan with one affine state.
        form: its flat table.

    Returns:
        The two programs; or what keeps the scan out of chunks, where its outputs are not all of it.
    """
    refused = chunk_refusal(program, form)
    if refused is None:
        return Refusal("the kernels of chunks hold all of it", program.loc)
    both = zip(program.outputs, form.outputs, strict=True)
    loose = [out for out, value in both if not stays_in_chunk(value, form)]
    if not loose:
        return refused
    cut = _Cut(program, form)
    behind = [replace(out, value=cut.visit(out.value)) for out in loose]
    if cut.stuck is not None or not cut.found:
        return cut.stuck or refused
    names = cut.names()
    kept = tuple(out for out in program.outputs if out not in loose)
    made = tuple(Output(name, cut.pattern(node, loose[0]), node) for name, node in names.items())
    core = replace(program, outputs=(*kept, *made))
    tensors = tuple(t for t in program.tensors if t.name not in program.state_names)
    tensors += tuple(Tensor(o.name, o.pattern, Lifetime.ACTIVATION, loc=program.loc) for o in made)
    rows = replace(program, tensors=tensors, states=(), outputs=tuple(behind), scan=None)
    return SplitRows(core, rows, tuple(names))


def with_tokens(program: Program, node: Node, visit: Callable[[Node], Node]) -> Node:
    """A value of one token as that of all of them; ``visit`` does its operands."""
    match node:
        case Input(name=name):
            return replace(node, axes=program.tensor(name).pattern.axes)
        case Index(scalar=True):
            return replace(node, scalar=False)
        case _:
            return rebuild(node, visit)


def free_name(stem: str, first: int, taken: set[str]) -> str:
    """Of ``stem`` with a number, from ``first`` on, a name that is not taken; it is then."""
    name = next(n for i in count(first) if (n := f"{stem}{i}") not in taken)
    taken.add(name)
    return name


class _Cut:
    """Rewrites outputs: what a chunk's kernels hold becomes an input, the rest has all tokens."""

    def __init__(self, program: Program, form: AffineForm) -> None:
        self.program, self.form = program, form
        self.held = frozenset({form.state})
        self.found: dict[Node, Input] = {}
        self.stuck: Refusal | None = None
        self._memo: dict[Node, Node] = {}
        self._taken = {t.name for t in program.tensors} | {o.name for o in program.outputs}

    def names(self) -> dict[str, Node]:
        """What the core computes, by name."""
        return {made.name: node for node, made in self.found.items()}

    def pattern(self, node: Node, out: Output) -> Pattern:
        """Layout of a read-out: as the output's, columns that kernels hold blocks of innermost."""
        scan = self.program.scan or "T"
        own = {*axes_of(node), scan}
        order = [a for a in union(out.pattern.axes, axes_of(node)) if a in own]
        inner = [a for a in self.program.tensor(self.form.state).pattern.axes if a in order]
        last = [a for a in inner if a in self.form.passive and a != "B"][-1:]
        first = [a for a in ("B", scan) if a in own]
        return Pattern(tuple((a,) for a in union(first, (a for a in order if a not in last), last)))

    def visit(self, node: Node) -> Node:
        """The value behind the read-outs."""
        if node not in self._memo:
            self._memo[node] = self._behind(node)
        return self._memo[node]

    def _behind(self, node: Node) -> Node:
        if not depends_on(node, self.held):
            return with_tokens(self.program, node, self.visit)
        if self._holds(node):
            return self._as_input(node)
        if isinstance(node, Contract) and set(self.form.active) & set(node.over):
            return self._opened(node)
        if isinstance(node, Input):
            self.stuck = self.stuck or Refusal("an output takes the state itself", node.loc)
            return node
        return rebuild(node, self.visit)

    def _holds(self, node: Node) -> bool:
        """Whether a value is a read-out, or a number of its row times or beside one."""
        if isinstance(node, Contract):
            return set(node.over) == set(self.form.active)
        if not isinstance(node, Map):
            return False
        rest = [a for a in node.args if not depends_on(a, self.held)]
        reads = [a for a in node.args if a not in rest]
        return all(map(self._holds, reads)) and all(map(self._row_number, rest))

    def _row_number(self, node: Node) -> bool:
        """Whether a value without the state is one that a chunk's kernels have for a row."""
        if set(axes_of(node)) & {*self.form.passive} - {"B"}:
            return False
        if isinstance(node, (Contract, Reduce)) and set(node.over) - set(self.form.active):
            return False
        return all(map(self._row_number, children(node)))

    def _opened(self, node: Contract) -> Node:
        """A sum over more than the active axes: of a read-out."""
        active = self.form.active
        if not set(active) <= set(node.over):
            self.stuck = self.stuck or Refusal("a sum over a part of the active axes", node.loc)
            return node
        parts = [f for arg in node.args for f in factors(arg)]
        inner = [p for p in parts if depends_on(p, self.held) or set(active) & set(axes_of(p))]
        outer = [self.visit(p) for p in parts if p not in inner]
        read = self.visit(Contract(tuple(inner), active, loc=node.loc))
        rest = tuple(a for a in node.over if a not in active)
        if outer:
            return Contract((read, *outer), rest, loc=node.loc)
        return Reduce(Red.SUM, read, rest, loc=node.loc)

    def _as_input(self, node: Node) -> Input:
        if node not in self.found:
            name = free_name("readout", len(self.found), self._taken)
            scan = self.program.scan or "T"
            axes = union([scan] if "B" not in axes_of(node) else ["B", scan], axes_of(node))
            self.found[node] = Input(name, axes, Lifetime.ACTIVATION, loc=node.loc)
        return self.found[node]
