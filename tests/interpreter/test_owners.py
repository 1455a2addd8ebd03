"""Owners before generated kernels: batches with rows that have no sequence, drafts, windows."""

import torch

import attncc as ac
from tests.runtime.owner_ops import close, smoothed
from tests.tolerance import assert_close

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
DIM, PAGE, ROWS = 16, 16, 3


def draw(g, *shape):
    """Standard normal values in fp32."""
    return torch.randn(shape, generator=g)


def test_sequences_of_a_batch_are_forked_and_rolled_back():
    g = torch.Generator().manual_seed(0)
    pages = ac.PageOwner.allocate(
        ATTENTION, sizes={"Hkv": 1, "D": DIM, "E": DIM}, pages=9, page=PAGE, dtype=torch.float32
    )
    for held in pages.view([]).pages.values():
        held.fill_(torch.nan)
    batch = pages.batch(ROWS, 3 * PAGE, tokens=2)
    a = pages.add()
    prompt = [draw(g, PAGE + 3, h, DIM) for h in (2, 1, 1)]
    with pages.append([a], PAGE + 3) as cache:
        cu = torch.tensor([0, PAGE + 3])
        ATTENTION(*prompt, cache=cache, cu_seqlens=cu, backend="triton")
    b = pages.fork(a)
    lives = {a: prompt, b: prompt}
    for step in range(3):
        rows = [[b, None, a], [None, a, b], [a, b, None]][step]
        new = [draw(g, ROWS, 2, h, DIM) for h in (2, 1, 1)]
        batch.set(rows)
        with batch.append(2) as cache:
            o = ATTENTION.decode(*new, cache, backend="triton")
        for row, h in enumerate(rows):
            if h is not None:
                lives[h] = [torch.cat([x, y[row]]) for x, y in zip(lives[h], new, strict=True)]
                args, n = [x[None] for x in lives[h]], len(lives[h][0])
                close(o[row][None], ATTENTION, args, slice(None), slice(n - 2, n))
        pages.truncate(b, pages.length(b) - 1)
        lives[b] = [x[:-1] for x in lives[b]]
    shared = set(pages.pages_of(a)) & set(pages.pages_of(b))
    assert shared == {pages.pages_of(a)[0]}


def test_drafts_of_a_batch_have_slots_of_their_own():
    g = torch.Generator().manual_seed(0)
    sizes = {"Hk": 1, "G": 1, "K": DIM, "V": DIM}
    states = ac.StateOwner.allocate(GDR, sizes=sizes, slots=7)
    states.pools["s"].fill_(torch.nan)
    batch = states.batch(ROWS, tokens=2)
    a, b = states.add(), states.add()
    kept = {a: [], b: []}
    for rows, counts in (([a, None, b], [2, 0, 1]), ([b, a, None], [0, 2, 0])):
        q, k = (torch.nn.functional.normalize(draw(g, ROWS, 2, 1, DIM), dim=-1) for _ in range(2))
        args = q, k, draw(g, ROWS, 2, 1, DIM), -draw(g, ROWS, 2, 1).abs(), draw(g, ROWS, 2, 1)
        batch.set(rows)
        batch.speculate()
        GDR.decode(*args, **batch.arguments, backend="triton")
        batch.accept(counts)
        for row, (h, n) in enumerate(zip(rows, counts, strict=True)):
            if h is not None:
                kept[h].append([x[row : row + 1, :n] for x in args])
    for h, parts in kept.items():
        whole = [torch.cat(x, 1) for x in zip(*parts, strict=True)]
        exact, rough = GDR.reference(*whole).s, GDR(*whole, backend="torch").s
        assert_close(states.pools["s"][states.slot_of(h)][None], exact, rough, torch.float32)
    assert states.free == 5


def test_a_window_is_prefilled_decoded_and_rolled_back():
    g = torch.Generator().manual_seed(0)
    windows = ac.ConvWindow.allocate(
        smoothed, sizes={"D": DIM, "W": 4}, slots=6, dtype=torch.float32
    )
    windows.pools["win"].fill_(torch.nan)
    a, b = windows.add(), windows.add()
    x, w = draw(g, 2, 12, DIM), draw(g, 4, DIM)
    parts = [
        smoothed(x[:, :9], w, **windows.view([a, b]), backend="triton"),
        smoothed.decode(x[:, 9:10], w, **windows.view([a, b]), backend="triton"),
    ]
    drafts = smoothed.decode(x[:, 10:], w, **windows.speculate([a, b], 2), backend="triton")
    windows.accept([a, b], [2, 1])
    close(torch.cat([*parts, drafts], 1), smoothed, (x, w))
    assert torch.equal(windows.pools["win"][windows.slot_of(a)], x[0, 9:])
    assert torch.equal(windows.pools["win"][windows.slot_of(b)], x[1, 8:11])
