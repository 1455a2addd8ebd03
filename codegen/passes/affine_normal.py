"""Normalisation of a chain of events, so that spellings of one update share a table."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from attncc.codegen.passes.affine_values import Decay, Event, Term, Write
from attncc.codegen.terms import factors, mul, product
from attncc.dsl.graph import axes_of


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


def normalise(
    events: list[Event], terms: list[Term], active: tuple[str, ...]
) -> tuple[list[Event], list[Term]]:
    """Decays first where no read lies between, equal neighbours merged, reads after the decay."""
    while True:
        step = _move_decay(events, terms) or _merge(events, terms) or _late(events, terms, active)
        if step is None:
            return events, terms
        events, terms = step


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


def _late(
    events: list[Event], terms: list[Term], active: tuple[str, ...]
) -> tuple[list[Event], list[Term]] | None:
    """Reads before a decay, times that decay, as reads after it; None if there are none."""
    new = [_late_reads(e, events, set(active)) if isinstance(e, Write) else e for e in events]
    return (new, terms) if new != events else None


def _late_reads(write: Write, events: list[Event], active: set[str]) -> Write:
    terms = tuple(late_read(t, events, active) for t in write.u.terms)
    return replace(write, u=replace(write.u, terms=terms))


def late_read(term: Term, events: list[Event], active: set[str]) -> Term:
    """A read before decays, times these decays, as the read after them.

    The decays' factors come off the coefficient and, where they have an active axis, the vector.
    """
    while term.version < len(events):
        event = events[term.version]
        moved = _passed(term, event, active) if isinstance(event, Decay) else None
        if moved is None:
            break
        term = moved
    return term


def _passed(term: Term, decay: Decay, active: set[str]) -> Term | None:
    coef = factors(term.coef) if term.coef is not None else []
    vector, wanted = factors(term.b), factors(decay.factor)
    if any((coef + vector).count(w) < wanted.count(w) for w in wanted):
        return None
    for w in wanted:
        (coef if w in coef else vector).remove(w)
    b = product(vector)
    if active & set(axes_of(term.b)) - set(axes_of(b)):
        return None  # the decay itself is the read vector
    return replace(
        term, coef=product(coef) if term.coef is not None else None, b=b, version=term.version + 1
    )
