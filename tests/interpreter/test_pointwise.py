"""Ops that carry nothing in generated kernels, on the CPU."""

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import BackendError
from attncc.runtime import pointwise
from tests.interpreter.test_states import check


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 3, 12), (1, 1, 1, 7), (3, 40, 1, 16)])
def test_gated_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, z, w = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    check(ac.ops.gated_rms_norm, x=x, z=z.flip(-2), w=w)
    check(ac.ops.gated_rms_norm, x=x, z=z, gate_first=True)


def test_rows_of_views_and_of_more_than_a_block() -> None:
    both = randn(2, 3, 2, 16)
    check(ac.ops.l2_norm, x=both[..., :8])
    check(ac.ops.silu, x=both[:, ::2, :, 8:])
    check(ac.ops.silu, x=randn(1, 2, 1, 2500))
    check(ac.ops.rms_norm, x=randn(1, 2, 1, 2500), w=randn(2500))


def test_packed_rows() -> None:
    x, cu = randn(9, 3, 12), torch.tensor([0, 4, 4, 9])
    check(ac.ops.gated_rms_norm, x=x, z=x.flip(0), w=randn(12), cu_seqlens=cu)


@pytest.mark.parametrize("op", [ac.ops.rope, ac.ops.rope_interleaved])
def test_rotations(op: ac.Op) -> None:
    angle = torch.arange(64)[:, None] * torch.rand(5, generator=torch.Generator().manual_seed(1))
    at = torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    check(op, x=randn(2, 7, 3, 10), position=at, cos=angle.cos(), sin=angle.sin(), sizes={"R": 2})


@ac.op(out={"o": "B T H D", "norm": "B T H"})
def split(x=ac.Activation("B T H D"), at=ac.Activation("B"), eps=ac.param(default=0.5)):
    """Two outputs, one without the tile's axis; positions; something of the batch alone."""
    n = ac.sqrt(ac.sum(x * x, "D")) + at * ac.index("T")
    return x / (n + eps), n


def test_several_outputs_positions_and_numbers() -> None:
    check(split, x=randn(2, 5, 3, 12), at=torch.rand(2), eps=2.0)


def test_no_rows_launch_nothing() -> None:
    assert ac.ops.silu(torch.zeros(2, 0, 3, 8), backend="triton").shape == (2, 0, 3, 8)


def test_more_rows_than_are_counted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "MOST", 5)
    with pytest.raises(BackendError, match="too many rows"):
        ac.ops.silu(randn(1, 2, 3, 8), backend="triton")
    assert ac.ops.silu(randn(1, 1, 3, 8), backend="triton").isfinite().all()
