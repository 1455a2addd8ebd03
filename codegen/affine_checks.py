"""Which flat tables have a chunk form, and how a row is split for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attncc.codegen.forms import AffineForm, Refusal, Row
from attncc.codegen.scan_tiles import unprintable
from attncc.codegen.terms import factors, is_number, product
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Contract, Lit, Node, Program, Reduce

MOST_ROWS = 16
"""Most rows of a token: a token lies within one block of rows."""


@dataclass(frozen=True, slots=True)
class Split:
    """A row as ``u = scale * (const + coef * read)``, where both terms share ``scale``."""

    scale: Node | None
    const: Node | None
    coef: Node | None


def split_row(row: Row, passive: tuple[str, ...]) -> Split:
    """Take the common factors of a row's constant and coefficient out."""
    if row.b is None or row.coef is None:
        return Split(None, row.const, row.coef)
    rest = factors(row.coef)
    if row.const is None:
        shared = [f for f in rest if not is_number(f, -1)]
        kept = [f for f in rest if is_number(f, -1)]
        return Split(product(shared), None, product(kept))
    left, shared, kept = factors(row.const), [], []
    for f in rest:
        if f in left and not is_number(f, -1) and not set(axes_of(f)) & set(passive):
            left.remove(f)
            shared.append(f)
        else:
            kept.append(f)
    return Split(product(shared), product(left), product(kept))


def plain_split(row: Row, passive: tuple[str, ...]) -> Split:
    """A row that reads no state, as ``u = scale * const``: what its columns share, and the rest."""
    parts = factors(row.const) if row.const is not None else []
    shared = [f for f in parts if not set(axes_of(f)) & set(passive)]
    return Split(product(shared), product([f for f in parts if f not in shared]), None)


def shared_gain(form: AffineForm) -> tuple[float, str] | None:
    """What a row's read of the state has beside its scale, where ``state`` has that anyway.

    Returns:
        A number, and the read-out whose prefix of decays is the row's too ("" where decays are
        inside the operands or there are none); None where a row needs a factor of its own.
    """
    coefs = {_as_number(split_row(r, form.passive).coef) for r in form.rows}
    coef = coefs.pop()
    if coefs or coef is None or not has_scale(form):
        return None
    if not form.decays or decays_each(form):
        return coef, ""
    slots = {r.read_slot for r in form.rows}
    same = [r.name for r in form.reads if {r.slot} == slots]
    return (coef, same[0]) if same and len(form.rows) == 1 else None


def _as_number(coef: Node | None) -> float | None:
    found = 1.0
    for factor in factors(coef) if coef is not None else ():
        if not isinstance(factor, Lit):
            return None
        found *= factor.value
    return found


def decays_each(form: AffineForm) -> bool:
    """Whether a decay differs along the active axis."""
    return any(set(form.active) & set(axes_of(d)) for d in form.decays)


def read_slots(form: AffineForm) -> list[int]:
    """Where each row of a token reads; a row that reads nothing may stand with any other one."""
    reading = [r.read_slot for r in form.rows if r.b is not None]
    return [r.read_slot if r.b is not None else reading[0] for r in form.rows] if reading else []


def has_scale(form: AffineForm) -> bool:
    """Whether a row's constant has a factor that only depends on the row."""
    parts = [split_row(r, form.passive) for r in form.rows]
    return any(p.const and p.scale and not is_number(p.scale, 1) for p in parts)


def table_nodes(form: AffineForm) -> tuple[Node, ...]:
    """Every expression of a table."""
    found: list[Node | None] = [*form.decays, *(r.vector for r in form.reads), *form.outputs]
    for row in form.rows:
        found += [row.a, row.const, row.coef, row.b]
    return tuple(n for n in found if n is not None)


def chunk_refusal(program: Program, form: AffineForm) -> Refusal | None:
    """Why a table has no chunk form (yet)."""
    found = [*_shapes(program, form), *_vectors(form)]
    return found[0] if found else unprintable(table_nodes(form), program)


def _shapes(program: Program, form: AffineForm) -> Iterator[Refusal]:
    if len(form.active) != 1:
        yield Refusal("corrections contract more than one axis", program.loc)
    if decays_each(form) and not all(r.write_slot for r in form.rows):
        along, loc = " ".join(form.active), form.decays[0].loc
        yield Refusal(f"a decay per {along} behind a read of its token's own update", loc)
    if len(form.decays) > 1:
        yield Refusal("two decays with a read between them within one token", form.decays[1].loc)
    if not 1 <= len(form.rows) <= MOST_ROWS:
        yield Refusal(f"{len(form.rows)} updates a token", program.loc)


def stays_in_chunk(output: Node, form: AffineForm) -> bool:
    """Whether kernels with a block of the columns can compute an output, over the read-outs."""
    return next(_wider(output, form), None) is None


def _wider(output: Node, form: AffineForm) -> Iterator[Refusal]:
    """Sums and axes of an output that a chunk's kernels have no room for."""
    for node in walk(output):
        over = set(node.over) if isinstance(node, (Contract, Reduce)) else set()
        if over - set(form.active):
            yield Refusal(f"a sum over {' '.join(sorted(over))} inside the chunk", node.loc)
    extra = set(axes_of(output)) - {*form.system, *form.passive, "B"}
    if extra:
        yield Refusal(f"an output has the axis {' '.join(sorted(extra))}", output.loc)


def _vectors(form: AffineForm) -> Iterator[Refusal]:
    held = {*form.system, *form.passive, "B"}
    for read in form.reads:
        axes = set(axes_of(read.vector))
        if axes - {*form.active, *held}:
            yield Refusal("a read-out has an axis the state lacks", read.loc)
        if axes & set(form.passive):
            yield Refusal("a read vector has a passive axis", read.loc)
    for node in walk(*(n for n in table_nodes(form) if n not in form.outputs)):
        over = set(node.over) if isinstance(node, (Contract, Reduce)) else set()
        if over - set(form.active):
            yield Refusal(f"a sum over {' '.join(sorted(over))} inside the chunk", node.loc)
    for out in form.outputs:
        yield from _wider(out, form)
