"""Recognise a flat table that is a chain of beta-gated Householder updates with one decay a token.

Per token ``S *= decay``, then for each of N rows ``S += beta (v - S k) k^T``, and a read-out
``scale * S q`` after the last: what a fixed kernel of somebody else's can be asked for. How a body
was spelled does not matter, and what a table says beside this is the reason of the refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attncc.codegen.affine_checks import decays_each, split_row
from attncc.codegen.forms import AffineForm, Refusal, Row
from attncc.codegen.terms import factors, is_number
from attncc.dsl.ir import Contract, Fn, Input, Lit, Map, Node, Program, Select, Size

EPSILON = 1e-6
"""What is added to a squared length before its root."""
NUMBERS: Mapping[Fn, Callable[..., float]] = {
    Fn.ADD: lambda a, b: a + b, Fn.SUB: lambda a, b: a - b, Fn.MUL: lambda a, b: a * b,
    Fn.DIV: lambda a, b: a / b, Fn.NEG: lambda a: -a, Fn.SQRT: math.sqrt,
    Fn.RSQRT: lambda a: 1 / math.sqrt(a),
}  # fmt: skip
"""What a factor of the output may be computed with, of literals, sizes and host numbers."""


@dataclass(frozen=True, slots=True)
class Updates:
    """What such a table says.

    Attributes:
        q: name of the query.
        k: of the keys.
        v: of the values.
        gate: of the decay, or None for none.
        log_gate: the decay is the gate's exponential, not the gate itself.
        beta: of the gates of the updates, or None for 1.
        rows: updates a token, N.
        unit: queries and keys are brought to length 1 first.
        scale: factors of the output, all of them numbers of the call.
    """

    q: str
    k: str
    v: str
    gate: str | None
    log_gate: bool
    beta: str | None
    rows: int
    unit: bool
    scale: tuple[Node, ...]


class Unlike(Exception):
    """A table that says something else."""


def need(condition: bool, reason: str) -> None:
    """Go on only under a condition.

    Raises:
        Unlike: it does not hold.
    """
    if not condition:
        raise Unlike(reason)


def find_updates(program: Program, form: AffineForm) -> Updates | Refusal:
    """What the table says, or why it is no such chain."""
    try:
        return _updates(program, form)
    except Unlike as unlike:
        return Refusal(f"not a chain of gated Householder updates: {unlike}", program.loc)


def _updates(program: Program, form: AffineForm) -> Updates:
    need(len(form.active) == 1, "keys have more than one axis")
    need(bool(form.rows), "no updates")
    gate, log_gate = _gate(form)
    found = [_row(form, row, i) for i, row in enumerate(form.rows)]
    need(len(set(found)) == 1, "updates of one token differ")
    (k, unit, v, beta) = found[0]
    need(len(form.reads) == 1 and len(form.outputs) == 1, "not one read-out and one output")
    read = form.reads[0]
    after = read.slot == len(form.decays) and read.rows_visible == len(form.rows)
    need(after, "the query does not read after the last update")
    q, inside = _vector(read.vector, form.active[0])
    scale, outside = _scale(form.outputs[0], read.name, q, form.active[0])
    need((inside or outside) == unit, "only one of queries and keys has length 1")
    need(not (inside and outside), "queries are brought to length 1 twice")
    return Updates(q, k, v, gate, log_gate, beta, len(form.rows), unit, scale)


def _gate(form: AffineForm) -> tuple[str | None, bool]:
    need(len(form.decays) <= 1, "several decays a token")
    need(not decays_each(form), "a decay differs along the axis of keys")
    match form.decays:
        case ():
            return None, False
        case (Input(name=name),):
            return name, False
        case (Map(fn=Fn.EXP, args=(Input(name=name),)),):
            return name, True
    raise Unlike("the decay is neither an input nor the exponential of one")


def _row(form: AffineForm, row: Row, index: int) -> tuple[str, bool, str, str | None]:
    """Key, whether it is brought to length 1, value and beta of an update."""
    active, decays = form.active[0], len(form.decays)
    need(row.b is not None, "an update that corrects nothing")
    need(row.a == row.b, "an update writes along another vector than it reads")
    need(row.read_slot == row.write_slot == decays, "an update before the decay")
    need(row.rows_visible == index, "an update does not see the ones before it")
    parts = split_row(row, form.passive)
    need(is_number(parts.coef, -1), "an update is not beta times the error of a prediction")
    key, unit = _vector(_chosen(row.a, index, len(form.rows)), active)
    value = _chosen(parts.const, index, len(form.rows)) if parts.const is not None else None
    need(isinstance(value, Input), "a value is computed")
    beta = None
    if parts.scale is not None and not is_number(parts.scale, 1):
        gate = _chosen(parts.scale, index, len(form.rows))
        need(isinstance(gate, Input), "a beta is computed")
        assert isinstance(gate, Input)
        beta = gate.name
    assert isinstance(value, Input)
    return key, unit, value.name, beta


def _chosen(node: Node, index: int, rows: int) -> Node:
    """What a row's own place is chosen from, with every choice in it gone."""
    match node:
        case Select(arg=arg, at=at):
            need(at == index, "updates are not in the order of their rows")
            return arg
        case Input():
            need(rows == 1, "several updates share a row")
            return node
        case Map(fn=fn, args=args):
            return Map(fn, tuple(_chosen(a, index, rows) for a in args))
        case Contract(args=args, over=over):
            return Contract(tuple(_chosen(a, index, rows) for a in args), over)
        case _:
            return node


def _vector(node: Node, active: str) -> tuple[str, bool]:
    """The input behind a vector, and whether it is brought to length 1."""
    if isinstance(node, Input):
        return node.name, False
    inputs = [f for f in factors(node) if isinstance(f, Input)]
    rest = [f for f in factors(node) if not isinstance(f, Input)]
    need(len(inputs) == 1 and len(rest) == 1, "a vector is computed")
    need(_is_length(rest[0], inputs[0].name, active), "a vector is computed")
    return inputs[0].name, True


def _is_length(node: Node, name: str, active: str) -> bool:
    """Whether it is ``rsqrt(x . x + EPSILON)``."""
    match node:
        case Map(fn=Fn.RSQRT, args=(Map(fn=Fn.ADD, args=(square, epsilon)),)):
            pass
        case _:
            return False
    match square:
        case Contract(args=(Input(name=a), Input(name=b)), over=over):
            same = a == b == name and tuple(over) == (active,)
            return same and is_number(epsilon, EPSILON)
    return False


def _scale(output: Node, read: str, query: str, active: str) -> tuple[tuple[Node, ...], bool]:
    """Factors of the output beside the read-out, and whether the query's length is one of them."""
    rest = factors(output)
    reads = [f for f in rest if isinstance(f, Input) and f.name == read]
    need(len(reads) == 1, "the output is not a multiple of the read-out")
    lengths = [f for f in rest if _is_length(f, query, active)]
    need(len(lengths) <= 1, "queries are brought to length 1 twice")
    scale = tuple(f for f in rest if f not in reads and f not in lengths)
    need(all(_is_scalar(f) for f in scale), "the output's factor is no number of the call")
    return scale, bool(lengths)


def _is_scalar(node: Node) -> bool:
    match node:
        case Lit() | Size():
            return True
        case Input(axes=axes):
            return not axes
        case Map(fn=fn, args=args):
            return fn in NUMBERS and all(map(_is_scalar, args))
        case _:
            return False


def number_of(node: Node, sizes: Mapping[str, int], scalars: Mapping[str, float]) -> float:
    """The value of a factor of ``Updates.scale``.

    Args:
        node: the factor.
        sizes: of every axis.
        scalars: host numbers by name.
    """
    match node:
        case Lit(value=value):
            return float(value)
        case Size(axis=axis):
            return float(sizes[axis])
        case Input(name=name):
            return float(scalars[name])
        case Map(fn=fn, args=args):
            return NUMBERS[fn](*(number_of(a, sizes, scalars) for a in args))
    raise AssertionError(node)  # no other factor gets into a scale
