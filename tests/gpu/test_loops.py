"""Loops over tokens on the GPU: inputs a token ahead, and states in parts, against fp64."""

import pytest
import torch
import torch.nn.functional as F

import attncc as ac
from attncc.codegen import loops_apart, plan_across
from attncc.codegen.passes.split_rows import SplitRows
from attncc.runtime import affine, rows_apart
from tests.gpu.checking import DEVICE, check, offsets

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def in_parts_and_a_token_ahead(monkeypatch):
    monkeypatch.setattr(plan_across, "BY_RULE", False)
    monkeypatch.setattr(loops_apart, "PARTS", 8)
    for kept in (rows_apart._PARTS, affine._PLANS, affine._FOUND):
        kept.clear()
    yield
    for kept in (rows_apart._PARTS, affine._PLANS, affine._FOUND):
        kept.clear()


def oja(lead, heads, key, value, dtype=torch.bfloat16):
    """Arguments of the gated Oja rule, ``lead`` being B and T, or T of packed sequences."""

    def unit(width):
        return F.normalize(torch.randn(*lead, heads, width, device=DEVICE), dim=-1).to(dtype)

    gates = F.logsigmoid(torch.randn(*lead, heads, value, device=DEVICE) + 2)
    return unit(key), unit(key), unit(value), gates, torch.rand(*lead, heads, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loop_whose_outputs_alone_sum_over_an_axis(dtype):
    torch.manual_seed(0)
    state = torch.randn(2, 3, 64, 128, device=DEVICE)
    check(ac.ops.gated_oja, *oja((2, 41), 3, 64, 128, dtype), s=state)
    assert any(isinstance(parts, SplitRows) for _, parts in rows_apart._PARTS.values())


def test_loops_over_packed_sequences():
    torch.manual_seed(1)
    lengths = [0, 1, 40, 0, 17]
    state = torch.randn(len(lengths), 2, 128, 64, device=DEVICE)
    args = oja((sum(lengths),), 2, 128, 64)
    result = check(ac.ops.gated_oja, *args, s=state, cu_seqlens=offsets(lengths))
    assert torch.equal(result["s"][[0, 3]], state[[0, 3]])
