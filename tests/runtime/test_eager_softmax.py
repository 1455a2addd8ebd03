"""Softmax folds in the torch lowering against the interpreter."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl.errors import CacheError
from attncc.runtime.eager import blocks
from attncc.runtime.eager.run import run
from tests.runtime import eager_ops as ops
from tests.runtime.eager_ops import call_of, check, results
from tests.strategies import cuts, randn, seeds
from tests.tolerance import assert_close, max_error

INF = torch.inf
LENGTHS = (0, 1, 33, 63, 64, 65, 1000)


def heads(seed: int, b: int, t: int, s: int, h: int, g: int, d: int, e: int) -> list[torch.Tensor]:
    q, k = randn(seed, b, t, h * g, d), randn(seed + 1, b, s, h, d)
    return [x.float() for x in (q, k, randn(seed + 2, b, s, h, e))]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few queries and keys, so that small problems have many."""
    monkeypatch.setattr(blocks, "BUDGET", 700)


# --- shapes


@pytest.mark.parametrize("s", LENGTHS)
@pytest.mark.parametrize("t", [0, 1, 33, 65])
def test_any_lengths(t: int, s: int) -> None:
    # a2: more queries than keys is one of them
    check(ac.ops.attention, *heads(0, 1, t, s, 2, 1, 16, 8), return_lse=True)


@pytest.mark.parametrize("t", LENGTHS)
def test_prefill_of_any_length(t: int) -> None:
    check(ac.ops.attention, *heads(1, 1, t, t, 1, 2, 16, 16), return_lse=True)


@pytest.mark.parametrize("g", [1, 4, 6, 7])
@pytest.mark.parametrize("t", [1, 5])
def test_any_group(g: int, t: int) -> None:
    # a8
    check(ac.ops.attention, *heads(2, 2, t, 37, 2, g, 16, 16))


@pytest.mark.parametrize("d", [16, 32, 64, 96, 160, 192, 256])
def test_any_head_dim(d: int) -> None:
    # a9
    check(ac.ops.attention, *heads(3, 1, 5, 40, 1, 2, d, d))


def test_groups_are_repeated_heads() -> None:
    # a8: 12 query heads on 2
    q, k, v = heads(4, 2, 1, 50, 2, 6, 16, 16)
    got = ac.ops.attention(q, k, v, backend="torch")
    wide = ac.ops.attention(
        q, k.repeat_interleave(6, 2), v.repeat_interleave(6, 2), backend="torch"
    )
    assert max_error(got, wide.double()) < 1e-6


def test_strides_do_not_matter() -> None:
    # a29
    q, k, v = heads(5, 2, 9, 30, 3, 2, 16, 16)
    strided = k.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack([k, v], 3).flatten(2, 3)  # pages of interleaved K and V
    got = ac.ops.attention(q, strided, v, backend="torch")
    paged = ac.ops.attention(q, both[:, :, ::2], both[:, :, 1::2], backend="torch")
    want = ac.ops.attention(q, k, v, backend="torch")
    assert torch.equal(got, want) and torch.equal(paged, want)


def test_an_output_may_be_strided() -> None:
    q, k, v = heads(5, 2, 9, 30, 3, 2, 16, 16)
    room = torch.full((2, 9, 12, 16), torch.nan)
    ac.ops.attention(q, k, v, backend="torch", out=room[:, :, ::2])
    assert torch.equal(room[:, :, ::2], ac.ops.attention(q, k, v, backend="torch"))
    assert bool(room[:, :, 1::2].isnan().all())


def test_no_sequences() -> None:
    check(ac.ops.attention, *heads(6, 0, 3, 4, 2, 2, 16, 8), return_lse=True)


# --- rows that see nothing, huge scores


@pytest.mark.parametrize("s", [0, 2])
def test_a_row_that_sees_nothing_is_empty(s: int) -> None:
    # a2
    q, k, v = heads(7, 1, 4, s, 1, 1, 16, 8)
    got = ac.ops.attention(q, k, v, return_lse=True, backend="torch")
    blind = 4 - s
    assert bool((got.o[:, :blind] == 0).all()) and bool((got.lse[:, :blind] == -INF).all())
    assert bool(got.lse[:, blind:].isfinite().all())


@pytest.mark.parametrize("keys", [1, 2, 300])
def test_huge_negative_scores_are_exact(keys: int, small_blocks: None) -> None:
    # a3
    q, k = torch.full((1, 1, 1, 128), -64.0), torch.full((1, keys, 1, 128), 64.0)
    v = torch.ones(1, keys, 1, 8)
    got = ac.ops.attention(q, k, v, return_lse=True, backend="torch")
    assert bool((got.o == 1).all())
    want = -524288 / 128**0.5 + torch.tensor(float(keys)).log().item()
    assert got.lse.item() == pytest.approx(want, abs=4e-3 + 1e-7 * abs(want))


def test_a_visible_score_of_minus_infinity_weighs_nothing(small_blocks: None) -> None:
    q, k, v = heads(8, 1, 9, 9, 1, 1, 16, 8)
    slopes = torch.tensor([INF])  # 0 * inf on the diagonal is NaN, the rest -inf
    call = call_of(ops.alibi, q, k, v, slopes)
    run(call, analyse(call.program))
    want = ops.alibi.reference(q, k, v, slopes)
    assert max_error(results(call)["o"], want) == 0


# --- score expressions


def expressions(t: int, s: int) -> dict[str, tuple[Any, list[Any], dict[str, Any]]]:
    q, k, v = heads(9, 2, t, s, 2, 3, 16, 8)
    q1, k1, v1 = heads(12, 2, t, s, 3, 1, 16, 16)
    q2, k2, _ = heads(15, 2, t, s, 3, 1, 16, 16)
    doc = torch.arange(s).mul(3).div(max(s, 1), rounding_mode="floor").int().expand(2, s)
    gate = -randn(20, 2, s, 3).float().abs()
    gate[:, 3:5] = -INF if s > 9 else 0
    plain = [x.float() for x in (randn(21, 2, s, 16), randn(22, 2, s, 8), randn(23, 2, s, 4))]
    return {
        "soft cap": (ops.soft_cap, [q, k, v], {"cap": 3.5}),
        "alibi": (ops.alibi, [q, k, v, torch.linspace(0.1, 1, 6)], {}),
        "sink and window": (ops.sink_window, [q, k, v, randn(24, 6).float()], {"w": 5}),
        "documents": (ops.documents, [q1, k1, v1, doc.contiguous()], {}),
        "difference": (ops.difference, [q1, q2, k1, k2, v1, randn(25, 3).float()], {}),
        "forgetting": (ops.forgetting, [q1, k1, v1, gate], {}),
        "cross": (ops.cross, [q1, k1, v1], {}),
        "two values": (ops.two_values, [q1, *plain, randn(26, 2, t, 3).float()], {}),
    }


@pytest.mark.parametrize("name", list(expressions(1, 1)))
@pytest.mark.parametrize("blocked", [False, True])
def test_any_score_mask_value_and_sink(
    name: str, blocked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocked:
        monkeypatch.setattr(blocks, "BUDGET", 700)
    for t, s in ((33, 33), (5, 40), (1, 65), (4, 2)):
        op, args, scalars = expressions(t, s)[name]
        check(op, *args, **scalars)


@pytest.mark.parametrize("op", [ops.across_queries, ops.warmed, ops.twice])
def test_what_works_across_queries_or_on_a_fold(op: Any, small_blocks: None) -> None:
    for t, s in ((9, 9), (5, 40), (1, 65), (4, 2), (0, 3)):
        q, k, v = heads(34, 2, t, s, 2, 1, 8, 8)
        more = (
            heads(37, 2, t, s, 2, 1, 8, 8)[1:] if op is ops.twice else [randn(33, 2, t, 2).float()]
        )
        if t or op is not ops.across_queries:  # its mean of no queries is 0 / 0
            check(op, q, k, v, *more)


def test_a_fold_without_queries() -> None:
    k, v = heads(38, 2, 1, 33, 2, 1, 8, 8)[1:]
    check(ops.pooled, randn(39, 2, 8).float(), k, v)


def test_blocks_of_queries_and_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads(30, 1, 40, 70, 1, 2, 16, 8)
    whole = ac.ops.attention(q, k, v, return_lse=True, backend="torch")
    for budget in (1, 300, 5000):
        monkeypatch.setattr(blocks, "BUDGET", budget)
        got = ac.ops.attention(q, k, v, return_lse=True, backend="torch")
        assert max_error(got.o, whole.o.double()) < 1e-6
        assert max_error(got.lse, whole.lse.double()) < 1e-6


def test_nan_and_infinite_values_stand_where_the_oracle_has_them(small_blocks: None) -> None:
    q, k, v = heads(31, 1, 40, 40, 1, 1, 16, 8)
    q[0, 7, 0, 3] = torch.nan
    v[0, 0, 0, 2] = INF
    check(ac.ops.attention, q, k, v)


@given(seed=seeds(), t=st.integers(0, 20), more=st.integers(-3, 40), g=st.integers(1, 3))
@settings(max_examples=15)
def test_random_sizes(seed: int, t: int, more: int, g: int) -> None:
    check(ac.ops.attention, *heads(seed, 2, t, max(0, t + more), 2, g, 8, 5), return_lse=True)


@given(seed=seeds(), t=st.integers(1, 30), w=st.integers(1, 12), budget=st.integers(1, 4000))
@settings(max_examples=15)
def test_random_windows_and_blocks(seed: int, t: int, w: int, budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BUDGET", budget)
        q, k, v = heads(seed, 1, t, t + 9, 1, 2, 8, 8)
        check(ops.sink_window, q, k, v, randn(seed, 2).float(), w=w)


# --- packed sequences

CU = [0, 100, 256, 512, 1500, 1500]


@pytest.mark.parametrize(
    "cu", [CU, [0, 0, 5, 9], [0, 5, 5, 9], [0, 5, 9, 9], [0, 0, 0], [0, 7, 14, 21, 22]]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_equals_dense(cu: list[int], dtype: torch.dtype) -> None:
    # a5: empty sequences first, in the middle, last, all
    q, k, v = (x[0] for x in heads(40, 1, cu[-1], cu[-1], 1, 2, 16, 8))
    got = ac.ops.attention(
        q, k, v, cu_seqlens=torch.tensor(cu, dtype=dtype), return_lse=True, backend="torch"
    )
    for lo, hi in pairwise(cu):
        args = (x[None, lo:hi] for x in (q, k, v))
        want = ac.ops.attention(*args, return_lse=True, backend="torch")
        assert max_error(got.o[lo:hi], want.o[0].double()) < 1e-6
        assert max_error(got.lse[lo:hi], want.lse[0].double()) < 1e-6


def test_packed_sequences_of_head_dim_256() -> None:
    # a5
    q, k, v = (x[0] for x in heads(42, 1, 9, 9, 1, 2, 256, 256))
    for cu in ([0, 0, 5, 9], [0, 5, 5, 9], [0, 5, 9, 9]):
        check(ac.ops.attention, q, k, v, cu_seqlens=torch.tensor(cu), return_lse=True)


def test_packed_with_other_histories() -> None:
    cu, cu_k = torch.tensor([0, 3, 3, 10, 13]), torch.tensor([0, 9, 14, 14, 23])
    q, k, v = (x[0] for x in heads(41, 1, 13, 23, 2, 2, 16, 8))
    check(ac.ops.attention, q, k, v, cu_seqlens=cu, cu_seqlens_k=cu_k, return_lse=True)


def test_packed_expressions() -> None:
    cu = torch.tensor([0, 9, 9, 17, 40])
    op, args, _ = expressions(40, 40)["documents"]
    check(op, *(x[0] for x in args), cu_seqlens=cu)
    op, args, _ = expressions(40, 40)["forgetting"]
    check(op, *(x[0] for x in args), cu_seqlens=cu)


# --- caches


def grown(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """Prefill in pieces through a cache."""
    b, s, h, d = k.shape
    cache = ac.DenseCache.allocate(
        ac.ops.attention, sizes={"B": b, "Hkv": h, "D": d, "E": v.shape[-1]}, capacity=s + 3,
        dtype=torch.float32,
    )  # fmt: skip
    for held in cache.tensors.values():
        held.fill_(torch.nan)
    outs, at = [], 0
    for n in pieces:
        own = (x[:, at : at + n] for x in (q, k, v))
        outs.append(ac.ops.attention(*own, cache=cache, backend="torch"))
        at += n
    assert cache.lengths.tolist() == [s] * b
    assert torch.equal(cache.tensors["k"][:, :s], k) and torch.equal(cache.tensors["v"][:, :s], v)
    return torch.cat(outs, 1)


@given(pieces=cuts(29, 4), seed=seeds())
@settings(max_examples=15)
def test_any_cut_of_the_prefill_is_the_whole(pieces: list[int], seed: int) -> None:
    q, k, v = heads(seed, 2, 29, 29, 2, 2, 8, 8)
    whole = ac.ops.attention(q, k, v, backend="torch")
    assert max_error(grown(q, k, v, pieces), whole.double()) < 1e-6


def test_decode_with_different_lengths() -> None:
    # each sequence attends to its own history; what lies beyond it is never read
    lengths = [5, 0, 12, 5]
    q, k, v = heads(50, 4, 3, 16, 2, 2, 16, 8)
    cache = ac.DenseCache({"k": k.clone(), "v": v.clone()}, torch.tensor(lengths).int())
    new = heads(53, 4, 3, 3, 2, 2, 16, 8)[1:]
    for b, n in enumerate(lengths):
        for held in cache.tensors.values():
            held[b, n:] = torch.nan
    got = ac.ops.attention.decode(q, *new, cache, backend="torch", return_lse=True)
    assert cache.lengths.tolist() == [n + 3 for n in lengths]
    for b, n in enumerate(lengths):
        full = [torch.cat([x[b, :n], y[b]])[None] for x, y in zip((k, v), new, strict=True)]
        want = ac.ops.attention(q[b : b + 1], *full, return_lse=True, backend="torch")
        assert max_error(got.o[b], want.o[0].double()) < 1e-6
        assert max_error(got.lse[b], want.lse[0].double()) < 1e-6
        assert bool(cache.tensors["k"][b, n + 3 :].isnan().all())


def test_packed_tokens_with_a_cache() -> None:
    lengths, cu = [4, 0, 7], [0, 3, 4, 4]
    k, v = heads(60, 3, 1, 12, 2, 1, 16, 8)[1:]
    q, nk, nv = (x[0] for x in heads(61, 1, 4, 4, 2, 2, 16, 8))
    cache = ac.DenseCache({"k": k.clone(), "v": v.clone()}, torch.tensor(lengths).int())
    got = ac.ops.attention(q, nk, nv, cache=cache, cu_seqlens=torch.tensor(cu), backend="torch")
    for b, (lo, hi) in enumerate(pairwise(cu)):
        full = [torch.cat([x[b, : lengths[b]], y[lo:hi]]) for x, y in ((k, nk), (v, nv))]
        want = ac.ops.attention(q[None, lo:hi], *(x[None] for x in full), backend="torch")
        assert max_error(got[lo:hi], want[0].double()) < 1e-6
    assert cache.lengths.tolist() == [7, 1, 7]


def test_documents_in_a_cache() -> None:
    q, k, v = heads(70, 2, 12, 12, 2, 1, 16, 16)
    doc = (torch.arange(12) // 5).int().expand(2, 12).contiguous()
    cache = ac.DenseCache(
        {n: torch.zeros(2, 20, *x.shape[2:], dtype=x.dtype) for n, x in
         (("k", k), ("v", v), ("doc", doc))}, torch.zeros(2).int(),
    )  # fmt: skip
    pieces = [
        ops.documents(q[:, a:b], k[:, a:b], v[:, a:b], doc[:, a:b], cache=cache, backend="torch")
        for a, b in pairwise((0, 5, 6, 12))
    ]
    want = ops.documents(q, k, v, doc, backend="torch")
    assert max_error(torch.cat(pieces, 1), want.double()) < 1e-6


def test_a_full_cache_is_refused_before_anything_is_written() -> None:
    q, k, v = heads(71, 2, 3, 3, 1, 1, 16, 16)
    held = {n: torch.zeros(2, 4, 1, 16) for n in "kv"}
    cache = ac.DenseCache(held, torch.tensor([0, 2]).int())
    with pytest.raises(CacheError):
        ac.ops.attention(q, k, v, cache=cache, backend="torch")
    assert bool((held["k"] == 0).all())


# --- other dtypes, top-k


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_the_output(dtype: torch.dtype) -> None:
    args = [x.to(dtype) for x in heads(80, 2, 33, 70, 2, 2, 32, 16)]
    got = ac.ops.attention(*args, backend="torch", return_lse=True)
    oracle = ac.ops.attention.reference(*args, return_lse=True)
    rounded = ac.ops.attention.reference(*args, dtype=torch.float32).to(dtype)
    assert_close(got.o, oracle.o, rounded, dtype)
    assert got.lse.dtype == torch.float32 and max_error(got.lse, oracle.lse) < 1e-5


@pytest.mark.parametrize(("t", "s"), [(9, 9), (3, 30), (1, 2), (4, 2), (0, 3)])
def test_top_k_runs_through_the_evaluator(t: int, s: int, small_blocks: None) -> None:
    args = [randn(90, 2, t, 3, 8), randn(91, 2, t, 3), randn(92, 2, s, 8), randn(93, 2, t, 2, 8)]
    check(ops.sparse, *(x.float() for x in args), randn(94, 2, s, 8).float())


def test_top_k_of_packed_sequences() -> None:
    cu = torch.tensor([0, 3, 3, 14])
    args = [randn(90, 14, 3, 8), randn(91, 14, 3), randn(92, 14, 8), randn(93, 14, 2, 8)]
    check(ops.sparse, *(x.float() for x in args), randn(94, 14, 8).float(), cu_seqlens=cu)
