"""Is the answer right? ``err <= 2 * (err_eager + eps * max|oracle|)``; nothing is timed before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from attncc.runtime.tolerance import allowed, largest, max_error
from benchmarks.case import Outputs, Part, Work

INF = float("inf")


@dataclass(frozen=True, slots=True)
class Answer:
    """The worst output of a call: its largest error, and what was allowed.

    Attributes:
        output: the output that comes closest to (or passes furthest) its budget.
        error: max |x - oracle|; inf where NaN or inf stand in other places than the oracle's.
        budget: the right-hand side of the rule.
    """

    output: str
    error: float
    budget: float

    @property
    def right(self) -> bool:
        """Whether the error is within the budget; never with NaN on either side."""
        return self.error <= self.budget

    @property
    def used(self) -> float:
        """Error as a share of the budget."""
        if self.budget > 0:
            return self.error / self.budget
        return 0.0 if self.error == 0 else INF


def judge(outputs: Outputs, parts: Iterable[Part], only: frozenset[str] | None = None) -> Answer:
    """Compare outputs with the oracle, piece by piece.

    Args:
        outputs: by name; an output that is missing is wrong.
        parts: the oracle's pieces.
        only: names of the outputs to look at; all when None.

    Raises:
        ValueError: there was nothing to compare, which says nothing about the answer.
    """
    errors: dict[str, tuple[float, float, float, torch.dtype]] = {}
    for part in parts:
        if only is not None and part.output not in only:
            continue
        error, eager, top, dtype = errors.get(part.output, (0.0, 0.0, 0.0, part.dtype))
        x = outputs.get(part.output)
        new = INF if x is None else max_error(x[part.index], part.oracle)
        errors[part.output] = (
            max(error, new),
            max(eager, max_error(part.eager, part.oracle)),
            max(top, largest(part.oracle)),
            dtype,
        )
    if not errors:
        raise ValueError("no output was compared with the oracle")
    answers = [
        Answer(name, err, allowed(eager, top, dtype))
        for name, (err, eager, top, dtype) in errors.items()
    ]
    return max(answers, key=lambda a: a.used)


def run_and_judge(work: Work, parts: Iterable[Part], only: frozenset[str] | None = None) -> Answer:
    """Fill the outputs with NaN, run the call once and judge what it wrote."""
    work.reset()
    for tensor in work.buffers.values():
        tensor.fill_(float("nan"))
    return judge(work.fn(), parts, only)
