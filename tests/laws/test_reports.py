"""Public bug reports that no other test holds: a14, a18, a20, a21, a31 and a32 in one process."""

import math

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl.interp import pack, unpack
from attncc.runtime.eager.affine import Summary, identity, summary
from tests.runtime import eager_ops as ops
from tests.runtime.eager_ops import call_of, unit
from tests.strategies import randn
from tests.tolerance import max_error

GDN = ac.ops.gated_delta_rule


def delta(seed: int, b: int, t: int, h: int, k: int, v: int) -> dict[str, torch.Tensor]:
    args = {
        "q": unit(randn(seed, b, t, h, k)), "k": unit(randn(seed + 1, b, t, h, k)),
        "v": randn(seed + 2, b, t, h, v), "g": -randn(seed + 3, b, t, h).abs(),
        "beta": randn(seed + 4, b, t, h).sigmoid(),
    }  # fmt: skip
    return {n: x.float() for n, x in args.items()}


@pytest.mark.parametrize("t", [64, 16384])
def test_a14_a_constant_key_under_a_weak_gate_stays_finite(t: int) -> None:
    # raw gate -12 with the lower bound -5, beta logit 8
    g, beta = -5 / (1 + math.exp(12)), 1 / (1 + math.exp(-8))
    k = torch.full((1, t, 1, 128), 128**-0.5)
    v = randn(0, 1, t, 1, 8).float()
    got = GDN(k, k, v, torch.full((1, t, 1), g), torch.full((1, t, 1), beta), backend="torch")
    # along the one key: w_t = (1 - beta) alpha w_(t-1) + beta v_t, of which few terms matter
    alpha, start, w = math.exp(g), max(0, t - 64), torch.zeros(8).double()
    for row in v[0, start:, 0].double():
        w = (1 - beta) * alpha * w + beta * row
    assert bool(got.o.isfinite().all())
    assert max_error(got.o[0, -1, 0], w * 128**-0.5) < 1e-6
    assert max_error(got.s[0, 0], k[0, -1, 0, :, None].double() * w) < 1e-6


@pytest.mark.parametrize(("t", "n"), [(65, 3), (70, 2)])
def test_a18_chunks_over_tokens_or_over_their_expansion_equal_the_recurrence(
    t: int, n: int
) -> None:
    args = delta(0, 2, t * n, 2, 8, 4)
    real = {**args, "q": args["q"][:, ::n], "g": args["g"][:, ::n]}
    want = ops.delta_product.reference(**real)
    got = ops.delta_product(**real, backend="torch")
    assert max_error(got.o, want.o) < 4e-6 and max_error(got.s, want.s) < 4e-6
    # g on the first copy, q on the last, one row a token
    g, q = torch.zeros_like(args["g"]), torch.zeros_like(args["q"])
    g[:, ::n], q[:, n - 1 :: n] = real["g"], real["q"]
    wide = ops.delta_product(**{**args, "g": g, "q": q}, backend="torch")
    assert max_error(wide.o[:, n - 1 :: n], want.o) < 4e-6 and max_error(wide.s, want.s) < 4e-6
    every = real["g"].repeat_interleave(n, 1)  # a decay on every copy is another op
    wrong = ops.delta_product(**{**args, "g": every, "q": q}, backend="torch")
    assert float((wrong.s - want.s).abs().max()) > 1e-2


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a20_an_initial_state_is_honoured_and_left_alone(backend: str) -> None:
    args, s = delta(5, 2, 4, 2, 16, 8), randn(10, 2, 2, 16, 8).float()
    kept = s.clone()
    whole = GDN(**args, s=s, backend=backend)
    assert whole.s.shape == (2, 2, 16, 8) and torch.equal(s, kept)
    exact = GDN.reference(**args, s=s)
    assert max_error(whole.o, exact.o) < 4e-6
    assert max_error(whole.o, GDN.reference(**args).o) > 1e-2
    first = GDN(**{n: x[:, :3] for n, x in args.items()}, s=s, backend=backend)
    last = GDN(**{n: x[:, 3:] for n, x in args.items()}, s=first.s, backend=backend)
    assert max_error(torch.cat([first.o, last.o], 1), exact.o) < 4e-6
    assert max_error(last.s, exact.s) < 4e-6


def test_a21_a_padding_row_writes_nothing() -> None:
    pool = randn(0, 3, 2, 8, 4).float()
    before, slots = pool.clone(), torch.tensor([-1, 2], dtype=torch.int32)
    args = delta(6, 2, 1, 2, 8, 4)
    o = GDN.decode(**args, s=ac.StatePool(pool, slots), backend="torch")
    assert torch.equal(pool[:2], before[:2])
    want = GDN.reference(**args, s=torch.stack([torch.zeros(2, 8, 4), before[2]]))
    assert max_error(o, want.o) < 4e-6 and max_error(pool[2], want.s[1]) < 4e-6


def test_a21_a_slot_named_twice_is_refused_before_anything_is_written() -> None:
    pool = randn(0, 3, 2, 8, 4).float()
    before, slots = pool.clone(), torch.tensor([2, 2], dtype=torch.int32)
    with pytest.raises(ac.AttnccError, match="slot"):
        GDN.decode(**delta(6, 2, 1, 2, 8, 4), s=ac.StatePool(pool, slots), backend="torch")
    assert torch.equal(pool, before)


def test_a31_an_uneven_cut_with_an_empty_rank_is_one_device() -> None:
    """Each rank summarises its tokens; an ordered scan of the summaries gives every start."""
    cut, args = [5, 0, 25, 7], delta(7, 2, 37, 2, 8, 4)
    s = randn(12, 2, 2, 8, 4).float()
    call = call_of(GDN, **args, s=s, double=True)
    form, pattern = analyse(call.program).affine, call.patterns["s"]
    assert form is not None
    exact, held = GDN.reference(**args, s=s), unpack(s.double(), pattern, call.sizes)
    at, carried, outs = 0, identity(held, form.active), []
    for n in cut:
        start = pack(carried.apply(held), pattern, call.sizes)
        own = {m: x[:, at : at + n] for m, x in args.items()}
        outs.append(GDN.reference(**own, s=start.float()).o)
        rank = summary(call, form, at, at + n)
        if n == 0:
            empty: Summary = identity(held, form.active)
            assert torch.equal(rank.a.aligned(empty.a.axes), empty.a.data)
            assert not rank.b.data.any()
        carried, at = carried.then(rank), at + n
    assert max_error(torch.cat(outs, 1), exact.o) < 4e-6
    assert max_error(pack(carried.apply(held), pattern, call.sizes), exact.s) < 1e-12


def test_a31_a_piece_shorter_than_the_convolution() -> None:
    b, t, width = 2, 37, 8
    k, v = randn(0, b, t, 2, 4).float(), randn(1, b, t, 2, 3).float()
    w, win = randn(2, 2, 4, width).float(), randn(3, b, 2, 4, width - 1).float()
    s = randn(4, b, 2, 4, 3).float()
    exact = ops.convolved.reference(k, v, w, win, s)
    at, outs = 0, []
    for n in (5, 0, 25, 7):
        own = (x[:, at : at + n] for x in (k, v))
        win, s, o = ops.convolved(*own, w, win, s, backend="torch")
        outs.append(o)
        at += n
    scale = float(exact.o.abs().max())
    assert max_error(torch.cat(outs, 1), exact.o) < 4e-6 * scale
    assert torch.equal(win.double(), exact.win) and max_error(s, exact.s) < 4e-6 * scale


def test_a31_an_uneven_cut_has_the_gradients_of_one_device() -> None:
    args = delta(7, 2, 37, 2, 8, 4) | {"s": randn(12, 2, 2, 8, 4).float()}
    weigh = randn(13, 2, 37, 2, 4).float(), randn(14, 2, 2, 8, 4).float()

    def gradients(cut: list[int]) -> dict[str, torch.Tensor]:
        leaves = {n: x.clone().requires_grad_() for n, x in args.items()}
        rows, at, outs = {n: x for n, x in leaves.items() if n != "s"}, 0, []
        s = leaves["s"]
        for n in cut:
            got = GDN(**{m: x[:, at : at + n] for m, x in rows.items()}, s=s, backend="torch")
            s, at = got.s, at + n
            outs.append(got.o)
        ((torch.cat(outs, 1) * weigh[0]).sum() + (s * weigh[1]).sum()).backward()
        return {n: x.grad for n, x in leaves.items() if x.grad is not None}

    want, found = gradients([37]), gradients([5, 0, 25, 7])
    assert found.keys() == want.keys() == args.keys()
    for name, exact in want.items():
        assert bool(exact.any()) and max_error(found[name], exact.double()) < 2e-5, name


@ac.op(out="B T J")
def two_best(q=ac.Activation("B T D"), x=ac.Memory("B S D")):
    return ac.topk(ac.dot(q, x, "D"), "S", k=2)


@ac.op(out="B T E")
def over_two_best(q=ac.Activation("B T D"), x=ac.Memory("B S D"), v=ac.Memory("B S E")):
    found = ac.topk(ac.dot(q, x, "D"), "S", k=2)
    return ac.dot(ac.softmax(ac.dot(q, x[found], "D"), found), v[found], found)


@ac.op(out="B T E")
def over_chosen(
    q=ac.Activation("B T D"), x=ac.Memory("B S D"), v=ac.Memory("B S E"), chosen=ac.Memory("B S")
):
    return ac.dot(ac.softmax(ac.dot(q, x, "D"), "S", where=chosen > 0), v, "S")


def test_a32_a_selection_over_two_halves_is_merged_by_lse() -> None:
    q, v = torch.ones(1, 1, 1), randn(0, 1, 8, 3).float()
    x = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, 1.5, 3.0, -2.0]).view(1, 8, 1)
    assert sorted(two_best(q, x).flatten().tolist()) == [1, 6]
    halves = [slice(0, 4), slice(4, 8)]
    # each half's two, then of the four the two best by score, of equal ones the first
    ids = [two_best(q, x[:, own]).flatten() + own.start for own in halves]
    best = sorted(torch.cat(ids).tolist(), key=lambda i: (-float(x[0, i, 0]), i))[:2]
    local = [[i - own.start for i in best if own.start <= i < own.stop] for own in halves]
    assert local == [[1], [2]]
    parts = []
    for own, mine in zip(halves, local, strict=True):
        chosen = torch.zeros(1, 4)
        chosen[0, mine] = 1
        parts.append(over_chosen(q, x[:, own], v[:, own], chosen, return_partial=True))
    assert max_error(ac.merge(parts).o, over_two_best.reference(q, x, v)) < 1e-6
