"""Selections and what they pick: generated kernels in Triton's interpreter, against fp64."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen import plan_selected
from attncc.dsl.errors import BackendError
from attncc.dsl.masked import best
from attncc.runtime.quantised import E4M3
from attncc.runtime.softmax import rooms_for
from tests import selected_ops as ops
from tests.tolerance import assert_close


def copied(cache):
    """A cache with memory of its own."""
    if isinstance(cache, ac.PagedCache):
        pages = {n: t.clone() for n, t in cache.pages.items()}
        scales = {n: t.clone() for n, t in cache.scales.items()}
        return ac.PagedCache(
            pages, cache.block_table, cache.lengths.clone(), cache.layouts, scales
        )  # fmt: skip
    tensors = {n: t.clone() for n, t in cache.tensors.items()}
    scales = {n: t.clone() for n, t in cache.scales.items()}
    return ac.DenseCache(tensors, cache.lengths.clone(), scales)


def check(op, *, phase="prefill", cache=None, lse=False, **args):
    """Picks are those of the oracle, and everything else is within the contract's tolerance."""
    held = {} if cache is None else {"cache": cache}
    oracle = op.reference(**args, **held, return_lse=lse)
    results = []
    for backend in ("torch", "triton"):
        own = {n: copied(c) for n, c in held.items()}
        run = op.decode if phase == "decode" else op
        results.append(run(**args, **own, return_lse=lse, backend=backend))
    eager, got = results
    if isinstance(got, torch.Tensor):
        oracle, eager, got = (oracle,), (eager,), (got,)
    for one, wanted, like in zip(got, oracle, eager, strict=True):
        if one.dtype == torch.int32:
            assert torch.equal(one.long(), wanted.long())
            assert torch.equal(one, like)
        else:
            assert_close(one, wanted, like, one.dtype)
    return got


@pytest.fixture
def small_chunks(monkeypatch):
    """Several programs count one row."""
    monkeypatch.setattr(plan_selected, "CHUNK", 64)


def test_prefill_with_rows_that_see_fewer_than_k():
    check(ops.sparse, **ops.arguments(2, 5, 75), lse=True)
    check(ops.sparse, **ops.arguments(1, 6, 23))  # 18, 19, ... are visible of 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_of_other_dtypes(dtype):
    check(ops.sparse, **ops.arguments(2, 1, 150, dtype), phase="decode")


@pytest.mark.parametrize("width", [32, 64])
def test_head_dims_of_an_index(width):  # a9
    check(ops.picks, **ops.index_arguments(1, 3, 90, heads=4, width=width))
    check(ops.sparse, **ops.arguments(1, 2, 90, index_heads=2, index_width=width))


def test_more_queries_than_history_and_none():
    check(ops.sparse, **ops.arguments(1, 4, 2), lse=True)  # bottom-right aligned: two see nothing
    got = check(ops.sparse, **ops.arguments(1, 3, 0), lse=True)
    assert (got[0] == 0).all() and (got[1] == -torch.inf).all()


def test_other_values_than_keys_sink_positions_and_epilogue():
    check(ops.grouped, **ops.grouped_arguments(2, 3, 75))


def test_a_band_of_the_history_and_a_score_without_heads():
    index = ops.index_arguments(2, 6, 90)
    check(ops.nearest, q=index["qi"][:, :, 0], k=index["ki"])


@ac.op(out="T B J")
def tokens_first(q=ac.Activation("B T D"), k=ac.Cache("B S D")):
    return ac.topk(ac.dot(q, k, "D"), "S", k=5, where=ac.causal)


@ac.op(out="(B T) J")
def joined(q=ac.Activation("B T D"), k=ac.Cache("B S D")):
    return ac.topk(ac.dot(q, k, "D"), "S", k=5, where=ac.causal)


@ac.op(out={"one": "B T J", "other": "B T J"})
def told_twice(q=ac.Activation("B T D"), k=ac.Cache("B S D")):
    found = ac.topk(ac.dot(q, k, "D"), "S", k=5, where=ac.causal)
    return found, found


@ac.op(out="B T J")
def beside_heads(
    q=ac.Activation("B T H D"), w=ac.Activation("B T H"), p=ac.Activation("B T D"),
    k=ac.Cache("B S D"),
):  # fmt: skip
    score = ac.sum(w * ac.relu(ac.dot(q, k, "D")), "H") + ac.dot(p, k, "D")
    return ac.topk(score, "S", k=5, where=ac.causal)


def test_a_product_beside_the_sum_over_heads_is_refused():
    index = ops.index_arguments(2, 3, 40)
    args = {"q": index["qi"], "k": index["ki"], "p": index["qi"][:, :, 0], "w": index["w"]}
    with pytest.raises(BackendError, match="a product beside the sum over heads"):
        beside_heads(**args, backend="triton")
    assert torch.equal(beside_heads(**args).long(), beside_heads.reference(**args).long())


def test_picks_lie_as_the_output_says_or_are_refused():
    index = ops.index_arguments(2, 3, 40)
    args = {"q": index["qi"][:, :, 0], "k": index["ki"]}
    check(tokens_first, **args)
    for op, why in ((joined, "picks laid out as"), (told_twice, "picks that are two results")):
        with pytest.raises(BackendError, match=why):
            op(**args, backend="triton")
        got, want = op(**args, backend="torch"), op.reference(**args)
        pairs = zip(got, want, strict=True) if op is told_twice else [(got, want)]
        assert all(torch.equal(a.long(), b.long()) for a, b in pairs)


def test_ties_over_many_chunks_take_the_first_positions(small_chunks):
    args = ops.index_arguments(1, 2, 500)
    args["ki"][:, :400] = args["ki"][:, :1]  # 400 equal scores
    check(ops.picks, **args)
    args["ki"][:] = 0
    got = check(ops.picks, **args)[0]
    assert torch.equal(got[0, 0], torch.arange(20).int())


@ac.op(out="B T J")
def seen(x=ac.Cache("B S"), q=ac.Activation("B T D"), k=ac.Cache("B S D"), hidden=ac.Cache("B S")):
    return ac.topk(x + 0.0 * ac.dot(q, k, "D"), "S", k=20, where=hidden < 1)


def picked(rows, hidden=None):
    """The picks of rows of scores ``[rows, S]``; half of them hidden, or none."""
    zeros = torch.zeros(*rows.shape, 16)
    hidden = torch.zeros(rows.shape) if hidden is None else hidden
    got = seen.decode(rows, zeros[:, :1], zeros, hidden, backend="triton")[:, 0]
    assert torch.equal(got.long(), best(rows, hidden < 1, 20))
    return got


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_alike_in_their_first_digits(small_chunks, monkeypatch, sign):
    monkeypatch.setattr(plan_selected, "CLOSE", 32)
    rng = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 300, (4, 200), generator=rng, dtype=torch.int32) + 0x3F800000
    rows[1] = 0x3F800000  # one number, several times what is looked at together
    rows[2, ::20] = 0x40000000  # fewer than are wanted are above the others
    rows = sign * rows.view(torch.float32)
    rows[3, ::2] = torch.tensor([math.nan, -math.inf, 0.0, -0.0] * 25)
    picked(rows)
    picked(rows, (torch.rand(4, 200, generator=rng) < 0.5).float())
    few = torch.ones(4, 200)
    few[:, 7::40] = 0
    assert (picked(rows, few) >= 0).sum(1).tolist() == [5] * 4


def test_nan_and_infinities_where_nothing_else_is_seen():
    values = [math.nan, -math.inf, math.nan, -0.0, 0.0, math.inf]
    rows = torch.tensor(values).repeat(2, 12)
    rows[1] = math.nan
    picked(rows)
    hidden = (torch.arange(72) % 6 > 2).float().repeat(2, 1)
    picked(rows, hidden)


def test_a_history_one_longer_than_a_power_of_two():  # a24, a quarter of it
    rows = torch.rand(1, 4097, generator=torch.Generator().manual_seed(0))
    rows = 1.0 + (0.245 * rows * 4096).floor() / 4096  # a product with 1 keeps every bit

    @ac.op(out="B T J")
    def near(q=ac.Activation("B T H"), k=ac.Cache("B S"), w=ac.Cache("B S D"),
             u=ac.Activation("B T H D")):  # fmt: skip
        score = ac.sum(q * ac.dot(u, w, "D"), "H") + k * 0.0
        return ac.topk(score, "S", k=2048, where=ac.causal)

    args = {"q": torch.ones(1, 1, 1), "k": rows, "w": rows.unsqueeze(-1)}
    check(near, **args, u=torch.ones(1, 1, 1, 1), phase="decode")


def test_nan_infinities_and_signed_zeros(small_chunks):
    q = torch.ones(1, 3, 1)
    row = torch.zeros(140)
    row[::3] = -0.0
    row[[5, 70]] = torch.nan
    row[[6, 80]] = -torch.inf
    row[[7, 81, 100, 110]] = torch.tensor([torch.inf, -1e-30, 3.0, 1e-30])
    k = row.view(1, -1, 1).clone()

    @ac.op(out="B T J")
    def all_of(q=ac.Activation("B T D"), k=ac.Cache("B S D")):
        return ac.topk(ac.dot(q, k, "D"), "S", k=138, where=ac.causal)

    got = check(all_of, q=q, k=k)[0]
    assert got[0, 2, 0] == 7 and got[0, 2, -1] >= 0
    assert got[0, 0].tolist()[-4:] == [6, 80, 5, 70]  # all 138 that it sees: -inf, then NaN


ODD = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-30])


@given(st.lists(st.tuples(ODD, st.booleans()), min_size=1, max_size=70), st.integers(1, 40))
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
def test_any_row_is_picked_in_the_order_of_the_contract(places, k):
    @ac.op(out="B T J")
    def found(q=ac.Activation("B T D"), x=ac.Cache("B S D"), hidden=ac.Cache("B S")):
        return ac.topk(ac.dot(q, x, "D"), "S", k=k, where=hidden < 1)

    row, hidden = (torch.tensor(list(x), dtype=torch.float32) for x in zip(*places, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_selected, "CHUNK", 16)
        q = torch.ones(1, 1, 1)
        got = found.decode(q, row.view(1, -1, 1), hidden.view(1, -1), backend="triton")
    assert torch.equal(got[0, 0].long(), best(row, hidden < 1, k))


def packed(args, lengths):
    """The arguments of one sequence of everything, as packed rows."""
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return {n: x[0] if isinstance(x, torch.Tensor) else x for n, x in args.items()}, cu


def test_packed_sequences_of_which_some_are_empty():
    args, cu = packed(ops.arguments(1, 14, 14), [0, 5, 0, 9])
    check(ops.sparse, **args, cu_seqlens=cu)
    args, cu = packed(ops.arguments(1, 4, 60), [3, 0, 1])
    keys = torch.tensor([0, 35, 36, 60]).int()
    check(ops.sparse, **args, cu_seqlens=cu, cu_seqlens_k=keys, lse=True)


@pytest.mark.parametrize("paged", [False, True])
def test_caches_of_different_lengths(paged):
    sizes = {"B": 2, "Di": 16, "R": 32, "P": 16}
    made = {"page": 16} if paged else {}
    kind = ac.PagedCache if paged else ac.DenseCache
    cache = kind.allocate(ops.sparse, sizes=sizes, capacity=100, **made)
    if paged:
        cache.block_table.copy_(cache.block_table.flip(1).flip(0))
    ops.sparse(**ops.arguments(2, 60, 60, seed=9), cache=cache, backend="torch")
    cache.lengths.copy_(torch.tensor([60, 7]))
    check(ops.sparse, cache=cache, phase="decode", **ops.arguments(2, 3, 3))


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_a_quantised_index_in_pages_and_a_quantised_query(scale):
    sizes = {"B": 2, "Di": 16, "R": 32, "P": 16}
    bf16 = torch.bfloat16
    stored = {"ki": ac.Quantised(scale=scale), "c": bf16, "r": bf16}
    cache = ac.PagedCache.allocate(ops.sparse, sizes=sizes, capacity=64, page=16, dtype=stored)
    past = ops.arguments(2, 50, 50, seed=9)
    ops.sparse(**past, cache=cache, backend="torch")
    cache.lengths.copy_(torch.tensor([50, 7]))
    args = ops.arguments(2, 2, 2)
    check(ops.sparse, cache=cache, phase="decode", **args)
    plain = {**args, "qi": args["qi"].to(E4M3)}  # whole numbers: the same
    check(ops.sparse, cache=cache, phase="decode", **plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_picked_rows_of_quantised_histories(dtype):
    sizes = {"B": 2, "Di": 16, "Hkv": 2, "G": 3, "D": 16, "E": 24}
    made = {"sizes": sizes, "capacity": 64, "page": 16}
    stored = ac.Quantised(scale="ue8m0")
    wide = {"k": stored, "v": ac.Quantised(), "ki": stored}
    cache = ac.PagedCache.allocate(ops.grouped, dtype=wide, **made)
    ops.grouped(**ops.grouped_arguments(2, 50, 50, dtype, seed=9), cache=cache, backend="torch")
    cache.lengths.copy_(torch.tensor([50, 7]))
    check(ops.grouped, cache=cache, phase="decode", **ops.grouped_arguments(2, 2, 2, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_quantised_latent_is_key_and_value(dtype):
    sizes = {"B": 2, "Di": 16, "R": 32, "P": 16}
    stored = {"ki": dtype, "c": ac.Quantised(), "r": dtype}
    cache = ac.DenseCache.allocate(ops.sparse, sizes=sizes, capacity=64, dtype=stored)
    ops.sparse(**ops.arguments(2, 50, 50, dtype, seed=9), cache=cache, backend="torch")
    check(ops.sparse, cache=cache, phase="decode", lse=True, **ops.arguments(2, 2, 2, dtype))


def test_a_prefill_in_several_turns_is_the_same(monkeypatch):
    from attncc.runtime import selected

    args = ops.arguments(3, 2, 40)
    want = ops.sparse(**args, backend="triton")
    monkeypatch.setattr(selected, "ROOM", 1)
    assert torch.equal(ops.sparse(**args, backend="triton"), want)


def test_ranges_of_picked_rows_are_merged(monkeypatch):
    from attncc.runtime import selected

    monkeypatch.setattr(selected, "BLOCKS_A_SPLIT", 1)
    args = ops.grouped_arguments(2, 2, 75)  # 33 rows are two blocks
    check(ops.grouped, **args)
    lone = {n: x for n, x in ops.arguments(1, 2, 40, torch.float32).items()}
    check(ops.sparse, **lone, lse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_turned_sum_over_picked_rows(monkeypatch, dtype):
    from attncc.runtime import selected

    sizes = {"heads": 33, "width": 512, "part": 16}  # one tile of 64 rows
    check(ops.sparse, **ops.arguments(1, 2, 90, dtype, **sizes), lse=True)
    plans = [k.whole.plan for k in selected._PREPARED.values() if k.whole is not None]
    assert plans[-1].turned and (plans[-1].block_m, plans[-1].block_n) == (64, 64)
    monkeypatch.setattr(selected, "_splits", lambda *_: 2)  # 20 rows are one block: one is empty
    check(ops.sparse, **ops.arguments(1, 1, 9, dtype, **sizes), phase="decode", lse=True)


def test_a_prepared_call_is_the_call():
    args = ops.arguments(2, 1, 50)
    prepared = ops.sparse.prepare(**args, phase="decode")
    other = ops.arguments(2, 1, 50, seed=20)
    got = prepared(**{n: x for n, x in other.items() if isinstance(x, torch.Tensor)})
    assert torch.equal(got, ops.sparse.decode(**other, backend="triton"))


@pytest.mark.parametrize("widths", [(24, 1, 1), (7,), (1, 1, 1)])
def test_parts_of_partials_start_where_the_kernels_think(widths):
    for rows in (0, 1, 9, 16):
        found = rooms_for(rows, widths, torch.device("cpu"))
        assert all(t.numel() >= rows * n for t, n in zip(found.values(), widths, strict=True))
        assert all(t.storage_offset() % 4 == 0 for t in found.values())


def test_the_benchmark_repeats_the_second_stage_alone():
    importlib.import_module("tests.benchmarks.conftest")  # it makes the package importable
    dsa_mla = importlib.import_module("benchmarks.groups.dsa_mla")
    case = dsa_mla.case(1, 2048, H=16, R=32, P=16)
    x = case.build(torch.device("cpu"))
    work = dsa_mla._prepared(x, "triton")
    got = work.fn()["o"]
    x["q"].mul_(0.5)  # it reads what is there now
    got.fill_(torch.nan)
    assert work.fn()["o"] is got
    for part in case.parts(x):
        assert_close(got[part.index], part.oracle, part.eager, part.dtype)
