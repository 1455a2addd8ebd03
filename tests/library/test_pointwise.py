"""Norms, gates and rotations: against formulas in plain PyTorch, and what has no kernel."""

from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm, normalize, rms_norm, silu

import attncc as ac
from attncc.dsl.errors import SizeError
from tests.tolerance import assert_close

SHAPE = (2, 7, 3, 10)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


def turned(x: torch.Tensor, at: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """RoPE through complex numbers, base 100."""
    pairs = x.shape[-1] // 2
    steps = torch.arange(pairs, dtype=torch.float64)
    unit = torch.polar(
        torch.ones(1, dtype=torch.float64), at[..., None] * 100.0 ** (-steps / pairs)
    )
    split = x.double().unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    split = split if interleaved else split.transpose(-1, -2)
    y = torch.view_as_real(torch.view_as_complex(split.contiguous()) * unit[:, :, None])
    return (y if interleaved else y.transpose(-1, -2)).flatten(-2)


def gated(x: Any, z: Any, w: Any, first: bool = False) -> torch.Tensor:
    if first:
        return rms_norm(x * silu(z), x.shape[-1:], w, 1e-6)
    return rms_norm(x, x.shape[-1:], w, 1e-6) * silu(z)


def normed(x: Any, w: Any) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:], w, 1e-6)


# The op, which of (x, z, w) it takes, what else, and the formula.
CASES: dict[str, tuple[Any, str, dict[str, Any], Any]] = {
    "rms_norm": (ac.ops.rms_norm, "xw", {}, lambda x, z, w: normed(x, w)),
    "without a weight": (ac.ops.rms_norm, "x", {}, lambda x, z, w: normed(x, None)),
    "gated": (ac.ops.gated_rms_norm, "xzw", {}, gated),
    "gate first": (
        ac.ops.gated_rms_norm, "xzw", {"gate_first": True},
        lambda x, z, w: gated(x, z, w, first=True),
    ),
    "layer_norm": (
        ac.ops.layer_norm, "xw", {}, lambda x, z, w: layer_norm(x, x.shape[-1:], w),
    ),
    "l2_norm": (ac.ops.l2_norm, "x", {"eps": 0.0}, lambda x, z, w: normalize(x, dim=-1)),
    "silu": (ac.ops.silu, "x", {}, lambda x, z, w: silu(x)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rows_equal_the_formula(name: str, dtype: torch.dtype) -> None:
    tensors = drawn(SHAPE, SHAPE, SHAPE[-1:], dtype=dtype)
    op, names, more, formula = CASES[name]
    args = [t for n, t in zip("xzw", tensors, strict=True) if n in names]
    exact = formula(*(t.double() for t in tensors))
    rough = formula(*(t.float() for t in tensors)).to(dtype)
    assert_close(op(*args, **more), exact, rough, dtype, name)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_pairs_at_their_positions(interleaved: bool) -> None:
    (x,) = drawn(SHAPE)
    at = torch.tensor([[0, 1, 5, 63, 2, 2, 9]] * 2)
    steps = torch.arange(5, dtype=torch.float64)
    angle = torch.arange(64)[:, None] * 100.0 ** (-steps / 5)
    op = ac.ops.rope_interleaved if interleaved else ac.ops.rope
    o = op(x, at, angle.cos().float(), angle.sin().float(), sizes={"R": 2})
    exact = turned(x, at, interleaved)
    assert_close(o, exact, exact.float(), torch.float32)


@pytest.mark.parametrize("op", [ac.ops.rope, ac.ops.rope_interleaved])
def test_rope_turns_pairs_and_nothing_else(op: Any) -> None:
    x, table = drawn((1, 2, 1, 12), (9, 4))
    with pytest.raises(SizeError, match=r"axis R: .*expected 2, found 3"):
        op(x, torch.zeros(1, 2, dtype=torch.int32), table, table)


def test_a_row_of_zeros_stays_zero() -> None:
    x = torch.zeros(1, 1, 1, 8)
    for o in (ac.ops.l2_norm(x), ac.ops.rms_norm(x), ac.ops.gated_rms_norm(x, x)):
        assert torch.equal(o, x)


def test_gradients_flow_through_the_torch_lowering() -> None:
    x, z, w = (t.requires_grad_() for t in drawn(SHAPE, SHAPE, SHAPE[-1:]))
    found = torch.autograd.grad(ac.ops.gated_rms_norm(x, z, w).square().sum(), (x, z, w))
    doubles = [t.detach().double().requires_grad_() for t in (x, z, w)]
    exact = torch.autograd.grad(gated(*doubles).square().sum(), doubles)
    rough = torch.autograd.grad(gated(x, z, w).square().sum(), (x, z, w))
    for got, want, near in zip(found, exact, rough, strict=True):
        assert_close(got, want, near, torch.float32)


def test_explain_says_what_it_is() -> None:
    text = ac.ops.gated_rms_norm.explain(sizes={"V": 128})
    assert "no fold: rows that need nothing of each other" in text
    assert "gated_rms_norm__pointwise__" in text


@ac.op(out="B T D")
def cumulated(x=ac.Activation("B T D")):
    return ac.cumsum(x, "D")


@ac.op(out={"o": "B T D", "n": "B D"})
def other_rows(x=ac.Activation("B T D"), y=ac.Activation("B D")):
    return x, y


@ac.op(out="B T")
def summed_batch(x=ac.Activation("B T"), y=ac.Activation("B")):
    return x + ac.sum(y, "B")


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (cumulated, "no kernel code for cumulative"),
        (other_rows, "the output n has other rows than o"),
        (summed_batch, "a sum over B, whose size is not compiled in"),
    ],
)
def test_what_has_no_kernel_says_why(op: Any, reason: str) -> None:
    assert f"kernels: none: {reason}" in op.explain(sizes={"D": 64})
