"""Generated kernels on pages and pools in Triton's interpreter, against the fp64 meaning."""

import itertools

import pytest
import torch

import attncc as ac
from attncc.codegen import plan_reads
from attncc.codegen.pipeline import analyse
from attncc.runtime import softmax
from attncc.runtime.backends import run_eager, spec_of
from attncc.runtime.bind import bind
from attncc.runtime.reference import reference_results, run_reference
from tests.interpreter.test_softmax import alibi_of_documents
from tests.strategies import randn
from tests.tolerance import assert_close

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
SIZES = {"B": 3, "Hkv": 2, "D": 32, "E": 32}


def shuffled(op, lengths, capacity, page, layouts=None, dtype=torch.bfloat16):
    """A cache with permuted pages: random rows where tokens are held, NaN elsewhere, -1 unused."""
    pages = max(40, len(lengths) * capacity // page)
    spare = ac.PagedCache.allocate(
        op, sizes=SIZES, capacity=capacity, page=page, pages=pages, layouts=layouts, dtype=dtype
    )
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()
    table = order[: spare.block_table.numel()].view(spare.block_table.shape).clone()
    for held in spare.pages.values():
        held.fill_(torch.nan)
    for b, n in enumerate(lengths):
        table[b, -(-(n + 16) // page) :] = -1
        for i in range(n):
            for name, held in spare.pages.items():
                row = held[table[b, i // page]]
                row = row.select(1 if layouts and name in layouts else 0, i % page)
                row.copy_(
                    torch.full_like(row, i // 11)
                    if name == "document"
                    else randn(b * 100 + i, *row.shape)
                )
    spare.lengths.copy_(torch.tensor(lengths))
    return ac.PagedCache(spare.pages, table, spare.lengths, spare.layouts)


def check(op, *args, phase="prefill", splits=None, **kwargs):
    """Outputs and lse against the oracle, with the contract's tolerance; rows are appended."""
    cache = kwargs["cache"]
    call, _ = bind(op.declaration, args, {**kwargs, "return_lse": True})
    exact = run_reference(call)
    copy = ac.PagedCache(
        {n: t.clone() for n, t in cache.pages.items()},
        cache.block_table,
        cache.lengths,
        cache.layouts,
    )
    rough, _ = bind(op.declaration, args, {**kwargs, "cache": copy, "return_lse": True})
    run_eager(rough, analyse(call.program))
    for tensor in (*call.outputs.values(), call.lse):
        tensor.fill_(torch.nan)
    softmax.run(call, analyse(call.program).softmax, spec_of(call), phase, splits=splits)
    for name, tensor in call.outputs.items():
        assert_close(tensor, exact[name], rough.outputs[name], tensor.dtype, name)
    assert_close(call.lse, exact["lse"], rough.lse, torch.float32, "lse")
    for name, held in cache.pages.items():
        assert torch.equal(held.nan_to_num(99), copy.pages[name].nan_to_num(99)), name


@pytest.mark.parametrize("page", [16, 128])  # blocks of 64 keys: over several pages, or in one
def test_prefill_and_decode_mixed_in_one_packed_call(page):
    counts, held = [1, 0, 16], [70, 5, 0]
    layouts = {"v": "pages Hkv page E"}
    cache = shuffled(ATTENTION, held, 128, page, layouts)
    total = sum(counts)
    q, k, v = (randn(i, total, h, 32, dtype=torch.bfloat16) for i, h in enumerate((8, 2, 2)))
    cu = torch.tensor([0, *itertools.accumulate(counts)])
    check(ATTENTION, q, k, v, cache=cache, cu_seqlens=cu, splits=1)


def test_a_dense_batch_decodes_over_splits_with_labels_at_the_query():
    cache = shuffled(alibi_of_documents, [70, 5, 0], 128, 24)  # pages that blocks cross
    q, k, v = (randn(i, 3, 2, h, 32, dtype=torch.bfloat16) for i, h in enumerate((4, 2, 2)))
    label = torch.tensor([[6, 6], [0, 0], [0, 0]], dtype=torch.bfloat16)
    slope = torch.tensor([0.5, 0.25, 0.125, 1.0])
    check(
        alibi_of_documents,
        q,
        k,
        v,
        slope=slope,
        document=label,
        cache=cache,
        phase="decode",
        splits=2,
    )


def test_scores_read_their_own_pages_while_values_follow_a_block_behind():
    cache = shuffled(alibi_of_documents, [200, 130, 0], 256, 64)
    q, k, v = (randn(i, 3, 16, h, 32, dtype=torch.bfloat16) for i, h in enumerate((8, 2, 2)))
    label = torch.tensor([[7.0], [3.0], [0.0]]).bfloat16().repeat(1, 16)  # of one block's keys
    args = {"q": q, "k": k, "v": v, "slope": 2.0 ** -torch.arange(8), "document": label}
    call, _ = bind(alibi_of_documents.declaration, (), {**args, "cache": cache})
    kernels = softmax.prepare(call.program, analyse(call.program).softmax, spec_of(call), "prefill")
    assert kernels.whole.plan.ahead and kernels.whole.plan.page == 64
    check(alibi_of_documents, cache=cache, splits=1, **args)


@pytest.mark.parametrize("page", [24, 8, 16, 128])  # pages that blocks cross, whole ones, a part
@pytest.mark.parametrize(("tokens", "splits"), [(1, 3), (6, 1), (6, 2)])
def test_a_decode_step_writes_its_own_rows_and_finds_pages_a_block_ahead(page, tokens, splits):
    cache = shuffled(ATTENTION, [129, 122, 0], {24: 168, 8: 160, 16: 192, 128: 256}[page], page)
    q, k, v = (randn(i, 3, tokens, h, 32, dtype=torch.bfloat16) for i, h in enumerate((4, 2, 2)))
    call, _ = bind(ATTENTION.declaration, (q, k, v), {"cache": cache})
    plans = softmax.prepare(call.program, analyse(call.program).softmax, spec_of(call), "decode")
    assert plans.parts[0].plan.appends and all(
        p.plan.pages_ahead and p.plan.warp_rows == (8 if page in (8, 16) else 0)
        for p in (plans.whole, *plans.parts)
    )
    check(ATTENTION, q, k, v, cache=cache, phase="decode", splits=splits)


@pytest.mark.parametrize(("page", "tokens", "splits"), [(8, 1, 3), (128, 6, 2), (16, 1, 1)])
def test_ranges_dealt_out_block_by_block(page, tokens, splits, monkeypatch):
    monkeypatch.setattr(plan_reads, "DEALT", True)
    monkeypatch.setattr(softmax, "_PREPARED", {})
    cache = shuffled(ATTENTION, [129, 122, 0], {8: 160, 16: 192, 128: 256}[page], page)
    q, k, v = (randn(i, 3, tokens, h, 32, dtype=torch.bfloat16) for i, h in enumerate((4, 2, 2)))
    call, _ = bind(ATTENTION.declaration, (q, k, v), {"cache": cache})
    plans = softmax.prepare(call.program, analyse(call.program).softmax, spec_of(call), "decode")
    assert all(p.plan.dealt for p in (plans.whole, *plans.parts))
    check(ATTENTION, q, k, v, cache=cache, phase="decode", splits=splits)


@ac.op(out="B T (Hkv G) E")
def before_itself(q=ac.Activation("B T (Hkv G) D"), k=ac.Cache("B S Hkv D"),
                  v=ac.Cache("B S Hkv E")):  # fmt: skip
    """A query that sees neither its own row nor what is further than 40 rows away."""
    i, j = ac.index("T"), ac.index("S")
    score = ac.dot(q, k, "D") * ac.rsqrt("D")
    return ac.dot(ac.softmax(score, "S", where=(j < i) & (i - j <= 40)), v, "S")


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_no_query_sees_are_appended_too(packed):
    held = torch.tensor([100, 3]).int()
    cache = ac.DenseCache(
        {n: randn(i, 2, 160, 2, 32, dtype=torch.bfloat16) for i, n in enumerate("kv")}, held
    )
    counts = [1, 3] if packed else [2, 2]
    shape = (4,) if packed else (2, 2)
    q, k, v = (randn(i, *shape, h, 32, dtype=torch.bfloat16) for i, h in enumerate((4, 2, 2)))
    more = {"cu_seqlens": torch.tensor([0, 1, 4])} if packed else {}
    call, _ = bind(before_itself.declaration, (q, k, v), {"cache": cache, **more})
    before = {n: t.clone() for n, t in cache.tensors.items()}
    exact = run_reference(call)
    other = ac.DenseCache({n: t.clone() for n, t in cache.tensors.items()}, held.clone())
    rough = before_itself.decode(q, k, v, cache=other, backend="torch", **more)
    form = analyse(call.program).softmax
    assert softmax.prepare(call.program, form, spec_of(call), "decode").parts[0].plan.appends
    for splits in (1, 3):
        for name, tensor in cache.tensors.items():
            tensor.copy_(before[name])
        softmax.run(call, form, spec_of(call), "decode", splits=splits)
        assert_close(call.outputs["o"], exact["o"], rough, torch.bfloat16, "o")
        for name, new in (("k", k), ("v", v)):
            rows = new.split(counts) if packed else new
            for b, n in enumerate(held.tolist()):
                want = before[name][b].clone()
                want[n : n + counts[b]] = rows[b]
                assert torch.equal(cache.tensors[name][b], want)


def delta(batch, tokens):
    """q, k, v, g, beta of 2 heads of 16 x 16."""
    shape = (batch, tokens, 2)
    q, k = (torch.nn.functional.normalize(randn(i, *shape, 16), dim=-1).float() for i in range(2))
    v, g, beta = (
        randn(2, *shape, 16).float(),
        -randn(3, *shape).abs().float(),
        randn(4, *shape).sigmoid(),
    )
    return q, k, v, g, beta.float()


@pytest.mark.parametrize("tokens", [1, 70])
def test_steps_and_chunks_update_their_slots_and_no_other(tokens):
    pool, rough = (randn(5, 6, 2, 16, 16).to(torch.float32) for _ in range(2))
    slots, out = torch.tensor([3, -1, 1]).int(), torch.tensor([3, 5, -1]).int()
    args = delta(3, tokens)
    call, _ = bind(GDR.declaration, args, {"s": ac.StatePool(pool, slots, out)})
    exact = run_reference(call)
    before = pool.clone()
    rough_o = GDR(*args, s=ac.StatePool(rough, slots, out), backend="torch")
    o = GDR(*args, s=ac.StatePool(pool, slots, out), backend="triton")
    assert_close(o, exact["o"], rough_o, o.dtype, "o")
    for b in (0, 1):
        assert_close(pool[out[b]], exact["s"][b], rough[out[b]], pool.dtype, f"slot {out[b]}")
    assert torch.equal(pool[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


def test_a_slot_a_token_holds_the_state_after_it():
    pool, rough = (randn(5, 12, 2, 16, 16).to(torch.float32) for _ in range(2))
    slots = torch.tensor([3, -1]).int()
    out = torch.tensor([[4, -1, 3], [5, 6, 7]]).int()
    args = delta(2, 3)
    call, _ = bind(GDR.declaration, args, {"s": ac.StatePool(pool, slots, out)})
    _, exact = reference_results(call)
    before = pool.clone()
    GDR.decode(*args, s=ac.StatePool(rough, slots, out), backend="torch")
    GDR.decode(*args, s=ac.StatePool(pool, slots, out), backend="triton")
    for b, t in itertools.product(range(2), range(3)):
        if (slot := int(out[b, t])) >= 0:
            assert_close(pool[slot], exact["s"][b, t], rough[slot], pool.dtype, f"slot {slot}")
    assert torch.equal(pool[[0, 1, 2, 8, 9, 10, 11]], before[[0, 1, 2, 8, 9, 10, 11]])


def test_rows_are_appended_where_there_are_no_queries():
    cache = ac.DenseCache.allocate(
        ATTENTION, sizes={"B": 3, "Hkv": 2, "D": 16, "E": 16}, capacity=2048, dtype=torch.float32
    )  # room for ranges of keys
    k, v = (randn(i, 3, 1, 2, 16, dtype=torch.float32) for i in (1, 2))
    ATTENTION.decode(torch.zeros(3, 1, 0, 16), k, v, cache, backend="triton")
    assert cache.lengths.tolist() == [1, 1, 1]
    assert torch.equal(cache.tensors["k"][:, :1], k) and torch.equal(cache.tensors["v"][:, :1], v)


@pytest.mark.parametrize("page", [0, 16])
def test_a_decode_kernel_adds_its_tokens_to_the_lengths(page, monkeypatch):
    sizes, kwargs = {"B": 3, "Hkv": 2, "D": 16, "E": 16}, {"capacity": 256, "dtype": torch.float32}
    owner = ac.PagedCache if page else ac.DenseCache
    cache = owner.allocate(ATTENTION, sizes=sizes, **kwargs, **({"page": page} if page else {}))
    held = torch.tensor([0, 17, 129])
    for t in cache.tensors.values():
        t.copy_(randn(3, *t.shape))
    monkeypatch.setattr("attncc.runtime.api.grow", None)  # nobody else does
    for step, tokens in enumerate((1, 2)):
        cache.lengths.copy_(held)
        q, k, v = (randn(step + i, 3, tokens, h, 16).float() for i, h in enumerate((4, 2, 2)))
        exact = ATTENTION.reference(q, k, v, cache=cache)
        o = ATTENTION.decode(q, k, v, cache, backend="triton")
        assert cache.lengths.tolist() == [n + tokens for n in held.tolist()]
        assert (o - exact).abs().max() < 1e-5
        call, _ = bind(ATTENTION.declaration, (q, k, v), {"cache": cache})
        softmax.run(call, analyse(call.program).softmax, spec_of(call), "decode", splits=3)
        assert cache.lengths.tolist() == [n + tokens for n in held.tolist()]  # nobody asked
        held += 7
