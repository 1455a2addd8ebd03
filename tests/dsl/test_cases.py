"""Rows of the case list that are about meaning alone, in fp64 (a2, a3, a11, a14, a16, a17, a34)."""

import math
from typing import Any

import pytest
import torch

from attncc.dsl.interp import Result, interpret
from attncc.dsl.library.attention import attention
from attncc.dsl.library.gated_delta_rule import gated_delta_rule
from tests.dsl.test_interp_scan import gated_delta_product
from tests.strategies import randn

F64 = torch.float64


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, D], k [S, D], v [S, E] to o [T, E] and lse [T]."""
    sizes = {"B": 1, "T": len(q), "S": len(k), "Hkv": 1, "G": 1}
    sizes |= {"D": q.shape[1], "E": v.shape[1]}
    tensors = {"q": q[None, :, None], "k": k[None, :, None], "v": v[None, :, None]}
    got = interpret(attention.trace(), tensors, sizes, return_lse=True)
    assert got.lse is not None
    return got.outputs["o"][0, :, 0], got.lse.reshape(len(q))


def delta(q: Any, k: Any, v: Any, *, g: Any = None, beta: Any = None, s: Any = None) -> Result:
    """One head: q, k [T, K], v [T, V], g and beta [T], s [K, V]; fp64."""
    given = {"q": q[None, :, None], "k": k[None, :, None], "v": v[None, :, None]}
    given |= {n: x[None, :, None] for n, x in (("g", g), ("beta", beta)) if x is not None}
    if s is not None:
        given["s"] = s[None, None]
    sizes = {"B": 1, "T": len(q), "Hk": 1, "G": 1, "K": q.shape[1], "V": v.shape[1]}
    return interpret(gated_delta_rule.trace(frozenset(given)), given, sizes)


@pytest.mark.parametrize("s", [0, 2])
def test_a2_queries_before_the_history_see_nothing(s: int) -> None:
    q, k, v = randn(0, 4, 8), randn(1, s, 8), randn(2, s, 3)
    o, lse = attend(q, k, v)
    blind = 4 - s
    assert torch.equal(o[:blind], torch.zeros(blind, 3).double())
    assert lse[:blind].tolist() == [-math.inf] * blind
    for i in range(blind, 4):
        score = k[: i + 1 - blind] @ q[i] / math.sqrt(8)
        torch.testing.assert_close(lse[i], score.logsumexp(0))
        torch.testing.assert_close(o[i], score.softmax(0) @ v[: i + 1 - blind])


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a3_huge_negative_scores_are_ordinary(n: int) -> None:
    q = torch.full((1, 128), -64.0, dtype=F64)
    k, v = torch.full((n, 128), 64.0, dtype=F64), torch.ones(n, 1).double()
    assert (q @ k.T).unique().tolist() == [-524288.0]
    o, lse = attend(q, k, v)
    assert o.item() == pytest.approx(1.0, abs=1e-15)
    assert lse.item() == pytest.approx(-46340.950011841578 + math.log(n), abs=1e-9)
    if n == 1:
        assert lse.item() / math.log(2) == pytest.approx(-66855.86, abs=0.01)


def test_a11_a_gate_of_minus_infinity_forgets_everything_before() -> None:
    q, k, v = randn(0, 5, 3), randn(1, 5, 3), randn(2, 5, 4)
    g, beta = -randn(3, 5).abs(), randn(4, 5).sigmoid()
    g[2] = -math.inf
    past = randn(5, 3, 4)
    cut = delta(q[:3], k[:3], v[:3], g=g[:3], beta=beta[:3], s=past)
    torch.testing.assert_close(cut.states["s"][0, 0], beta[2] * torch.outer(k[2], v[2]))
    whole = delta(q, k, v, g=g, beta=beta, s=past)
    fresh = delta(q[2:], k[2:], v[2:], g=g[2:], beta=beta[2:])
    assert torch.equal(whole.outputs["o"][:, 2:], fresh.outputs["o"])
    assert torch.equal(whole.states["s"], fresh.states["s"])


@pytest.mark.parametrize("gates", ["given", "absent"])
def test_a14_repeated_unit_keys_read_back_the_last_value(gates: str) -> None:
    t, d = 64, 128
    key = torch.full((t, d), d**-0.5, dtype=F64)
    v = randn(0, t, 4)
    one = {"g": torch.zeros(t).double(), "beta": torch.ones(t).double()}
    got = delta(key, key, v, **(one if gates == "given" else {}))
    scale = d**-0.5
    torch.testing.assert_close(got.outputs["o"][0, :, 0], scale * v, rtol=1e-11, atol=1e-13)
    final = torch.outer(key[-1], v[-1])
    torch.testing.assert_close(got.states["s"][0, 0], final, rtol=1e-11, atol=1e-13)


def test_a14_keys_that_are_exact_give_exact_values() -> None:
    t, d = 64, 4
    key, v = torch.full((t, d), 0.5, dtype=F64), randn(0, t, 4).round()
    got = delta(key, key, v)
    assert torch.equal(got.outputs["o"][0, :, 0], 0.5 * v)


def test_a16_beta_of_two_flips_the_component_along_the_key() -> None:
    t = 6
    key = torch.zeros(t, 3).double()
    key[:, 0] = 1.0
    beta, s = torch.full((t,), 2.0, dtype=F64), torch.ones(3, 2).double()
    for steps in range(t + 1):
        part = slice(0, steps)
        got = delta(key[part], key[part], torch.zeros(steps, 2).double(), beta=beta[part], s=s)
        assert got.states["s"][0, 0, 0].tolist() == [(-1.0) ** steps] * 2
        assert got.states["s"][0, 0, 1:].tolist() == [[1.0, 1.0]] * 2


def product(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, alpha: float, n: int) -> Result:
    """One head from a state of ones; the scale 1/sqrt(K) is taken back out."""
    t, d = q.shape
    tensors = {
        "q": q[None, :, None] * math.sqrt(d),
        "k": k[None, :, None],
        "v": v[None, :, None],
        "g": torch.full((1, t, 1), math.log(alpha), dtype=F64),
        "s": torch.ones(1, 1, d, v.shape[1]).double(),
    }
    sizes = {"B": 1, "T": t, "N": n, "H": 1, "K": d, "V": v.shape[1]}
    return interpret(gated_delta_product.trace(frozenset({"g", "s"}), sizes), tensors, sizes)


def test_a17_two_updates_of_one_token_read_after_the_last() -> None:
    k, q = torch.eye(8).double()[:2], torch.zeros(1, 8).double()
    q[0, :2] = 1.0
    got = product(k, torch.arange(16.0).double().reshape(2, 8), q, 0.5, 2)
    want = torch.arange(8.0, 24.0, 2.0).double()
    torch.testing.assert_close(got.outputs["o"].reshape(8), want, rtol=1e-14, atol=1e-14)
    rest = got.states["s"][0, 0, 2:]
    torch.testing.assert_close(rest, torch.full((6, 8), 0.5, dtype=F64), rtol=1e-14, atol=1e-14)


def test_a17_the_decay_is_once_a_token_not_once_an_update() -> None:
    zero, q = torch.zeros(4, 8).double(), torch.zeros(2, 8).double()
    got = product(zero, zero, q, 0.5, 2)
    quarter = torch.full((1, 1, 8, 8), 0.25, dtype=F64)
    torch.testing.assert_close(got.states["s"], quarter, rtol=1e-14, atol=0)


@pytest.mark.parametrize("length", [1, 33, 63])
def test_a34_zero_pads_are_inert(length: int) -> None:
    q, k, v = randn(0, length, 4), randn(1, length, 4), randn(2, length, 3)
    g, beta, s = -randn(3, length).abs(), randn(4, length).sigmoid(), randn(5, 4, 3)
    bare = delta(q, k, v, g=g, beta=beta, s=s)
    pad = -length % 16
    padded = [torch.cat([x, x.new_zeros(pad, *x.shape[1:])]) for x in (q, k, v, g, beta)]
    got = delta(*padded[:3], g=padded[3], beta=padded[4], s=s)
    assert torch.equal(got.states["s"], bare.states["s"])
    assert torch.equal(got.outputs["o"][:, :length], bare.outputs["o"])
    assert not got.outputs["o"][:, length:].any()
