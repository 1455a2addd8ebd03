"""Sequences in slots: forks, drafts, windows, batches that stay where they are, every mistake."""

import pytest
import torch

import attncc as ac
from attncc.dsl import errors
from tests.runtime.owner_ops import close, smoothed, tally
from tests.runtime.test_owners_kept import fails

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
SIZES = {"Hk": 2, "G": 1, "K": 4, "V": 3}


def owner(slots=8, **options):
    """Slots of the gated delta rule, full of NaN."""
    states = ac.StateOwner.allocate(GDR, sizes=SIZES, slots=slots, **options)
    states.pools["s"].fill_(torch.nan)
    return states


def delta(batch, tokens, seed=0):
    """Arguments of the gated delta rule."""
    g = torch.Generator().manual_seed(seed)
    q, k = (
        torch.nn.functional.normalize(torch.randn(batch, tokens, 2, 4, generator=g), dim=-1)
        for _ in range(2)
    )
    v = torch.randn(batch, tokens, 2, 3, generator=g)
    gate, beta = (torch.rand(batch, tokens, 2, generator=g) for _ in range(2))
    return q, k, v, -gate, beta


def part(args, *index):
    """Some of the arguments' sequences and tokens."""
    return [x[index] for x in args]


def test_a_sequence_starts_with_zeros_and_a_fork_goes_its_own_way():
    states = owner()
    args, other = delta(1, 6), delta(1, 3, 1)
    a = states.add()
    first = GDR(*part(args, slice(None), slice(4)), **states.view([a]))
    b = states.fork(a)
    second = GDR(*part(args, slice(None), slice(4, 6)), **states.view([a]))
    branch = GDR(*other, **states.view([b]))
    close(torch.cat([first, second], 1), GDR, args)
    both = [torch.cat([x[:, :4], y], 1) for x, y in zip(args, other, strict=True)]
    close(branch, GDR, both, slice(None), slice(4, None))
    assert states.slot_of(a) != states.slot_of(b) and states.free == 6
    states.release(a)
    assert states.add() == 2 and not states.pools["s"][states.slot_of(2)].any()


@pytest.mark.parametrize("accepted", [[0, 0], [1, 4], [4, 2]])
def test_an_accepted_draft_leaves_its_state_without_a_copy(accepted):
    states = owner(slots=10)
    a, b = states.add(), states.add()
    start, drafts, rest = delta(2, 3), delta(2, 4, 1), delta(2, 2, 2)
    GDR(*start, **states.view([a, b]))
    GDR.decode(*drafts, **states.speculate([a, b], 4))
    assert states.free == 0
    pool = states.pools["s"].clone()
    states.accept([a, b], accepted)
    assert torch.equal(states.pools["s"].nan_to_num(9), pool.nan_to_num(9)) and states.free == 8
    o = GDR(*rest, **states.view([a, b]))
    for i, n in enumerate(accepted):
        row = slice(i, i + 1)
        own = [
            torch.cat([x[row], y[row, :n], z[row]], 1)
            for x, y, z in zip(start, drafts, rest, strict=True)
        ]
        close(o[row], GDR, own, slice(None), slice(3 + n, None))


def test_drafts_of_unequal_number_are_packed():
    states = owner()
    a, b = states.add(), states.add()
    args = delta(1, 4)
    cu = torch.tensor([0, 1, 4])
    view = states.speculate([a, b], [1, 3])
    assert view["s"].out_slots.shape == (2, 3) and view["s"].out_slots[0, 1:].tolist() == [-1, -1]
    GDR.decode(*part(args, 0), **view, cu_seqlens=cu)
    states.accept([a, b], [1, 2])
    close(
        states.pools["s"][states.slot_of(b)], GDR, part(args, slice(None), slice(1, 3)), 0, name="s"
    )


def test_a_batch_keeps_its_tensors_while_slots_change():
    states = owner(slots=9)
    plain, drafts = states.batch(3), states.batch(3, tokens=2)
    places = [drafts.arguments["s"].slots.data_ptr(), drafts.arguments["s"].out_slots.data_ptr()]
    a, b = states.add(), states.add()
    plain.set([b, None, a])
    first = delta(3, 1)
    GDR.decode(*first, **plain.arguments)
    drafts.set([None, a, b])
    more = delta(3, 2, 1)
    drafts.speculate([0, 2, 1])
    GDR.decode(*more, **drafts.arguments)
    drafts.accept([0, 2, 0])
    plain.update()
    assert plain.arguments["s"].slots.tolist() == [states.slot_of(b), -1, states.slot_of(a)]
    assert drafts.arguments["s"].slots.tolist() == [-1, states.slot_of(a), states.slot_of(b)]
    drafts.speculate(1)
    assert drafts.arguments["s"].out_slots[0].tolist() == [-1, -1]
    drafts.accept(0)
    own = [torch.cat([x[2:], y[1:2]], 1) for x, y in zip(first, more, strict=True)]
    close(states.pools["s"][states.slot_of(a)], GDR, own, 0, name="s")
    close(states.pools["s"][states.slot_of(b)], GDR, part(first, slice(1)), 0, name="s")
    now = [drafts.arguments["s"].slots.data_ptr(), drafts.arguments["s"].out_slots.data_ptr()]
    assert now == places and states.free == 7
    assert plain.handles == (b, None, a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pieces", [(1, 1, 1, 6), (2, 7), (9,)])
def test_a_window_serves_prefill_and_decode(pieces, dtype):
    windows = ac.ConvWindow.allocate(smoothed, sizes={"D": 4, "W": 4}, slots=5, dtype=dtype)
    windows.pools["win"].fill_(torch.nan)
    a, b = windows.add(), windows.add()
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 4, generator=g).to(dtype) for n in (18, 4))
    x = x.view(2, 9, 4)
    parts, at = [], 0
    for n in pieces:
        run = smoothed.decode if n == 1 else smoothed
        parts.append(run(x[:, at : at + n], w, **windows.view([a, b])))
        at += n
    assert torch.equal(torch.cat(parts, 1), smoothed(x, w).o)
    assert torch.equal(windows.pools["win"][[windows.slot_of(a), windows.slot_of(b)]], x[:, 6:])
    c = windows.fork(b)
    smoothed.decode(x[:1, :2], w, **windows.speculate([c], 2))
    windows.accept([c], 1)
    want = torch.cat([x[1, 7:], x[0, :1]])
    assert torch.equal(windows.pools["win"][windows.slot_of(c)], want)


def test_windows_may_live_apart_from_the_states_of_their_op():
    sizes = {"D": 2, "W": 3}
    states = ac.StateOwner.allocate(tally, sizes=sizes, slots=2, names=["total"])
    windows = ac.ConvWindow.allocate(tally, sizes=sizes, slots=5, dtype=torch.float32)
    a = states.add()
    windows.add(handle=3)
    windows.add(handle=a)
    x, w = torch.randn(1, 7, 2), torch.randn(3)
    parts = [
        tally(x[:, p], w, **states.view([a]), **windows.view([a]))
        for p in (slice(0, 4), slice(4, 7))
    ]
    close(torch.cat(parts, 1), tally, (x, w))


def test_exhaustion_and_mistakes_are_named_and_nothing_changes():
    states = owner(slots=3)
    a, b = states.add(), states.add(handle=9)
    pool = states.pools["s"].clone()

    def wrong(kind, match, call):
        return fails(kind, call, match)

    error = wrong(errors.ExhaustedError, "slots are missing", lambda: states.speculate([a, b], 2))
    assert (error.missing, error.wanted, error.free, error.unit) == (3, 4, 1, "slot")
    assert states.free == 1 and states.sequence(a).drafts is None
    c = states.add()
    error = wrong(errors.ExhaustedError, "1 slot is missing", states.add)
    wrong(errors.ExhaustedError, "1 slot is missing", lambda: states.fork(a))
    states.release(c)
    states.speculate([a], 1)
    for call in (states.fork, lambda h: states.view([h]), lambda h: states.speculate([h], 0)):
        wrong(errors.CacheError, f"sequence {a} speculates", lambda call=call: call(a))
    wrong(errors.CacheError, "fewer drafts", lambda: states.accept([a], 2))
    wrong(errors.CacheError, "fewer drafts", lambda: states.accept([b, a], [0, 1]))
    wrong(errors.CacheError, "named twice", lambda: states.view([b, b]))
    wrong(errors.CacheError, "no such sequence", lambda: states.view([b, 4]))
    wrong(errors.CacheError, "of this handle is there", lambda: states.add(handle=9))
    states.accept([a], 0)
    batch = states.batch(1)
    wrong(errors.CacheError, "not for drafts", batch.speculate)
    wrong(errors.CacheError, "more sequences than rows", lambda: batch.set([a, b]))
    wrong(errors.CacheError, "more drafts", lambda: states.batch(1, tokens=1).speculate(2))
    batch.set([b])
    states.release(b)
    wrong(errors.CacheError, "no such sequence", batch.update)
    wrong(errors.CacheError, "keeps no state or window of this name",
          lambda: ac.StateOwner.allocate(GDR, sizes=SIZES, slots=1, names=["t"]))  # fmt: skip
    wrong(errors.CacheError, "keeps no window", lambda: ac.ConvWindow.allocate(
        GDR, sizes=SIZES, slots=1))  # fmt: skip
    unequal = {"total": torch.zeros(3, 2), "win": torch.zeros(2, 2, 2)}
    error = wrong(errors.SizeError, "different numbers", lambda: ac.StateOwner(tally, unequal))
    assert (error.argument, error.axis) == ("win", "B")
    kept = [s for s in range(3) if s != 2]
    assert torch.equal(pool[kept].nan_to_num(9), states.pools["s"][kept].nan_to_num(9))


def test_one_handle_has_pages_and_a_state_with_lives_of_their_own():
    pages = ac.PageOwner.allocate(
        ATTENTION, sizes={"Hkv": 1, "D": 4, "E": 4}, pages=8, page=2, dtype=torch.float32
    )
    states = owner()
    a = pages.add(6)
    states.add(handle=a)
    b = pages.fork(a)
    states.fork(a, child=b)
    assert pages.handles == states.handles == (a, b)
    states.release(b)  # the state may go before the pages do
    assert pages.handles == (a, b) and states.handles == (a,)
