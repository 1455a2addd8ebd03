"""The short convolution: equal to ``conv1d``, whole and packed, in pools and cut anywhere."""

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import conv1d, pad, silu

import attncc as ac
from attncc.runtime.samples import Sample, Trait, sample_call
from attncc.runtime.sources import call_sources
from attncc.runtime.trial import trial_call
from tests.strategies import cuts
from tests.tolerance import assert_close

OP = ac.ops.short_conv


def plain(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, act: bool) -> torch.Tensor:
    """``conv1d`` of [B, T, D] after W - 1 rows of zeros."""
    rows = pad(x.transpose(1, 2), (w.shape[1] - 1, 0))
    y = conv1d(rows, w[:, None], bias, groups=len(w)).transpose(1, 2)
    return silu(y) if act else y


def drawn(tokens: int, width: int, channels: int = 6) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(width)
    shapes = (2, tokens, channels), (channels, width), (channels,)
    return tuple(torch.randn(s, generator=g) for s in shapes)


@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", [True, False])
def test_it_is_conv1d(width: int, bias: bool, act: bool) -> None:
    x, w, b = drawn(13, width)
    more = {"bias": b} if bias else {}
    win, o = OP(x, w, silu=act, **more)
    args = [t.double() for t in (x, w)], (b.double() if bias else None)
    exact = plain(*args[0], args[1], act)
    assert_close(o, exact, plain(x, w, b if bias else None, act), torch.float32)
    assert torch.equal(win, pad(x, (0, 0, width - 1, 0))[:, -(width - 1) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packed_prefill_then_tokens_one_by_one_in_a_pool(dtype: torch.dtype) -> None:
    x, w, _ = (t.to(dtype) for t in drawn(11, 4))
    exact = plain(x.double(), w.double(), None, True)
    rough = plain(x.float(), w.float(), None, True).to(dtype)
    windows = ac.ConvWindow.allocate(OP, sizes={"W": 4, "D": 6}, slots=5, dtype=dtype)
    a, empty, b = (windows.add() for _ in range(3))
    cu = torch.tensor([0, 2, 2, 9])
    rows = torch.cat([x[0, :2], x[1, :7]])
    o = OP(rows, w, silu=True, cu_seqlens=cu, **windows.view([a, empty, b]))
    assert_close(
        o, torch.cat([exact[0, :2], exact[1, :7]]), torch.cat([rough[0, :2], rough[1, :7]]), dtype
    )
    assert not windows.pools["win"][windows.slot_of(empty)].any()
    for i in range(4):
        now = torch.stack([x[0, 2 + i], x[1, 7 + i]])[:, None]
        o = OP.decode(now, w, silu=True, **windows.view([a, b]))
        want = torch.stack([exact[0, 2 + i], exact[1, 7 + i]])[:, None]
        assert_close(o, want, torch.stack([rough[0, 2 + i], rough[1, 7 + i]])[:, None], dtype)


def test_drafts_leave_a_window_each() -> None:
    x, w, _ = drawn(9, 3)
    windows = ac.ConvWindow.allocate(OP, sizes={"W": 3, "D": 6}, slots=8, dtype=torch.float32)
    a, b = windows.add(), windows.add()
    OP(x[:, :4], w, **windows.view([a, b]))
    OP.decode(x[:, 4:7], w, **windows.speculate([a, b], 3))
    windows.accept([a, b], [2, 0])
    o = OP.decode(torch.stack([x[0, 6:7], x[1, 4:5]]), w, **windows.view([a, b]))
    exact = plain(x.double(), w.double(), None, False)
    rough = plain(x, w, None, False)
    pick = ((0, 6), (1, 4))
    want, near = (torch.stack([t[p] for p in pick])[:, None] for t in (exact, rough))
    assert_close(o, want, near, torch.float32)


@given(cuts(15, 4))
@settings(max_examples=20)
def test_a_window_cut_anywhere(pieces: list[int]) -> None:
    x, w, b = drawn(15, 4)
    win, whole = OP(x, w, b, silu=True)
    kept, outs = None, []
    for part in x.split(pieces, 1):
        kept, o = OP(part, w, b, silu=True, win=kept)
        outs.append(o)
    exact = plain(*(t.double() for t in (x, w, b)), True)
    assert_close(torch.cat(outs, 1), exact, whole, torch.float32)
    assert torch.equal(kept, win)


def test_gradients_are_those_of_conv1d() -> None:
    x, w, b = (t.requires_grad_() for t in drawn(7, 4))
    y = OP(x, w, b, silu=True).o
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((y * weight).sum(), (x, w, b))
    doubles = [t.detach().double().requires_grad_() for t in (x, w, b)]
    exact = torch.autograd.grad((plain(*doubles, True) * weight).sum(), doubles)
    rough = torch.autograd.grad((plain(x, w, b, True) * weight).sum(), (x, w, b))
    for got, want, near in zip(found, exact, rough, strict=True):
        assert_close(got, want, near, torch.float32)


def test_a_sample_and_a_trial_of_it_keep_one_row_less_than_the_body_sees() -> None:
    for traits in (frozenset[Trait](), frozenset({Trait.POOL}), frozenset({Trait.PACKED})):
        sample = Sample({"D": 64, "W": 4}, "decode", traits=traits)
        call = sample_call(OP.declaration, sample)
        assert call.tensors["win"].shape[1:] == (3, 64) and call.sizes["W"] == 4
        made = trial_call(call, "cpu")
        assert made.tensors["win"].shape[1:] == (3, 64)
        many, one = (found.plan for found in call_sources(call, "decode"))
        assert many.phase == one.phase == "window" and (many.group, one.group) == (4, 1)
