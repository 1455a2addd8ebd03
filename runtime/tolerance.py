"""The contract's tolerance: ``err <= 2 * (err of the eager reference + eps * max|oracle|)``.

Errors are against the fp64 interpreter on the same stored inputs. Tests, self-checks, tuning and
benchmarks all take it from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def max_error(x: torch.Tensor, oracle: torch.Tensor) -> float:
    """``max |x - oracle|`` in fp64; inf where shape, NaN or infinities are not the oracle's."""
    if x.shape != oracle.shape:
        return float("inf")
    if x.numel() == 0:
        return 0.0
    got, want = x.detach().double(), oracle.detach().to(x.device).double()
    finite = torch.isfinite(want)
    same = (got == want) | (torch.isnan(got) & torch.isnan(want))
    if not bool(torch.where(finite, torch.isfinite(got), same).all()):
        return float("inf")
    return float(torch.where(finite, got - want, 0.0).abs().max())


def largest(oracle: torch.Tensor) -> float:
    """``max |oracle|`` over what is finite."""
    if oracle.numel() == 0:
        return 0.0
    return float(torch.where(torch.isfinite(oracle), oracle, 0.0).double().abs().max())


def allowed(eager_error: float, top: float, dtype: torch.dtype) -> float:
    """The largest error that is right.

    Args:
        eager_error: error of the torch lowering with fp32 accumulation, rounded to ``dtype``.
        top: the oracle's largest magnitude.
        dtype: the output's dtype, whose eps counts.
    """
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0  # whole numbers are exact
    return 2 * (eager_error + eps * top)


@dataclass(frozen=True, slots=True)
class Judged:
    """One tensor beside its oracle: its error and what is allowed."""

    error: float
    budget: float

    @property
    def right(self) -> bool:
        """Whether the error is within the budget; never with NaN on either side."""
        return self.error <= self.budget


def judge(
    result: torch.Tensor, oracle: torch.Tensor, eager: torch.Tensor, dtype: torch.dtype
) -> Judged:
    """Hold a result to the tolerance.

    Args:
        result: what is judged.
        oracle: the interpreter in fp64.
        eager: the torch lowering, rounded to ``dtype``.
        dtype: the output's dtype.
    """
    rough = max_error(eager, oracle)
    if rough == float("inf"):
        rough = float("nan")  # a bad reference widens nothing: no error is within NaN
    return Judged(max_error(result, oracle), allowed(rough, largest(oracle), dtype))
