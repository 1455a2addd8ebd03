"""Functions printed for repeated use keep fp32's accuracy."""

import types

import torch

from attncc.codegen.emit import exact

TL = types.SimpleNamespace(where=torch.where, abs=torch.abs, exp=torch.exp)


def test_tanh_stays_within_a_rounding_everywhere() -> None:
    x = torch.cat([torch.linspace(-12, 12, 200001), torch.logspace(-20, 1, 2001), torch.zeros(1)])
    value = eval(exact.tanh("x"), {"tl": TL, "x": x})
    gap = (value.double() - x.double().tanh()).abs()
    assert gap.max() < 1.2e-7
    small = x.abs() < 0.5
    assert (gap[small] <= 2e-7 * x.double().tanh().abs()[small]).all()


def test_tanh_keeps_what_is_not_finite() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    value = eval(exact.tanh("x"), {"tl": TL, "x": x})
    assert value[:2].tolist() == [1, -1] and value[2].isnan()
