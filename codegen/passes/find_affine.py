"""The affine form of a state: from the chain of events to the flat table of rows and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attncc.codegen.forms import AffineForm, Read, Refusal, Row
from attncc.codegen.passes.affine_chain import Chain
from attncc.codegen.passes.affine_normal import late_read, normalise
from attncc.codegen.passes.affine_values import (
    Decay,
    Event,
    Stop,
    Term,
    Vector,
    Version,
    Write,
)
from attncc.codegen.terms import add, factors, mul
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, rebuild, walk
from attncc.dsl.ir import Contract, Fn, Input, Lifetime, Map, Node, Program, Red, Reduce


def find_affine(program: Program) -> AffineForm | Refusal:
    """The affine form of a program with one state, or the first line that stands in its way."""
    if program.scan is None:
        return Refusal("no scan: the body folds a history", program.loc)
    held = [t for t in program.tensors if t.lifetime in (Lifetime.STATE, Lifetime.WINDOW)]
    if len(held) != 1 or held[0].lifetime is not Lifetime.STATE:
        return Refusal("more than one carried object", program.loc)
    outputs = tuple(o.value for o in program.outputs)
    try:
        form, _ = affine_state(program, held[0].name, program.states[0].value, outputs)
    except Stop as stop:
        return stop.refusal
    return form


def affine_state(
    program: Program,
    state: str,
    update: Node,
    others: Sequence[Node],
    pending: frozenset[str] | None = None,
    first: int = 0,
) -> tuple[AffineForm, tuple[Node, ...]]:
    """The table of one state, and other values with its reads replaced by named inputs.

    Args:
        program: the scan.
        state: name of the state.
        update: the value the body gives back for it.
        others: outputs, and then the updates of other states, that may read this one.
        pending: carried objects whose values are not known yet, this one among them; None for
            this one alone.
        first: number of the first read.

    Returns:
        The form, whose outputs are the program's, and ``others`` rewritten.

    Raises:
        Stop: the line that stands in the way.
    """
    axes = program.tensor(state).pattern.axes
    pending = pending or frozenset({state})
    active = _active(program, state, axes, ([update], others))
    chain = Chain(state, axes, active, pending)
    final = chain.value(update)
    if final is None:
        raise Stop("the new state does not depend on the old one", update.loc)
    if not isinstance(final, Version) or final.at != len(chain.events):
        raise Stop("the new state is not the end of its chain", update.loc)
    outs = ReadOuts(chain, first)
    new = tuple(outs.visit(n) for n in others)
    if len(chain.events) != final.at:
        raise Stop("an output extends the state beyond what is returned", program.loc)
    events, terms = normalise(chain.events, outs.terms, active)
    decays = tuple(e.factor for e in events if isinstance(e, Decay))
    rows, reads = _rows(events), _read_table(events, terms, first)
    form = _classified(
        program, state, axes, active, decays, rows, reads, new[: len(program.outputs)]
    )
    return form, new


def _active(
    program: Program, state: str, axes: tuple[str, ...], groups: Sequence[Sequence[Node]]
) -> tuple[str, ...]:
    """Axes the body reads the state along: those of the corrections, else of the read-outs."""
    for roots in groups:
        held = (n for n in walk(*roots) if isinstance(n, Contract) and _reads(n, state))
        found = [over for n in held if (over := [a for a in axes if a in n.over])]
        if found:
            return tuple(sorted(found, key=len)[0])
    raise Stop("the body never contracts its state: element-wise scan", program.loc)


def _reads(node: Node, state: str) -> bool:
    return any(_is_state(n, state) for n in walk(node))


def _is_state(node: Node, state: str) -> bool:
    return isinstance(node, Input) and node.lifetime is Lifetime.STATE and node.name == state


class ReadOuts:
    """Rewrites values: each read of the state becomes an input of its own name."""

    def __init__(self, chain: Chain, first: int) -> None:
        self.chain = chain
        self.first = first
        self.terms: list[Term] = []
        self._memo: dict[Node, Node] = {}

    def visit(self, node: Node) -> Node:
        """The value with its reads replaced.

        Raises:
            Stop: it has the state itself in it.
        """
        if node not in self._memo:
            self._memo[node] = self._replaced(node)
        return self._memo[node]

    def _replaced(self, node: Node) -> Node:
        if not _reads(node, self.chain.state):
            return node
        if isinstance(node, Input):
            raise Stop(f"the state {node.name} is used other than through its reads", node.loc)
        if isinstance(node, Contract):
            return self._contract(node)
        return rebuild(node, self.visit)

    def _contract(self, node: Contract) -> Node:
        active = self.chain.active
        parts = [f for arg in node.args for f in factors(arg)]
        if not any(self.chain.is_matrix(p) for p in parts):
            held = [p for p in parts if self.chain.held(p)]
            free = (p for p in parts if p not in held)
            return Contract((*free, *map(self.visit, held)), node.over, loc=node.loc)
        if not set(active) <= set(node.over):
            raise Stop(
                f"a value of the state is summed over {' '.join(node.over)}, "
                f"corrections contract {' '.join(active)}", node.loc,
            )  # fmt: skip
        rest = tuple(a for a in node.over if a not in active)
        return self._split(node, parts, rest) if rest else self._as_inputs(node)

    def _split(self, node: Contract, parts: list[Node], rest: tuple[str, ...]) -> Node:
        """A contraction over more than the active axes: a read, and a sum of reads."""
        active = self.chain.active
        inner = [p for p in parts if self.chain.held(p) or set(active) & set(axes_of(p))]
        outer = [p for p in parts if p not in inner]
        read = self.visit(Contract(tuple(inner), active, loc=node.loc))
        if outer:
            return Contract((read, *outer), rest, loc=node.loc)
        return Reduce(Red.SUM, read, rest, loc=node.loc)

    def _as_inputs(self, node: Contract) -> Node:
        opened = self._opened(node)
        if opened is not None:
            return self.visit(opened)
        value = self.chain.value(node)
        if not isinstance(value, Vector):
            raise Stop("an output contracts something else than the state", node.loc)
        terms = (late_read(t, self.chain.events, set(self.chain.active)) for t in value.terms)
        parts = [value.const, *(mul(t.coef, self._input(t, node)) for t in terms)]
        total = add(*parts)
        assert total is not None
        return total

    def _opened(self, node: Contract) -> Node | None:
        """``a . (x + y)`` as two reads, where ``x + y`` is no version that the state passes."""
        parts = [f for arg in node.args for f in factors(arg)]
        for i, part in enumerate(parts):
            if not isinstance(part, Map) or part.fn not in (Fn.ADD, Fn.SUB):
                continue
            if not self.chain.held(part) or self.chain.known(part):
                continue
            sides = (
                Contract((*parts[:i], side, *parts[i + 1 :]), node.over, loc=node.loc)
                for side in part.args
            )
            return replace(part, args=tuple(sides))
        return None

    def _input(self, term: Term, node: Contract) -> Input:
        seen = [(t.b, t.version) for t in self.terms]
        if (term.b, term.version) not in seen:
            self.terms.append(term)
            seen.append((term.b, term.version))
        number = self.first + seen.index((term.b, term.version))
        active = self.chain.active
        axes = [a for a in (*self.chain.state_axes, *axes_of(term.b)) if a not in active]
        ordered = sorted(set(axes), key=union(axes_of(node), axes).index)
        return Input(f"read{number}", tuple(ordered), Lifetime.WORKSPACE, loc=node.loc)


# --- the table ----------------------------------------------------------------------------------


def _slot(events: list[Event], version: int) -> int:
    return sum(isinstance(e, Decay) for e in events[:version])


def _visible(events: list[Event], version: int) -> int:
    """Table rows (not writes: a write of several terms is several rows) before a version."""
    return sum(max(1, len(e.u.terms)) for e in events[:version] if isinstance(e, Write))


def _rows(events: list[Event]) -> tuple[Row, ...]:
    rows = []
    for i, event in enumerate(events):
        if not isinstance(event, Write):
            continue
        slot = _slot(events, i)
        const = event.u.const
        for term in event.u.terms:
            at = (_slot(events, term.version), slot, _visible(events, term.version))
            rows.append(Row(event.a, const, term.coef, term.b, *at, loc=event.loc))
            const = None
        if not event.u.terms:
            rows.append(Row(event.a, const, None, None, slot, slot, 0, loc=event.loc))
    return tuple(rows)


def _read_table(events: list[Event], terms: list[Term], first: int) -> tuple[Read, ...]:
    return tuple(
        Read(
            f"read{first + i}", t.b, _slot(events, t.version), _visible(events, t.version), t.b.loc
        )
        for i, t in enumerate(terms)
    )


def _classified(
    program: Program, state: str, axes: tuple[str, ...], active: tuple[str, ...],
    decays: tuple[Node, ...], rows: tuple[Row, ...], reads: tuple[Read, ...],
    outputs: tuple[Node, ...],
) -> AffineForm:  # fmt: skip
    """Split the state's axes into system and passive, or say why nothing is left to be passive."""
    parts = [*decays, *(r.a for r in rows)]
    parts += [n for r in rows for n in (r.b, r.coef) if n is not None]
    system = tuple(a for a in union(*(axes_of(p) for p in parts)) if a not in active)
    system = union((a for a in axes if a in system), system)
    passive = tuple(a for a in axes if a not in active and a not in system)
    if not passive:
        rest = set(axes) - set(active)
        places = [(d, d.loc) for d in decays]
        places += [(n, r.loc) for r in rows for n in (r.a, r.b, r.coef) if n is not None]
        loc = next((loc for n, loc in places if rest <= set(axes_of(n))), program.loc)
        how = "sequential" if any(r.b is not None for r in rows) else "element-wise"
        raise Stop(
            "every state axis but the active one decays or corrects by itself: no matrix products "
            f"in chunks, {how} scan", loc,
        )  # fmt: skip
    for row in rows:
        for part in (row.const, row.coef):
            if part is not None and set(active) & set(axes_of(part)):
                raise Stop("a row's vector has the active axis", part.loc)
    return AffineForm(state, active, passive, system, decays, rows, reads, outputs)
