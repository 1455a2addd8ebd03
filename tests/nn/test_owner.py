"""Sequences that come and go: one handle for a layer's pages and slots."""

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import CacheError, RankError
from tests.nn.plain import Shape, module, whole
from tests.tolerance import assert_close

KINDS = ("attention", "delta", "sparse")
SMALL = Shape(width=40, heads=2, group=2, dim=8)


@pytest.fixture(autouse=True)
def _no_grad() -> object:
    with torch.no_grad():
        yield


def drawn(kind: str) -> tuple[ac.nn.LayerModule, torch.Tensor, torch.Tensor, torch.Tensor]:
    layer = module(kind, SMALL, torch.float32)
    x = torch.randn(2, 20, SMALL.width, generator=torch.Generator().manual_seed(0))
    return layer, x, *whole(kind, layer, x, SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_forked_sequences_share_what_came_before(kind: str) -> None:
    layer, x, _, _ = drawn(kind)
    other = torch.cat([x[0, :7], x[1, 7:]])[None]
    exact, rough = whole(kind, layer, torch.cat([x[:1], other]), SMALL)
    owner = ac.nn.LayerOwner(layer, slots=3, pages=12, page=4)
    a = owner.add()
    with owner.append([a], 7) as kept:
        layer(x[:1, :7], kept=kept)
    b = owner.fork(a)
    for i in range(7, 12):
        with owner.append([a, b], 1) as kept:
            y = layer.decode(x[:, i : i + 1], kept)
        assert_close(y, exact[:, i : i + 1], rough[:, i : i + 1], torch.float32)
    owner.release(a)
    owner.release(b)
    assert all(not o.handles for o in owner.owners)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_taken_back(kind: str) -> None:
    layer, x, exact, rough = drawn(kind)
    owner = ac.nn.LayerOwner(layer, slots=10, pages=12, page=4)
    handles = [owner.add(), owner.add()]
    with owner.append(handles, 6) as kept:
        layer(x[:, :6], kept=kept)
    drafts = torch.cat([x[:, 6:8], torch.zeros_like(x[:, :2])], 1)
    with owner.speculate(handles, 4) as kept:
        y = layer.decode(drafts, kept)
    assert_close(y[:, :2], exact[:, 6:8], rough[:, 6:8], torch.float32)
    with pytest.raises(CacheError, match="has fewer drafts"):
        owner.accept(handles, [2, 5])
    owner.accept(handles, [2, 1])
    with owner.append(handles, 1) as kept:
        y = layer.decode(torch.stack([x[0, 8:9], x[1, 7:8]]), kept)
    for row, at in ((0, 8), (1, 7)):
        assert_close(y[row, 0], exact[row, at], rough[row, at], torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_without_a_sequence_hurt_nobody(kind: str) -> None:
    layer, x, exact, rough = drawn(kind)
    owner = ac.nn.LayerOwner(layer, slots=4, pages=16, page=4)
    batch = owner.batch(3, 20)
    a, b = owner.add(), owner.add()
    with owner.append([a, b], [3, 5]) as kept:
        cu = torch.tensor([0, 3, 8])
        layer(torch.cat([x[0, :3], x[1, :5]]), kept=kept, cu_seqlens=cu)
    batch.set([b, None, a])
    for i in range(4):
        with batch.append(1) as kept:
            y = layer.decode(torch.stack([x[1, 5 + i], x[0, 0], x[0, 3 + i]])[:, None], kept)
        assert kept is batch.kept
        for row, of, at in ((0, 1, 5 + i), (2, 0, 3 + i)):
            assert_close(y[row, 0], exact[of, at], rough[of, at], torch.float32)
    batch.close()


def test_nothing_is_taken_where_something_is_missing() -> None:
    layer = module("delta", SMALL, torch.float32)
    owner = ac.nn.LayerOwner(layer, slots=2)
    a, b = owner.add(), owner.add()
    free = [o.free for o in owner.owners]
    for ask in (owner.add, lambda: owner.fork(a)):
        with pytest.raises(ac.ExhaustedError, match="1 slot is missing"):
            ask()
        assert [o.free for o in owner.owners] == free
        assert all(o.handles == (a, b) for o in owner.owners)
    with pytest.raises(CacheError, match="fewer drafts"):
        owner.accept([a], [0])


def test_drafts_of_a_call_that_fails_are_gone() -> None:
    layer, x, exact, rough = drawn("delta")
    owner = ac.nn.LayerOwner(layer, slots=5)
    a = owner.add()
    with owner.append([a], 3) as kept:
        layer(x[:1, :3], kept=kept)
    owner.states["v_conv"].add(handle=7)  # three slots are left there, four elsewhere
    free = [o.free for o in owner.owners]
    with pytest.raises(ac.ExhaustedError), owner.speculate([a], 4):
        pass
    with pytest.raises(RankError), owner.speculate([a], 2) as kept:
        layer.decode(x[:1, 3:5, None], kept)
    assert [o.free for o in owner.owners] == free
    with owner.append([a], 1) as kept:
        y = layer.decode(x[:1, 3:4], kept)
    assert_close(y, exact[:1, 3:4], rough[:1, 3:4], torch.float32)


def test_a_layer_that_keeps_nothing_has_no_owner() -> None:
    @ac.layer
    def norm(n):
        x = n.input("x", "B T M")
        return n.project("proj", x, "y", "B T E")

    layer = ac.nn.LayerModule(norm, {"M": 4, "E": 3}, dtype=torch.float32)
    assert layer(torch.ones(1, 2, 4)).shape == (1, 2, 3)
    with pytest.raises(CacheError, match="keeps nothing"):
        ac.nn.LayerOwner(layer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_speculates_is_left_alone_until_its_drafts_are_settled(kind: str) -> None:
    layer, x, exact, rough = drawn(kind)
    owner = ac.nn.LayerOwner(layer, slots=10, pages=24, page=4)
    batch = owner.batch(1, 16)
    a, b = owner.add(), owner.add()
    with owner.append([a], 6) as kept:
        layer(x[:1, :6], kept=kept)
    batch.set([a])
    with owner.speculate([a], 2) as kept:
        layer.decode(x[:1, 6:8], kept)
    for refused in (
        lambda: owner.append([a], 1).__enter__(),
        lambda: owner.speculate([a], 1).__enter__(),
        lambda: owner.fork(a),
        lambda: batch.set([a]),
        lambda: batch.append(1).__enter__(),
    ):
        with pytest.raises(CacheError, match=f"sequence {a} speculates"):
            refused()
    for handles, counts, why in (
        ([a, a], [1, 1], "named twice"),
        ([a], [1, 1], "one number a sequence"),
        ([b], 0, "fewer drafts"),
    ):
        with pytest.raises(CacheError, match=why):
            owner.accept(handles, counts)
    owner.accept([a], 2)
    with batch.append(1) as kept:  # its state has another slot now
        y = layer.decode(x[:1, 8:9], kept)
    assert_close(y, exact[:1, 8:9], rough[:1, 8:9], torch.float32)
    batch.close()
