"""The contract's tolerance, the one that every tier of tests uses."""

import torch


def max_error(x: torch.Tensor, oracle: torch.Tensor, what: str = "result") -> float:
    """``max |x - oracle|`` in fp64; NaN and infinite places must be the oracle's."""
    got, want = x.detach().cpu().double(), oracle.detach().cpu().double()
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    finite = torch.isfinite(want)
    same = torch.isnan(got) == torch.isnan(want)
    same &= torch.where(torch.isfinite(got) & finite, True, torch.isnan(want) | (got == want))
    bad = (~same).nonzero()
    assert not len(bad), f"{what}: NaN or inf elsewhere than the oracle, first at {bad[0].tolist()}"
    return float((got - want)[finite].abs().max()) if bool(finite.any()) else 0.0


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
    finite = oracle.double()[torch.isfinite(oracle)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    error = max_error(result, oracle, what)
    bound = 2 * (max_error(eager, oracle, f"{what} (eager)") + torch.finfo(dtype).eps * largest)
    assert error <= bound, f"{what}: error {error:.3e} > {bound:.3e} (max |oracle| {largest:.3e})"
