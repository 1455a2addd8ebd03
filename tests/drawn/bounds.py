"""How far a result may lie from the oracle."""

import torch

from tests.tolerance import assert_close, max_error

SINGLE = 4e-6
"""Of max |oracle| or 1, for fp32 sums in another order (as tests/runtime/eager_ops.py)."""


def as_dict(result: object) -> dict[str, torch.Tensor]:
    """Results by name; a single one is ``o``."""
    return {"o": result} if isinstance(result, torch.Tensor) else result._asdict()  # type: ignore[attr-defined]


def largest(x: torch.Tensor) -> float:
    """The largest finite magnitude."""
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def hold(found: torch.Tensor, exact: torch.Tensor, rough: torch.Tensor, name: str) -> None:
    """The contract for narrow types, against a rough result; fp32 in any order of summation."""
    if found.dtype == torch.float32:
        error, size = max_error(found, exact, name), max(largest(exact), 1.0)  # of the inputs
        assert error <= SINGLE * size, f"{name}: error {error:.2e} (max |oracle| {size:.2e})"
    else:
        assert_close(found, exact, rough.to(found.dtype), found.dtype, name)
