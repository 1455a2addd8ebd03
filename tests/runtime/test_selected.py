"""Selections in the torch lowering: the order of the contract, public cases, caches, cuts of T."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import attncc as ac
from attncc.dsl.axes import parse
from attncc.dsl.errors import DtypeError
from attncc.dsl.masked import best
from attncc.runtime.eager.picks import ordered
from attncc.runtime.quantised import E4M3, quantise
from tests import selected_ops as ops
from tests.strategies import randn
from tests.tolerance import assert_close, max_error

ODD = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30])


def top(k):
    @ac.op(out="B T J")
    def found(q=ac.Activation("B T D"), x=ac.Cache("B S D"), hidden=ac.Cache("B S")):
        return ac.topk(ac.dot(q, x, "D"), "S", k=k, where=hidden < 1)

    return found


@given(st.lists(st.tuples(ODD, st.booleans()), min_size=1, max_size=12), st.integers(1, 9))
@example([(math.nan, False), (-math.inf, False), (0.0, True), (0.0, False), (-0.0, False)], 9)
def test_the_order_of_the_contract(places, k):
    row, hidden = (torch.tensor(list(x), dtype=torch.float32) for x in zip(*places, strict=True))
    q = torch.ones(1, 1, 1)
    got = top(k)(q, row.view(1, -1, 1), hidden.view(1, -1), backend="torch")
    assert got.dtype == torch.int32
    assert torch.equal(got[0, 0].long(), best(row, hidden < 1, k))


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=2, max_size=30))
def test_numbers_order_as_their_scores_do(row):
    x = torch.tensor(row, dtype=torch.float32)
    less = (x[:, None] < x) | (x.isnan()[:, None] & ~x.isnan())
    n = ordered(x)
    assert torch.equal(n[:, None] < n, less)
    assert int(n.min()) > -(1 << 31)


def scores(row, k):
    """The picks of rows of scores, ``[rows, S]``."""
    n = row.shape[0]
    q, none = torch.ones(n, 1, 1), torch.zeros(row.shape)
    return top(k)(q, row.unsqueeze(-1), none, backend="torch")[:, 0].long()


def distinct(found, k):
    assert (found >= 0).all() and all(len(set(r)) == k for r in found.tolist())


def test_a_history_one_longer_than_a_power_of_two():  # a24
    rng = torch.Generator().manual_seed(0)
    x = 1.0 + 0.245 * torch.rand(33, 16385, generator=rng)
    found = scores(x, 2048)
    distinct(found, 2048)
    want = x.sort(descending=True).values[:, :2048]
    assert torch.equal(x.gather(1, found), want)


@pytest.mark.parametrize("equal", [True, False])
def test_thousands_of_candidates_that_differ_in_few_bits(equal):  # a25
    L, k = 5000, 2048
    bits = torch.full((2, L), 0x3F800000, dtype=torch.int32)
    if not equal:
        bits += torch.randint(0, 1024, (2, L), generator=torch.Generator().manual_seed(1)).int()
    x = bits.view(torch.float32)
    found = scores(x, k)
    distinct(found, k)
    if equal:
        assert torch.equal(found, torch.arange(k).expand(2, -1))
    want = (-x.double()).sort(stable=True).indices[:, :k]  # of equal ones the first
    assert torch.equal(found, want)


@pytest.mark.parametrize(("s", "k"), [(95, 128), (32, 2048)])
def test_more_wanted_than_there_are(s, k):  # a27
    found = scores(randn(0, 1, s).float(), k)
    assert set(found[0, :s].tolist()) == set(range(s)) and (found[0, s:] == -1).all()
    hidden = torch.ones(1, s)
    none = top(k)(torch.ones(1, 1, 1), randn(0, 1, s, 1).float(), hidden, backend="torch")
    assert (none == -1).all()


def test_picks_of_nothing_attend_to_nothing():
    args = ops.arguments(1, 4, 2)  # bottom-right aligned: two queries see nothing
    got = ops.sparse(**args, return_lse=True, backend="torch")
    assert (got.o[:, :2] == 0).all() and (got.lse[:, :2] == -torch.inf).all()
    assert got.lse[:, 2:].isfinite().all()


@pytest.mark.parametrize("cuts", [(0, 23, 50), (0, 1, 2, 49, 50)])
def test_cut_anywhere_it_is_the_same(cuts):
    args = ops.arguments(2, 50, 50, torch.float32)
    want = ops.sparse(**args, backend="torch")
    sizes = {"B": 2, "Di": 16, "R": 32, "P": 16}
    cache = ac.PagedCache.allocate(
        ops.sparse, sizes=sizes, capacity=64, page=16, dtype=torch.float32
    )
    got = []
    for lo, hi in pairwise(cuts):
        part = {n: x[:, lo:hi] if isinstance(x, torch.Tensor) else x for n, x in args.items()}
        got.append(ops.sparse.decode(**part, cache=cache, backend="torch"))
    assert max_error(torch.cat(got, 1), want) < 1e-6


def test_a_quantised_index_as_the_document_writes_it():
    """q and k by ``act_quant``: e4m3 with one scale a block; w = projection * scales."""
    b, t, s, h, d = 1, 3, 40, 4, 32
    q, k, projected = randn(0, b, t, h, d).float(), randn(1, b, s, d).float(), randn(2, b, t, h)
    softmax_scale = d**-0.5
    sizes = {"B": b, "T": t, "S": s, "Hi": h, "Di": d}
    q8, qs = quantise(q, parse("B T Hi Di"), "Di", d, torch.float32, sizes)
    keys = ac.QuantisedTensor.of(k, parse("B S Di"), ac.Quantised(block=d))
    w = projected.float() * h**-0.5 * qs.view(b, t, h) * softmax_scale
    rest = ops.arguments(b, t, s, torch.float32)
    args = {n: rest[n] for n in ("qc", "qr", "c", "r", "scale")}
    got = ops.sparse(qi=q8, w=w, ki=keys, **args, backend="torch")
    k8 = keys.data.float() * keys.scales.view(b, s, 1)
    plain = ops.sparse(qi=q8.float(), w=w, ki=k8, **args, backend="torch")
    oracle = ops.sparse.reference(qi=q8, w=w, ki=keys, **args)
    assert_close(got, oracle, plain, torch.float32)


def test_plain_e4m3_is_for_queries_that_only_choose():
    args = ops.arguments(1, 2, 5)
    with pytest.raises(DtypeError) as caught:
        ops.sparse(**{**args, "qc": args["qc"].to(E4M3)}, backend="torch")
    assert caught.value.argument == "qc"


def test_several_selections_run_in_torch_and_have_no_kernels():
    @ac.op(out="B T D")
    def twice(q=ac.Activation("B T D"), c=ac.Cache("B S D")):
        a = ac.topk(ac.dot(q, c, "D"), "S", k=3, where=ac.causal)
        b = ac.topk(-ac.dot(q, c, "D"), "S", k=3, where=ac.causal)
        near = ac.dot(ac.softmax(ac.dot(q, c[a], "D"), a), c[a], a)
        return near + ac.dot(ac.softmax(ac.dot(q, c[b], "D"), b), c[b], b)

    q, c = randn(0, 1, 3, 8).float(), randn(1, 1, 9, 8).float()
    assert max_error(twice(q, c, backend="torch"), twice.reference(q, c)) < 1e-5
    assert "several selections" in twice.explain()


def test_the_library_reads_everything_while_there_is_less_than_it_picks():
    args = {n: x.double() if isinstance(x, torch.Tensor) else x
            for n, x in ops.arguments(2, 5, 40).items()}  # fmt: skip
    causal = torch.arange(40) <= torch.arange(5)[:, None] + 35
    score = torch.einsum("bthr,bsr->bhts", args["qc"], args["c"])
    score = (score + torch.einsum("bthp,bsp->bhts", args["qr"], args["r"])) * args["scale"]
    p = score.masked_fill(~causal, -torch.inf).softmax(-1)
    want = torch.einsum("bhts,bsr->bthr", p, args["c"])
    plain = {n: x.float() if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    assert max_error(ac.ops.sparse_mla(**plain, backend="torch"), want) < 1e-5
    found = ac.ops.lightning_indexer(
        **{n: plain[n] for n in ("qi", "w", "ki")}, backend="torch"
    )  # fmt: skip
    visible = (found >= 0).sum(-1)
    assert torch.equal(visible, causal.sum(-1).expand(2, -1))
    index = (torch.einsum("bthd,bsd->bths", args["qi"], args["ki"]).relu()
             * args["w"][..., None]).sum(2)  # fmt: skip
    assert torch.equal(found.long(), best(index, causal.expand(2, -1, -1), 2048))


def test_traced_picks_are_whole_numbers_and_the_same():
    x = ops.index_arguments(2, 3, 40)
    traced = torch.compile(lambda **k: ops.picks(**k) + 1, backend="aot_eager", fullgraph=True)
    got = traced(**x)
    assert got.dtype == torch.int32 and torch.equal(got, ops.picks(**x) + 1)
