"""The contract's tolerance, the one that every tier of tests uses; its formula is the runtime's."""

import torch

from attncc.runtime import tolerance


def max_error(x: torch.Tensor, oracle: torch.Tensor, what: str = "result") -> float:
    """``max |x - oracle|`` in fp64; NaN and infinite places must be the oracle's."""
    got, want = x.detach().cpu().double(), oracle.detach().cpu().double()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    error = tolerance.max_error(got, want)
    if error == float("inf"):
        finite = torch.isfinite(want)
        same = (got == want) | (torch.isnan(got) & torch.isnan(want))
        bad = (~torch.where(finite, torch.isfinite(got), same)).nonzero()
        where = bad[0].tolist() if len(bad) else "overflow"
        raise AssertionError(f"{what}: NaN or inf elsewhere than the oracle, first at {where}")
    return error


def assert_close(
    result: torch.Tensor,
    oracle: torch.Tensor,
    eager: torch.Tensor,
    dtype: torch.dtype,
    what: str = "result",
) -> None:
    """``err <= 2 * (err_eager + eps * max|oracle|)`` with errors against the fp64 oracle.

    Args:
        result: what is tested.
        oracle: the interpreter in fp64 on the same stored inputs.
        eager: the torch lowering, rounded to ``dtype``.
        dtype: the output's dtype, whose eps counts.
        what: named in the message.
    """
    largest = tolerance.largest(oracle)
    error = max_error(result, oracle, what)
    bound = tolerance.allowed(max_error(eager, oracle, f"{what} (eager)"), largest, dtype)
    assert error <= bound, f"{what}: error {error:.3e} > {bound:.3e} (max |oracle| {largest:.3e})"
