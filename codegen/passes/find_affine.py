"""The affine form of a scan: from the chain of events to the flat table of rows and reads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from attncc.codegen.forms import AffineForm, Read, Refusal, Row
from attncc.codegen.passes.affine_chain import (
    Chain,
    Decay,
    Event,
    Stop,
    Term,
    Vector,
    Version,
    Write,
)
from attncc.codegen.terms import add, depends_on_state, factors, mul, product
from attncc.dsl.axes import union
from attncc.dsl.graph import axes_of, rebuild, walk
from attncc.dsl.ir import Contract, Input, Lifetime, Node, Program
from attncc.dsl.loc import Loc


def find_affine(program: Program) -> AffineForm | Refusal:
    """The affine form of a program, or the first line that stands in its way."""
    if program.scan is None:
        return Refusal("no scan: the body folds a history", program.loc)
    try:
        return _find(program)
    except Stop as stop:
        return stop.refusal


def _find(program: Program) -> AffineForm:
    held = [t for t in program.tensors if t.lifetime in (Lifetime.STATE, Lifetime.WINDOW)]
    if len(held) != 1 or held[0].lifetime is not Lifetime.STATE:
        raise Stop("more than one carried object", program.loc)
    state = held[0]
    axes = state.pattern.axes
    chain = Chain(state.name, axes, _active(program, axes))
    final = chain.value(program.states[0].value)
    if final is None:
        raise Stop("the new state does not depend on the old one", program.states[0].value.loc)
    if not isinstance(final, Version) or final.at != len(chain.events):
        raise Stop("the new state is not the end of its chain", program.states[0].value.loc)
    terms: list[Term] = []
    outputs = tuple(_read_outs(o.value, chain, terms) for o in program.outputs)
    if len(chain.events) != final.at:
        raise Stop("an output extends the state beyond what is returned", program.loc)
    events, terms = _normalise(chain.events, terms)
    rows = _rows(events)
    reads = _reads(events, terms)
    decays = tuple(e.factor for e in events if isinstance(e, Decay))
    return _classified(program, state.name, axes, chain.active, decays, rows, reads, outputs)


def _active(program: Program, state_axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes the body reads the state along: those of the corrections, else of the read-outs."""
    for roots in ([s.value for s in program.states], [o.value for o in program.outputs]):
        for node in walk(*roots):
            if isinstance(node, Contract) and depends_on_state(node):
                over = tuple(a for a in node.over if a in state_axes)
                if over:
                    return tuple(sorted(over, key=state_axes.index))
    raise Stop("the body never contracts its state: element-wise scan", program.loc)


def _read_outs(node: Node, chain: Chain, terms: list[Term]) -> Node:
    """An output expression with each read of the state replaced by a named input."""
    memo: dict[Node, Node] = {}

    def visit(n: Node) -> Node:
        if n not in memo:
            memo[n] = replaced(n)
        return memo[n]

    def replaced(n: Node) -> Node:
        if not depends_on_state(n):
            return n
        if isinstance(n, Contract):
            return _as_inputs(n, chain, terms)
        if isinstance(n, Input):
            raise Stop("an output contains the state itself", n.loc)
        return rebuild(n, visit)

    return visit(node)


def _as_inputs(node: Contract, chain: Chain, terms: list[Term]) -> Node:
    value = chain.value(node)
    if not isinstance(value, Vector):
        raise Stop("an output contracts something else than the state", node.loc)
    parts = [value.const]
    for term in value.terms:
        name = f"read{len(terms)}"
        terms.append(term)
        axes = tuple(a for a in chain.state_axes if a not in chain.active)
        axes = union(axes_of(node), axes)
        read = Input(
            name, tuple(a for a in axes if a in axes_of(node)), Lifetime.WORKSPACE, loc=node.loc
        )
        parts.append(mul(term.coef, read))
    total = add(*parts)
    assert total is not None
    return total


# --- normalisation ------------------------------------------------------------------------------


def _versions_read(events: list[Event], terms: list[Term]) -> set[int]:
    inside = {t.version for e in events if isinstance(e, Write) for t in e.u.terms}
    return inside | {t.version for t in terms}


def _shift(
    events: list[Event], terms: list[Term], above: int, by: int
) -> tuple[list[Event], list[Term]]:
    """Renumber versions greater than ``above``."""

    def moved(t: Term) -> Term:
        return replace(t, version=t.version + by) if t.version > above else t

    new: list[Event] = [
        replace(e, u=replace(e.u, terms=tuple(map(moved, e.u.terms))))
        if isinstance(e, Write)
        else e
        for e in events
    ]
    return new, list(map(moved, terms))


def _normalise(events: list[Event], terms: list[Term]) -> tuple[list[Event], list[Term]]:
    """Decays first where no read lies between, equal neighbours merged, reads after the decay."""
    while True:
        step = _move_decay(events, terms) or _merge(events, terms)
        if step is None:
            break
        events, terms = step
    events = [_late_reads(e, events) if isinstance(e, Write) else e for e in events]
    step = _merge(events, terms)
    while step is not None:
        events, terms = step
        step = _merge(events, terms)
    return events, terms


def _move_decay(events: list[Event], terms: list[Term]) -> tuple[list[Event], list[Term]] | None:
    """A write followed by a decay, unread in between: decay first and write the decayed row."""
    read = _versions_read(events, terms)
    for i, (first, second) in enumerate(pairwise(events)):
        if isinstance(first, Write) and isinstance(second, Decay) and i + 1 not in read:
            if set(axes_of(second.factor)) & set(axes_of(first.a)) - _system_axes(first):
                write = replace(first, a=product(factors(mul(second.factor, first.a))))
            else:
                write = replace(first, u=first.u.scaled(second.factor))
            return [*events[:i], second, write, *events[i + 2 :]], terms
    return None


def _system_axes(write: Write) -> set[str]:
    """Axes the row vector shares with its vector: scaling by them may go to either side."""
    parts = [write.u.const] + [t.coef for t in write.u.terms]
    return {a for p in parts if p is not None for a in axes_of(p)}


def _merge(events: list[Event], terms: list[Term]) -> tuple[list[Event], list[Term]] | None:
    """Two decays, or two writes of one row vector, unread in between, become one."""
    read = _versions_read(events, terms)
    for i, (first, second) in enumerate(pairwise(events)):
        if i + 1 in read:
            continue
        merged: Event | None = None
        if isinstance(first, Decay) and isinstance(second, Decay):
            merged = Decay(product(factors(mul(first.factor, second.factor))))
        elif isinstance(first, Write) and isinstance(second, Write) and first.a == second.a:
            joined = first.u.plus(second.u)
            if len(joined.terms) <= 1:
                merged = replace(first, u=joined)
        if merged is not None:
            new = [*events[:i], merged, *events[i + 2 :]]
            return _shift(new, terms, i + 1, -1)
    return None


def _late_reads(write: Write, events: list[Event]) -> Write:
    """A read before a decay, times that decay, is a read after it."""
    terms = []
    for t in write.u.terms:
        while t.version < len(events):
            event = events[t.version]
            parts = factors(t.coef) if t.coef is not None else []
            if not isinstance(event, Decay) or not _contains(parts, factors(event.factor)):
                break
            t = replace(
                t, version=t.version + 1, coef=product(_without(parts, factors(event.factor)))
            )
        terms.append(t)
    return replace(write, u=replace(write.u, terms=tuple(terms)))


def _contains(parts: list[Node], wanted: list[Node]) -> bool:
    return all(parts.count(w) >= wanted.count(w) for w in wanted)


def _without(parts: list[Node], taken: list[Node]) -> list[Node]:
    rest = list(parts)
    for t in taken:
        rest.remove(t)
    return rest


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


def _reads(events: list[Event], terms: list[Term]) -> tuple[Read, ...]:
    return tuple(
        Read(f"read{i}", t.b, _slot(events, t.version), _visible(events, t.version), t.b.loc)
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
        loc: Loc = next(
            (p.loc for p in parts if set(axes) - set(active) <= set(axes_of(p))), program.loc
        )
        raise Stop("every state axis but the active one decays or corrects by itself", loc)
    for row in rows:
        for part in (row.const, row.coef):
            if part is not None and set(active) & set(axes_of(part)):
                raise Stop("a row's vector has the active axis", part.loc)
    return AffineForm(state, active, passive, system, decays, rows, reads, outputs)
