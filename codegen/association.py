"""An order for contractions of several operands: products before a fold, the fold, products after.

``ac.dot`` of several operands says a sum, not an order. What lies outside the loop over the history
is a product of two tensors, which a matrix product of the runtime computes; what is left is a
program of folds with two sides each, and that is what kernels are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attncc.dsl.ir import Lifetime, Program

FIRST = ("B", "T", "S")
"""Axes that a product's result has outermost, in this order."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two tensors, summed over axes.

    Attributes:
        name: what the result is called: a new input of the fold, or an output.
        left: an input of the program, or an earlier product; behind a fold, its output.
        right: the other operand.
        over: axes that are summed.
        axes: axes of the result, outermost first; packed sequences have no ``B`` beside ``T``.
        flops: twice its multiplications, at the sizes that decided.
    """

    name: str
    left: str
    right: str
    over: tuple[str, ...]
    axes: tuple[str, ...]
    flops: int

    def text(self) -> str:
        """For instance ``qa[B T H R] = sum_D(q * w)``."""
        summed = f"sum_{','.join(self.over)}" if self.over else ""
        return f"{self.name}[{' '.join(self.axes)}] = {summed}({self.left} * {self.right})"


@dataclass(frozen=True, slots=True)
class Association:
    """The order chosen for one program.

    Attributes:
        program: the folds, each contraction with two sides; results of ``before`` are inputs.
        before: products that are formed first, in order.
        after: products that finish outputs, in order; ``left`` of an output's first one is what
            ``program`` gives under the output's name.
        flops: of everything, at the sizes that decided.
        others: what the other orders would have cost.
    """

    program: Program
    before: tuple[Product, ...]
    after: tuple[Product, ...]
    flops: int
    others: tuple[int, ...]

    def read_before(self, declared: Program) -> frozenset[str]:
        """Caches of the declaration that products before the fold read."""
        caches = {t.name for t in declared.tensors if t.lifetime is Lifetime.CACHE}
        read = {name for p in self.before for name in (p.left, p.right)}
        return frozenset(caches & read)

    def lines(self, sizes: Mapping[str, int]) -> list[str]:
        """The order as text for people, with the sizes that decided."""
        shown = " ".join(f"{a}={n}" for a, n in sorted(sizes.items()))
        costs = ", ".join(f"{n:.3e}" for n in self.others) or "none"
        found = [f"association: {self.flops:.3e} flop at {shown}; other orders: {costs}"]
        found += [f"  before the fold (matrix product): {p.text()}" for p in self.before]
        found += [f"  after the fold (matrix product): {p.text()}" for p in self.after]
        return found
