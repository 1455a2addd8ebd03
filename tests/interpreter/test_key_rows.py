"""Decays per key element with several rows a token, and with reads ahead of the decay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import attncc.dsl.api as ac
from attncc.codegen.emit.scan_sources import choose_plans
from attncc.codegen.plan_scan import StepPlan
from attncc.dsl.build import Declaration
from attncc.dsl.library.rwkv7 import rwkv7
from attncc.runtime import affine
from tests.interpreter.test_affine import check, unit

SIZES = {"B": 1, "H": 1, "K": 24, "V": 16}


@ac.op(scan="T", out={"o": "B T H V", "p": "B T H V"})
def ahead_and_behind(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), a=ac.Activation("B T H K"),
    v=ac.Activation("B T H V"), w=ac.Activation("B T H K"), s=ac.State("B H K V"),
):  # fmt: skip
    """Three rows a token, reads of rows on either side of the decay, read-outs on either side."""
    early = ac.dot(s, q, "K")
    bonus = ac.dot(s, a, "K")
    s = ac.exp(w) * s + k * v
    s = s - a * (0.5 * ac.dot(s, k, "K"))
    s = s + k * (0.25 * bonus)
    return s, early, ac.dot(s, q, "K") + v


@ac.op(scan="T", out="B T H V")
def decay_last(
    q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
    w=ac.Activation("B T H K"), s=ac.State("B H V K"),
):  # fmt: skip
    """A write ahead of the decay, and a read-out behind it."""
    s = ac.exp(w) * (s + k * (v - ac.dot(s, k, "K")))
    return s, ac.dot(s, q, "K")


def inputs(names: str, tokens: int, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {n: unit(torch.randn(tokens, 1, 24)).to(dtype) for n in names}
    found |= {"v": torch.randn(tokens, 1, 16).to(dtype)}
    gates = torch.nn.functional.logsigmoid(torch.randn(tokens, 1, 24) + 2)
    gates[tokens // 3] = -torch.inf  # everything before is forgotten
    gates[tokens // 2 : tokens // 2 + 4] = -20
    return found | {"w": gates}


def rwkv(tokens: int, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = inputs("rk", tokens, dtype=dtype)
    a = unit(torch.randn(tokens, 1, 24))
    return found | {"a": a.to(dtype), "b": (-1.5 * torch.rand(tokens, 1, 1) * a).to(dtype)}


CASES: dict[str, tuple[Declaration, Callable[..., dict[str, torch.Tensor]]]] = {
    "rwkv7": (rwkv7, rwkv),
    "ahead_and_behind": (ahead_and_behind, lambda n, dtype: inputs("qka", n, dtype=dtype)),
    "decay_last": (decay_last, lambda n, dtype: inputs("qk", n, dtype=dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_rows_and_reads_on_either_side_of_a_decay_per_key(name: str, dtype: torch.dtype) -> None:
    op, make = CASES[name]
    tensors = make(71, dtype=dtype)
    state = torch.randn(3, 1, *((16, 24) if name == "decay_last" else (24, 16)))
    sizes = {**SIZES, "B": 3, "T": 71}
    found = check(op, tensors | {"s": state}, sizes, [0, 70, 1])
    assert found.kinds == ("Chunked",)
    assert torch.equal(found.results["s"][0], state[0])


def test_segments_of_several_rows_a_token() -> None:
    tensors = rwkv(130, dtype=torch.bfloat16)
    check(rwkv7, tensors, {**SIZES, "T": 130}, [130], segments=2)


@pytest.mark.parametrize("lengths", [[0, 5, 1], None], ids=str)
def test_inputs_that_are_asked_for_a_token_ahead(
    lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(*args: Any, **named: Any) -> StepPlan:
        plan = choose_plans(*args, **named)
        assert isinstance(plan, StepPlan)
        return replace(plan, ahead=True)

    monkeypatch.setattr(affine, "choose_plans", chosen)
    tensors = rwkv(6, dtype=torch.bfloat16)
    sizes = {**SIZES, "T": 6, "B": 3}
    if lengths is None:
        tensors, sizes = {n: t[None] for n, t in tensors.items()}, {**sizes, "B": 1}
    assert check(rwkv7, tensors, sizes, lengths, phase="decode").kinds == ("Stepwise",)
