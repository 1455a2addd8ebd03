"""Loops whose outputs alone sum over an axis of the state, in parts of it."""

import pytest
import torch
import torch.nn.functional as F

import attncc as ac
from attncc.codegen import loops_apart, plan_across
from attncc.codegen.passes.split_rows import SplitRows
from attncc.runtime import rows_apart
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from tests.gpu.checking import check


@pytest.fixture(autouse=True)
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_across, "BY_RULE", False)
    monkeypatch.setattr(loops_apart, "PARTS", 4)
    monkeypatch.setattr(rows_apart, "_PARTS", {})


def arguments(*, packed: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    B, T, H, K, V = 2, 14, 2, 32, 24
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(2))
    v = F.normalize(torch.randn(B, T, H, V), dim=-1)
    g, beta = F.logsigmoid(torch.randn(B, T, H, V) + 2), torch.rand(B, T, H)
    args = [q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta]
    if not packed:
        return args, {"s": torch.randn(B, H, K, V)}
    cu = torch.tensor([0, 0, 19, 28])
    return [x.flatten(0, 1) for x in args], {"s": torch.randn(3, H, K, V), "cu_seqlens": cu}


@pytest.mark.parametrize("packed", [False, True])
def test_a_loop_in_parts_is_the_loop(packed: bool) -> None:
    args, named = arguments(packed=packed)
    check(ac.ops.gated_oja, *args, **named)
    assert any(isinstance(parts, SplitRows) for _, parts in rows_apart._PARTS.values())


def test_partial_sums_that_would_take_too_much_memory_are_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args, named = arguments(packed=False)
    call, _ = bind(ac.ops.gated_oja.declaration, args, named)
    spec = spec_of(call)
    assert rows_apart.parts_of(call, spec, "prefill") is not None
    made = 2 * 14 * 2 * 4 * 24 * 4  # B T H, parts, V, bytes
    monkeypatch.setattr(rows_apart, "PARTIAL_BYTES", made)
    assert rows_apart.parts_of(call, spec, "prefill") is not None
    monkeypatch.setattr(rows_apart, "PARTIAL_BYTES", made - 1)
    assert rows_apart.parts_of(call, spec, "prefill") is None
