"""Functions printed for repeated use keep fp32's accuracy."""

import math
import types
from typing import Any

import pytest
import torch

from attncc.codegen.emit import exact
from attncc.dsl.ir import Fn

TL = types.SimpleNamespace(
    where=lambda c, a, b: torch.where(c, torch.as_tensor(a), torch.as_tensor(b)),
    abs=torch.abs, exp=torch.exp, exp2=torch.exp2, floor=torch.floor, log=torch.log,
    maximum=lambda a, b: torch.maximum(a, torch.as_tensor(b)),
)  # fmt: skip
EXACT = {Fn.EXP: torch.exp, Fn.TANH: torch.tanh, Fn.SIGMOID: torch.sigmoid,
         Fn.SILU: torch.nn.functional.silu,
         Fn.SOFTPLUS: lambda x: torch.logaddexp(x, torch.zeros_like(x))}  # fmt: skip


def printed(fn: Fn, x: torch.Tensor) -> torch.Tensor:
    """The value of a printed function, each named part computed in fp32."""
    scope: dict[str, Any] = {"tl": TL, "x": x}

    def name(text: str) -> str:
        label = f"v{len(scope)}"
        scope[label] = eval(text, scope)
        return label

    result: torch.Tensor = eval(exact.FUNCTIONS[fn]("x", name), scope)
    return result


@pytest.mark.parametrize("fn", list(exact.FUNCTIONS))
def test_within_a_rounding_or_two_everywhere(fn: Fn) -> None:
    x = torch.cat([torch.linspace(-80, 80, 200001), torch.logspace(-20, 1, 2001), torch.zeros(1)])
    want = EXACT[fn](x.double())
    gap = (printed(fn, x).double() - want).abs()
    scale = want.abs().clamp(min=1.0) if fn is not Fn.EXP else want
    assert (gap <= 2.4e-7 * scale).all()


def test_exp_keeps_its_ends() -> None:
    x = torch.tensor([-math.inf, -200.0, -104.5, 0.0, 88.5, 90.0, math.inf, math.nan])
    value = printed(Fn.EXP, x)
    assert value[:4].tolist() == [0, 0, 0, 1]
    assert value[4].isfinite() and math.isclose(value[4], math.exp(88.5), rel_tol=1e-6)
    assert value[5:7].isposinf().all() and value[7].isnan()


def test_tanh_keeps_small_values_and_what_is_not_finite() -> None:
    x = torch.logspace(-30, -1, 301)
    assert ((printed(Fn.TANH, x).double() / x.double().tanh() - 1).abs() < 2e-7).all()
    ends = printed(Fn.TANH, torch.tensor([torch.inf, -torch.inf, torch.nan]))
    assert ends[:2].tolist() == [1, -1] and ends[2].isnan()


def test_softplus_keeps_small_values_and_what_is_not_finite() -> None:
    x = torch.linspace(-80, -5, 7501)
    want = x.double().exp().log1p()
    assert ((printed(Fn.SOFTPLUS, x).double() / want - 1).abs() < 4e-7).all()
    ends = printed(Fn.SOFTPLUS, torch.tensor([torch.inf, -torch.inf, torch.nan]))
    assert ends[:2].tolist() == [torch.inf, 0] and ends[2].isnan()
