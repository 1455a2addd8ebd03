"""Merging softmax partials: the corners that public reports name."""

import math

import pytest
import torch

from attncc.dsl.errors import CallError, LogBaseError
from attncc.runtime.merge import LogBase, Partial, merge
from tests.strategies import randn
from tests.tolerance import max_error

INF = torch.inf


def partial(seed: int, *shape: int, base: LogBase = LogBase.E) -> Partial:
    o, lse = randn(seed, *shape, 8).float(), randn(seed + 1, *shape).float()
    return Partial.of(o, lse, base)


def empty(*shape: int, o: float = torch.nan) -> Partial:
    return Partial.of(torch.full((*shape, 8), o), torch.full(shape, -INF))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_two_empty_partials_give_nothing() -> None:
    # a1, d1
    for o in (0.0, torch.nan):
        both = merge([empty(1, 1, o=o), empty(1, 1)])
        assert bool((both.o == 0).all()) and bool((both.lse == -INF).all())


@pytest.mark.parametrize("count", [1, 3])
def test_an_empty_partial_changes_no_bit(count: int) -> None:
    # a1, d2
    x = partial(0, 5, 3)
    x.u[0, 0, 0], x.m[0, 1] = -0.0, -0.0
    nothing = [empty(5, 3) for _ in range(count)]
    for got in (merge([x, *nothing]), merge([*nothing, x])):
        assert same_bits(got.o, x.u) and same_bits(got.lse, x.m)


def test_an_unnormalised_partial_survives_an_empty_one() -> None:
    x = Partial(randn(0, 4, 8).float(), randn(1, 4).float(), randn(2, 4).float().exp())
    got = merge([empty(4), x, empty(4)])
    assert all(same_bits(a, b) for a, b in ((got.u, x.u), (got.m, x.m), (got.l, x.l)))


def test_weights_are_the_sums_of_exponentials() -> None:
    # d3: Z = 2 and 8 weigh 0.2 and 0.8
    a = Partial.of(torch.tensor([[1.0, 0.0]]), torch.tensor([math.log(2.0)]))
    b = Partial.of(torch.tensor([[0.0, 1.0]]), torch.tensor([math.log(8.0)]))
    got = merge([a, b])
    torch.testing.assert_close(got.o, torch.tensor([[0.2, 0.8]]), rtol=3e-7, atol=0)
    torch.testing.assert_close(got.lse, torch.tensor([math.log(10.0)]), rtol=3e-7, atol=0)


def test_two_log_bases_do_not_mix() -> None:
    # d3
    a, b = partial(0, 4), partial(2, 4, base=LogBase.TWO)
    with pytest.raises(LogBaseError, match="base") as error:
        merge([a, b])
    assert isinstance(error.value, CallError) and isinstance(error.value, TypeError)
    want = merge([a, Partial.of(b.u, b.m * math.log(2.0))])
    got = merge([a, b.to(LogBase.E)])
    torch.testing.assert_close(got.o, want.o)
    two = merge([a.to(LogBase.TWO), b])
    torch.testing.assert_close(two.o, want.o)
    torch.testing.assert_close(two.lse * math.log(2.0), want.lse)
    torch.testing.assert_close(two.to(LogBase.E).lse, want.lse)


def test_any_split_of_the_keys_gives_the_same_softmax() -> None:
    score, v = 3 * randn(0, 6, 40), randn(1, 40, 8)
    want, lse = score.softmax(-1) @ v, score.logsumexp(-1)
    for cuts in ([40], [1] * 40, [0, 13, 0, 27], [39, 1]):
        parts, at = [], 0
        for n in cuts:
            s = score[:, at : at + n]
            m = s.amax(-1) if n else torch.full((6,), -INF, dtype=s.dtype)
            p = torch.exp(s - m[:, None])
            parts.append(Partial(p @ v[at : at + n], m, p.sum(-1)))
            at += n
        got = merge(parts)
        assert max_error(got.o, want) < 1e-14 and max_error(got.lse, lse) < 1e-14


def test_a_sink_is_one_more_logit() -> None:
    score, v, sink = randn(0, 6, 9), randn(1, 9, 8), torch.tensor([0.5, 1.0, -INF, 40.0, -40.0, 0])
    p = torch.exp(score)
    x = Partial(p @ v, torch.zeros(6).double(), p.sum(-1)).with_sink(sink.double())
    want = torch.cat([score, sink.double()[:, None]], -1)
    assert max_error(x.o, want.softmax(-1)[:, :-1] @ v) < 1e-14
    assert max_error(x.lse, want.logsumexp(-1)) < 1e-14


def test_a_sink_alone_is_what_an_empty_row_sees() -> None:
    x = empty(3).with_sink(torch.tensor([0.5, -INF, 3.0]))
    assert bool((x.o == 0).all())
    assert torch.equal(x.lse, torch.tensor([0.5, -INF, 3.0]))


def test_large_logits_neither_overflow_nor_vanish() -> None:
    for m in (-524288.0, 60000.0):
        a = Partial.of(torch.full((1, 8), 1.0), torch.tensor([m]))
        got = merge([a, a, empty(1)])
        assert bool((got.o == 1).all())
        assert got.lse.item() == pytest.approx(m + math.log(2), rel=1e-7)
