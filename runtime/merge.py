"""The monoid of the softmax fold: partial results over parts of a history, and their merge."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch

from attncc.dsl.errors import LogBaseError


class LogBase(enum.Enum):
    """Base of the logarithms in a partial; two bases never mix."""

    E = "e"
    TWO = "2"

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        """The base to the power of ``x``."""
        return torch.exp(x) if self is LogBase.E else torch.exp2(x)

    def log(self, x: torch.Tensor) -> torch.Tensor:
        """The logarithm of ``x``."""
        return torch.log(x) if self is LogBase.E else torch.log2(x)


@dataclass(frozen=True, slots=True)
class Partial:
    """A softmax-weighted sum over part of a history: ``u = sum(base^(score - m) * value)``.

    A part that sees nothing has m = -inf and l = 0; its ``u`` is never looked at.

    Attributes:
        u: fp32 (or fp64) ``[..., E]``, not normalised.
        m: ``[...]``, the reference the scores are taken from (any number near the largest).
        l: ``[...]``, sum of ``base^(score - m)``, without the sink.
        base: base of the logarithms.
    """

    u: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor
    base: LogBase = LogBase.E

    @staticmethod
    def of(o: torch.Tensor, lse: torch.Tensor, base: LogBase = LogBase.E) -> Partial:
        """A partial from a normalised output ``[..., E]`` and its lse ``[...]``."""
        high = torch.float64 if o.dtype == torch.float64 else torch.float32
        m = lse.to(high)
        return Partial(o.to(high), m, torch.where(m == -torch.inf, 0.0, 1.0).to(high), base)

    @property
    def empty(self) -> torch.Tensor:
        """Where nothing was seen, ``[...]``."""
        return (self.l == 0) | (self.m == -torch.inf)

    @property
    def o(self) -> torch.Tensor:
        """The normalised output, 0 where nothing was seen."""
        return torch.where(self.empty.unsqueeze(-1), 0.0, self.u / self.l.unsqueeze(-1))

    @property
    def lse(self) -> torch.Tensor:
        """Logarithm of the sum of exponentials, -inf where nothing was seen."""
        whole = torch.where(self.l == 1, self.m, self.m + self.base.log(self.l))
        return torch.where(self.empty, -torch.inf, whole)

    def to(self, base: LogBase) -> Partial:
        """The same partial with its logarithms to another base."""
        if base is self.base:
            return self
        scale = math.log2(math.e) if base is LogBase.TWO else math.log(2.0)
        return Partial(self.u, self.m * scale, self.l, base)

    def with_sink(self, sink: torch.Tensor) -> Partial:
        """One more logit ``[...]`` in the sum, without a value; once, after the last merge."""
        m = torch.maximum(torch.where(self.empty, -torch.inf, self.m), sink)
        ref = torch.where(m == -torch.inf, 0.0, m)
        own = torch.where(self.empty, 0.0, self.base.exp(self.m - ref))
        u = torch.where(self.empty.unsqueeze(-1), 0.0, self.u * own.unsqueeze(-1))
        l = torch.where(self.empty, 0.0, self.l * own)
        return Partial(u, m, l + self.base.exp(sink - ref), self.base)


def merge(partials: Iterable[Partial]) -> Partial:
    """Combine partials over disjoint parts of a history, in order.

    ``merge([x, empty])`` is x bit for bit, whatever the empty one's ``u`` holds; of two empty ones
    the result is empty: output 0, lse -inf.

    Args:
        partials: one or more, of one shape, dtype and log base.

    Raises:
        LogBaseError: partials of different log bases.
    """
    return reduce(_merge, partials)


def _merge(a: Partial, b: Partial) -> Partial:
    if a.base is not b.base:
        raise LogBaseError(
            "partials of two log bases", expected=f"base {a.base.value}",
            found=f"base {b.base.value}", help="convert one: partial.to(LogBase.E)",
        )  # fmt: skip
    m = torch.maximum(a.m, b.m)
    ref = torch.where(m == -torch.inf, 0.0, m)
    x, y = a.base.exp(a.m - ref), a.base.exp(b.m - ref)
    u = a.u * x.unsqueeze(-1) + b.u * y.unsqueeze(-1)
    l = a.l * x + b.l * y
    for one, other in ((a, b), (b, a)):  # of two empty ones the last choice is empty too
        u = torch.where(other.empty.unsqueeze(-1), one.u, u)
        m, l = torch.where(other.empty, one.m, m), torch.where(other.empty, one.l, l)
    return Partial(u, m, l, a.base)
