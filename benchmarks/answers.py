"""Is the answer right? ``err <= 2 * (err_eager + eps * max|oracle|)``; nothing is timed before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

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


def difference(x: torch.Tensor, oracle: torch.Tensor) -> float:
    """max |x - oracle| in fp64; inf where the places of NaN, inf and -inf differ."""
    if x.shape != oracle.shape:
        return INF
    if x.numel() == 0:
        return 0.0
    x, oracle = x.double(), oracle.double()
    finite = torch.isfinite(oracle)
    same = (x == oracle) | (torch.isnan(x) & torch.isnan(oracle))
    if not bool((torch.where(finite, torch.isfinite(x), same)).all()):
        return INF
    return float(torch.where(finite, x - oracle, 0.0).abs().max())


def _top(oracle: torch.Tensor) -> float:
    if oracle.numel() == 0:
        return 0.0
    return float(torch.where(torch.isfinite(oracle), oracle, 0.0).abs().max())


def judge(outputs: Outputs, parts: Iterable[Part], only: frozenset[str] | None = None) -> Answer:
    """Compare outputs with the oracle, piece by piece.

    Args:
        outputs: by name; an output that is missing is wrong.
        parts: the oracle's pieces.
        only: names of the outputs to look at; all when None.

    Raises:
        ValueError: there was nothing to compare, which says nothing about the answer.
    """
    errors: dict[str, list[float]] = {}
    for part in parts:
        if only is not None and part.output not in only:
            continue
        seen = errors.setdefault(part.output, [0.0, 0.0, 0.0, torch.finfo(part.dtype).eps])
        x = outputs.get(part.output)
        err = INF if x is None else difference(x[part.index], part.oracle)
        seen[0] = max(seen[0], err)
        seen[1] = max(seen[1], difference(part.eager, part.oracle))
        seen[2] = max(seen[2], _top(part.oracle))
    if not errors:
        raise ValueError("no output was compared with the oracle")
    answers = [
        Answer(name, err, 2 * (eager + eps * top))
        for name, (err, eager, top, eps) in errors.items()
    ]
    return max(answers, key=lambda a: a.used)


def run_and_judge(work: Work, parts: Iterable[Part], only: frozenset[str] | None = None) -> Answer:
    """Fill the outputs with NaN, run the call once and judge what it wrote."""
    work.reset()
    for tensor in work.buffers.values():
        tensor.fill_(float("nan"))
    return judge(work.fn(), parts, only)
