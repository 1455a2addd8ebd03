"""How far a result may lie from the oracle."""

from collections.abc import Mapping

import torch

from tests.tolerance import assert_close, max_error

SINGLE = 4e-6
"""Of max |oracle| or 1, for fp32 sums in another order (as tests/runtime/eager_ops.py)."""


def as_dict(result: object) -> dict[str, torch.Tensor]:
    """Results by name; a single one is ``o``."""
    return {"o": result} if isinstance(result, torch.Tensor) else result._asdict()  # type: ignore[attr-defined]


def magnitude(results: Mapping[str, torch.Tensor]) -> float:
    """The largest of all results, or 1, which the inputs have."""
    return max(1.0, *(largest(x) for x in results.values()))


def largest(x: torch.Tensor) -> float:
    """The largest finite magnitude."""
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def hold(
    found: torch.Tensor, exact: torch.Tensor, rough: torch.Tensor, name: str, size: float
) -> None:
    """The contract for narrow types, against a rough result; fp32 in any order of summation.

    ``size`` is the call's largest value: a bounded function of a large state errs by the state's.
    """
    if found.dtype == torch.float32:
        error = max_error(found, exact, name)
        assert error <= SINGLE * size, f"{name}: error {error:.2e} (max |oracle| {size:.2e})"
    else:
        assert_close(found, exact, rough.to(found.dtype), found.dtype, name)
