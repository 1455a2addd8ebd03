import pytest
import torch

from attncc import ops
from benchmarks import oracles
from benchmarks.answers import run_and_judge
from benchmarks.groups import (
    attend,
    delta_rule_prefill,
    gdp,
    gla_prefill,
    kda_prefill,
    prefill_mods,
    recur,
    simple_gla_prefill,
)
from tests.gdp_document import document

CPU = torch.device("cpu")
F64 = torch.float64


def gdn(B: int, T: int, Hk: int = 2, Hv: int = 4) -> list[torch.Tensor]:
    x = recur.inputs_of(B, T, Hk, Hv, 8, 6, CPU)
    state = torch.randn(B, Hv, 8, 6, generator=torch.Generator().manual_seed(3))
    return [*(x[n].float() for n in recur.NAMES), state]


@pytest.mark.parametrize("T", [1, 7, 8, 19])
def test_both_delta_rule_oracles_agree_with_the_reference(T: int) -> None:
    *xs, state = gdn(2, T)
    want = ops.gated_delta_rule.reference(*xs, s=state)
    for got in (
        oracles.gated_delta_chunked(*xs, state, chunk=4, block=2),
        oracles.gated_delta_step(*xs, state),
    ):
        torch.testing.assert_close(got[0], want.s, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(got[1], want[1], atol=1e-12, rtol=1e-12)


def test_the_chunked_oracle_at_its_own_sizes_agrees_with_the_steps() -> None:
    *xs, state = gdn(1, 300)
    for got, want in zip(
        oracles.gated_delta_chunked(*xs, state, block=2),
        oracles.gated_delta_step(*xs, state),
        strict=True,
    ):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_expanded_oracle_is_the_gated_delta_product(n: int) -> None:
    x = gdp.case(34, n, 2, 8, H=2, K=16).build(CPU)
    names = {"g": x["alpha"], "initial_state": torch.randn(x["s"].shape), "num_householder": n}
    want = document(**{m: x[m] for m in ("q", "k", "v", "beta", "cu_seqlens")}, **names)
    got = gdp.expanded({**x, "s": names["initial_state"]}, F64)
    for ours, loop in zip(got, want, strict=True):  # alpha is rounded, g is not
        torch.testing.assert_close(ours, loop, atol=1e-6, rtol=1e-6)


def test_our_call_of_the_product_gives_the_oracles_answer() -> None:
    case = gdp.case(40, 2, 2, 16, H=2, K=16)
    x = case.build(CPU)
    answer = run_and_judge(case.ours(x, "torch"), list(case.parts(x)))
    assert answer.right, answer


RECURRENCES = [
    m.PREFILL for m in (kda_prefill, gla_prefill, simple_gla_prefill, delta_rule_prefill)
]


@pytest.mark.parametrize("r", RECURRENCES, ids=lambda r: r.group)
def test_the_oracle_of_recurrences_agrees_with_the_reference_and_our_call(r) -> None:
    case = r.case(21, 2, 8, 6)
    x = case.build(CPU)
    op = getattr(ops, r.op).with_patterns(**r.patterns)
    for got, want in zip(
        oracles.recurrence(**x), op.reference(*(x[n] for n in r.names)), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    answer = run_and_judge(case.ours(x, "torch"), list(case.parts(x)))
    assert answer.right, answer


@pytest.mark.parametrize(("T", "S"), [(5, 5), (1, 9), (4, 2)])
def test_the_attention_oracle_agrees_with_the_reference(T: int, S: int) -> None:
    x = attend.builder(2, T, S, 6, 2, 8)(CPU)
    want = ops.attention.reference(x["q"], x["k"], x["v"])
    torch.testing.assert_close(oracles.attention(x["q"], x["k"], x["v"]), want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["softcap", "alibi", "window3", "document4"])
def test_each_mod_declares_what_its_oracle_computes(name: str) -> None:
    from benchmarks.groups import declared

    mod = prefill_mods.mods(10, width=3, length=4)[name]
    case = prefill_mods.case(name, mod, 2, 10, 4, 2, 8)
    x = case.build(CPU)
    want = getattr(declared, mod.op).reference(x["q"], x["k"], x["v"], **x["extra"])
    got = torch.cat([part.oracle for part in case.parts(x)])
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["softcap", "alibi", "window3", "document4"])
def test_each_mod_tells_flex_attention_the_same(name: str) -> None:
    x = prefill_mods.case(name, prefill_mods.mods(10, 3, 4)[name], 1, 10, 4, 2, 8).build(CPU)
    mod = prefill_mods.mods(10, 3, 4)[name]
    i, j = torch.arange(10)[:, None], torch.arange(10)
    seen = mod.flex_mask(x)(0, 0, i, j)
    ours = (j <= i) & (mod.mask(x)(i, j) if mod.mask else True)
    assert torch.equal(seen, ours)
    if mod.flex_score is not None and mod.score is not None:
        s = torch.randn(4, 10, 10, dtype=F64)
        heads = torch.arange(4)[:, None, None]
        flex = mod.flex_score(x)(s, 0, heads, i, j)
        torch.testing.assert_close(mod.score(x)(s, i, j, heads), flex)
