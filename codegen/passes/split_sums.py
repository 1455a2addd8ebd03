"""Cuts a scan along an axis that only its outputs sum over, for steps with many programs.

A step whose sums go over every axis of its state needs a whole state in one program. Where an axis
is summed by read-outs alone (the update of a state never is), each part of it is a state of its
own: the *core* is the scan with the axis as two, parts and places in a part, and gives one partial
sum a part; *rows* adds them, in order, and computes what follows.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.forms import Refusal
from attncc.codegen.passes.split_rows import SplitRows, free_name, with_tokens
from attncc.codegen.terms import depends_on_state
from attncc.dsl.axes import Pattern, union
from attncc.dsl.graph import axes_of, rebuild, walk
from attncc.dsl.ir import (
    Contract,
    Index,
    Input,
    Lifetime,
    Lit,
    Node,
    Output,
    Program,
    Red,
    Reduce,
    Select,
    Size,
    Take,
    Tensor,
)


def cuttable(program: Program) -> tuple[str, ...]:
    """Axes of all states that read-outs sum over and nothing else does."""
    held = [program.tensor(n).pattern.axes for n in program.state_names]
    if not held or program.scan is None:
        return ()
    found = [a for a in held[0] if a != "B" and all(a in axes for axes in held)]
    return tuple(a for a in found if _only_read(program, a))


def _only_read(program: Program, axis: str) -> bool:
    """Whether every sum over an axis is a read-out of an output, and nothing else looks at it."""
    summed = False
    for root in program.roots:
        output = any(root is o.value for o in program.outputs)
        for node in walk(root):
            match node:
                case Contract(over=over) | Reduce(over=over) if axis in over:
                    if not output or not depends_on_state(node):
                        return False
                    summed = True
                case Index(axis=own) | Select(over=own) | Take(over=own) if own == axis:
                    return False
                case _:
                    continue
    return summed and not any(axis in o.pattern.axes for o in program.outputs)


def split_sums(program: Program, axis: str, size: int, parts: int) -> SplitRows | Refusal:
    """Cut a scan along an axis.

    Args:
        program: a scan.
        axis: one of :func:`cuttable`.
        size: of the axis.
        parts: how many parts it is cut into.
    """
    if axis not in cuttable(program) or size % parts:
        return Refusal(f"{axis} is not cut into {parts} parts", program.loc)
    cut = _Cut(program, axis, size)
    behind = tuple(replace(o, value=cut.behind(o.value)) for o in program.outputs)
    states = tuple(replace(s, value=cut.inside(s.value)) for s in program.states)
    made = tuple(Output(n.name, Pattern(tuple((a,) for a in n.axes)), v) for v, n in cut.found)
    tensors = tuple(replace(t, pattern=cut.pattern(t.pattern)) for t in program.tensors)
    core = replace(program, tensors=tensors, states=states, outputs=made)
    own = tuple(t for t in program.tensors if t.name not in program.state_names)
    own += tuple(Tensor(o.name, o.pattern, Lifetime.ACTIVATION, loc=program.loc) for o in made)
    rows = replace(program, tensors=own, states=(), outputs=behind, scan=None)
    names = tuple(o.name for o in made)
    return SplitRows(core, rows, names, ((cut.part, parts), (cut.place, size // parts)))


class _Cut:
    """Rewrites a body: inside with two axes for one, behind with sums over parts."""

    def __init__(self, program: Program, axis: str, size: int) -> None:
        self.program, self.axis, self.size = program, axis, size
        taken = {a for t in program.tensors for a in t.pattern.axes}
        self.part = next(n for i in range(1000) if (n := f"{axis}part{i or ''}") not in taken)
        self.place = next(n for i in range(1000) if (n := f"{axis}in{i or ''}") not in taken)
        self.found: list[tuple[Node, Input]] = []
        self._taken = {t.name for t in program.tensors} | {o.name for o in program.outputs}
        self._memo: dict[tuple[Node, bool], Node] = {}

    def axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Names of axes with two for the one."""
        return union(*((self.part, self.place) if a == self.axis else (a,) for a in names))

    def pattern(self, pattern: Pattern) -> Pattern:
        """A layout with two axes for one: the memory is the same."""
        return Pattern(tuple(self.axes(dim) for dim in pattern.dims))

    def inside(self, node: Node) -> Node:
        """A value of the core; sums over the axis go over the places of a part."""
        key = (node, True)
        if key not in self._memo:
            self._memo[key] = self._inside(node)
        return self._memo[key]

    def _inside(self, node: Node) -> Node:
        match node:
            case Input(axes=axes):
                return replace(node, axes=self.axes(axes))
            case Size(axis=axis) if axis == self.axis:
                return Lit(self.size, loc=node.loc)
        new = rebuild(node, self.inside)
        if isinstance(new, (Contract, Reduce)) and self.axis in new.over:
            over = tuple(self.place if a == self.axis else a for a in new.over)
            return replace(new, over=over)
        return new

    def behind(self, node: Node) -> Node:
        """A value behind the sums."""
        key = (node, False)
        if key not in self._memo:
            self._memo[key] = self._behind(node)
        return self._memo[key]

    def _behind(self, node: Node) -> Node:
        if isinstance(node, (Contract, Reduce)) and self.axis in node.over:
            return Reduce(Red.SUM, self._as_input(node), (self.part,), loc=node.loc)
        return with_tokens(self.program, node, self.behind)

    def _as_input(self, node: Node) -> Input:
        value = self.inside(node)
        name = free_name("partial", len(self.found), self._taken)
        scan = self.program.scan or "T"
        first = self.program.outputs[0].pattern.axes
        own = {*axes_of(value), "B", scan}
        order = union((a for a in first if a in own), axes_of(value))
        outer = [a for a in ("B", scan) if a in own]
        inner = [a for a in order if a not in (*outer, self.part)]
        axes = (*outer, *inner[:-1], self.part, *inner[-1:])
        made = Input(name, axes, Lifetime.ACTIVATION, loc=node.loc)
        self.found.append((value, made))
        return made
