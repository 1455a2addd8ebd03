"""What a value of a body is as a function of one state, and the events that the state passes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from attncc.codegen.forms import Refusal
from attncc.codegen.terms import add, factors, mul, product
from attncc.dsl.ir import Node
from attncc.dsl.loc import Loc


class Stop(Exception):
    """Ends the analysis with a reason."""

    def __init__(self, reason: str, loc: Loc) -> None:
        super().__init__(reason)
        self.refusal = Refusal(reason, loc)


@dataclass(frozen=True, slots=True)
class Term:
    """``coef * (b . version)``; None is 1."""

    coef: Node | None
    b: Node
    version: int


@dataclass(frozen=True, slots=True)
class Vector:
    """A value without the active axis, affine in reads."""

    const: Node | None
    terms: tuple[Term, ...] = ()

    def scaled(self, by: Node) -> Vector:
        """The vector times a state-free value without the active axis."""
        const = None if self.const is None else product(factors(mul(by, self.const)))
        terms = (replace(t, coef=product(factors(mul(by, t.coef)))) for t in self.terms)
        return Vector(const, tuple(terms))

    def plus(self, other: Vector) -> Vector:
        """Sum of two vectors."""
        return Vector(add(self.const, other.const), self.terms + other.terms)


@dataclass(frozen=True, slots=True)
class Outer:
    """A sum of ``a (x) vector``."""

    parts: tuple[tuple[Node, Vector], ...]


@dataclass(frozen=True, slots=True)
class Version:
    """The state after the first ``at`` events."""

    at: int


@dataclass(frozen=True, slots=True)
class Decay:
    """S *= factor."""

    factor: Node


@dataclass(frozen=True, slots=True)
class Write:
    """S += a (x) u."""

    a: Node
    u: Vector
    loc: Loc = field(compare=False)


Event = Decay | Write
Affine = Version | Outer | Vector | None  # None: does not depend on the state
