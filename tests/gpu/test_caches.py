"""Pages and pools on the GPU: against the fp64 oracle, replayed from CUDA graphs, past 2**31."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.dsl import errors
from attncc.runtime.backends import run_kernels, spec_of
from attncc.runtime.bind import bind
from attncc.runtime.reference import reference_results
from attncc.runtime.softmax import prepare
from tests.gpu.checking import DEVICE, check_in_cache, eager, offsets, on_cpu, unit
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PROPERTY = settings(
    max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
HELD = st.sampled_from([0, 1, 15, 16, 63, 64, 65, 200, 700])
NEW = st.sampled_from([0, 1, 1, 2, 5, 16, 130])


def int32(values):
    """A vector or table of int32 on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def paged(lengths, capacity, page, dtype, heads=2, dim=128, layouts=None, seed=0):
    """A cache of attention with permuted pages, random rows where held, NaN elsewhere."""
    cache = ac.PagedCache.allocate(
        ATTENTION, sizes={"B": len(lengths), "Hkv": heads, "D": dim, "E": dim}, capacity=capacity,
        page=page, pages=len(lengths) * -(-capacity // page) + 5, layouts=layouts, dtype=dtype,
        device=DEVICE,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    count = next(iter(cache.pages.values())).shape[0]
    order = torch.randperm(count, generator=generator).int().to(DEVICE)
    table = order[: cache.block_table.numel()].view(cache.block_table.shape).clone()
    for name, held in cache.pages.items():
        held.fill_(torch.nan)
        rows = held.transpose(1, 2) if layouts and name in layouts else held
        for b, n in enumerate(lengths):
            for i in range(0, n, page):
                rows[table[b, i // page], : min(page, n - i)].normal_()
    for b in range(len(lengths)):
        table[b, -(-(lengths[b] + 130) // page) :] = -1
    cache.lengths.copy_(int32(lengths))
    return ac.PagedCache(cache.pages, table, cache.lengths, cache.layouts)


def copy_of(cache):
    """The same cache in other memory."""
    pages = {n: t.clone() for n, t in cache.pages.items()}
    return ac.PagedCache(pages, cache.block_table, cache.lengths.clone(), cache.layouts)


def check(args, cache, phase="prefill", **options):
    """One call against the oracle and the eager reference: outputs, lse and what is appended."""
    other = copy_of(cache)
    check_in_cache(ATTENTION, args, cache, other, phase, **options)
    for name, held in cache.pages.items():
        assert torch.equal(held.nan_to_num(99), other.pages[name].nan_to_num(99)), name


def qkv(*shape, dtype, heads=2, group=4, dim=128):
    """New tokens."""
    return tuple(
        torch.randn(*shape, h, dim, device=DEVICE, dtype=dtype)
        for h in (heads * group, heads, heads)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [16, 48, 64, 256])
@given(st.data())
@PROPERTY
def test_any_mix_of_prefill_and_decode(page, dtype, data):
    held = data.draw(st.lists(HELD, min_size=1, max_size=5))
    new = data.draw(st.lists(NEW, min_size=len(held), max_size=len(held)))
    layouts = (
        {"k": "pages Hkv page D", "v": "pages Hkv page E"} if data.draw(st.booleans()) else None
    )
    cache = paged(held, 900, page, dtype, layouts=layouts)
    check(qkv(sum(new), dtype=dtype), cache, cu_seqlens=offsets(new))
    assert cache.lengths.tolist() == [n + t for n, t in zip(held, new, strict=True)]


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
@pytest.mark.parametrize("batch", [1, 40])
def test_a_dense_batch_decodes_one_to_sixteen_tokens(page, tokens, batch):
    held = list(itertools.islice(itertools.cycle([700, 0, 64, 333]), batch))
    check(
        qkv(batch, tokens, dtype=torch.bfloat16), paged(held, 900, page, torch.bfloat16), "decode"
    )


def test_interleaved_pages_equal_separate_ones():
    plain = paged([300, 17], 400, 16, torch.bfloat16)
    both = torch.stack([plain.pages["k"], plain.pages["v"]], 1)  # [pages, 2, page, H, D]
    mixed = ac.PagedCache(
        {"k": both[:, 0], "v": both[:, 1]}, plain.block_table, plain.lengths.clone()
    )
    args = qkv(2, 1, dtype=torch.bfloat16)
    got = ATTENTION.decode(*args, mixed, backend="triton")
    assert torch.equal(got, ATTENTION.decode(*args, plain, backend="triton"))
    assert torch.equal(both[:, 1].nan_to_num(9), plain.pages["v"].nan_to_num(9))


@pytest.mark.parametrize("page", [16, 64])
def test_page_offsets_past_two_to_the_31(page):
    count = 2**31 // (page * 8 * 128) + 8  # the last pages begin beyond 2**31 elements
    shape = (count, page, 8, 128)
    pages = {n: torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for n in ("k", "v")}
    cache = ac.PagedCache(pages, int32([[count - 1, 0, count - 2]]), int32([2 * page]))
    q, k = (
        torch.ones(1, 1, 8, 128, device=DEVICE).bfloat16(),
        torch.full((1, 1, 8, 128), 40.0, device=DEVICE).bfloat16(),
    )
    o = ATTENTION.decode(q, k, torch.ones_like(k), cache, backend="triton")
    assert (o == 1).all()
    assert (pages["v"][count - 2, 0] == 1).all() and pages["v"].sum() == 8 * 128


@pytest.mark.parametrize("page", [0, 16, 48, 64, 128])
@pytest.mark.parametrize("tokens", [1, 3])
def test_ranges_of_a_long_history_read_the_rows_that_their_own_launch_appends(page, tokens):
    lengths, room = [8000, 8191 - tokens, 127], 8256
    if page:
        cache = paged(lengths, room, page, torch.bfloat16)
        other = copy_of(cache)
    else:
        held = {n: torch.randn(3, room, 2, 128, device=DEVICE).bfloat16() for n in "kv"}
        cache = ac.DenseCache(held, int32(lengths))
        other = ac.DenseCache({n: t.clone() for n, t in held.items()}, int32(lengths))
    q, k, v = qkv(3, tokens, dtype=torch.bfloat16)
    k = q[:, :, ::4].contiguous()  # the new rows count
    call, _ = bind(ATTENTION.declaration, (q, k, v), {"cache": cache})
    analysis, spec = analyse(call.program), spec_of(call)
    assert prepare(call.program, analysis.softmax, spec, "decode").parts[0].plan.appends
    exact = ATTENTION.reference(q, k, v, cache=cache)
    rough = eager(ATTENTION, (q, k, v), {"cache": other})["o"]
    first = None
    for _ in range(20):  # of a race some of these would see it
        for held in cache.tensors.values():  # what is appended is not there before
            for b, n in enumerate(lengths):
                for i in range(n, n + tokens):
                    row = held[cache.block_table[b, i // page], i % page] if page else held[b, i]
                    row.fill_(torch.nan)
        call.outputs["o"].fill_(torch.nan)
        run_kernels(call, analysis, spec, "decode")
        first = call.outputs["o"].clone() if first is None else first
        assert torch.equal(call.outputs["o"], first)
    assert_close(first, exact, rough, torch.bfloat16, "o")
    for name, held in cache.tensors.items():
        assert torch.equal(held.nan_to_num(99), other.tensors[name].nan_to_num(99)), name


def captured(step):
    """A CUDA graph of a step that has run once before."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_captured_paged_decode_replays_with_other_lengths_and_tables(tokens):
    cache = paged([3, 500, 64], 640, 16, torch.bfloat16)
    for held in cache.pages.values():
        held.normal_()
    count = len(cache.pages["k"])
    args = qkv(3, tokens, dtype=torch.bfloat16)
    out = torch.empty_like(args[0])
    cache.block_table.copy_(torch.arange(3 * 40, device=DEVICE).view(3, 40))
    graph = captured(lambda: ATTENTION.decode(*args, cache, out=out, backend="triton"))
    for seed, lengths in enumerate(([3, 500, 64], [0, 16, 600], [624, 1, 15])):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        cache.block_table.copy_(order[: 3 * 40].view(3, 40))
        cache.lengths.copy_(torch.tensor(lengths))
        for x in args:
            x.normal_()
        exact = ATTENTION.reference(*args, cache=cache)
        rough = eager(ATTENTION, args, {"cache": copy_of(cache)})["o"]
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, exact, rough, out.dtype, "o")
        assert cache.lengths.tolist() == [n + tokens for n in lengths]
        for b, n in enumerate(lengths):
            for t in range(tokens):
                row = cache.pages["k"][cache.block_table[b, (n + t) // 16], (n + t) % 16]
                assert torch.equal(row, args[1][b, t])


# --- pools


def delta(batch, tokens, dtype, heads=4, k_dim=128, v_dim=128):
    """Arguments of the gated delta rule."""
    return (
        unit(batch, tokens, heads, k_dim, dtype=dtype),
        unit(batch, tokens, heads, k_dim, dtype=dtype),
        torch.randn(batch, tokens, heads, v_dim, device=DEVICE, dtype=dtype),
        torch.nn.functional.logsigmoid(torch.randn(batch, tokens, heads, device=DEVICE) + 2),
        torch.rand(batch, tokens, heads, device=DEVICE),
    )


def check_pool(args, pool, slots, out=None, phase="prefill", **options):
    """One call against the oracle: outputs, every written slot, and every other one bit for bit."""
    view = ac.StatePool(pool, slots, out)
    kwargs = {"s": view, **options}
    call, _ = bind(GDR.declaration, on_cpu(args), on_cpu(kwargs))
    exact, tokens = reference_results(call)
    rough = pool.clone()
    rough_o = eager(GDR, args, {**options, "s": ac.StatePool(rough, slots, out)})["o"]
    before = pool.clone()
    o = getattr(GDR, phase)(*args, **kwargs, backend="triton")
    assert_close(o, exact["o"], rough_o, o.dtype, "o")
    states = tokens["s"].flatten(0, 1) if view.each_token else exact["s"]
    where = view.written.flatten().tolist()
    for state, slot in zip(states, where, strict=True):
        if slot >= 0:
            assert_close(pool[slot], state, rough[slot], pool.dtype, f"slot {slot}")
    others = [i for i in range(len(pool)) if i not in where]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_slots_are_updated_in_place_and_no_other(dtype, stored, tokens):
    pool = torch.randn(9, 4, 128, 128, device=DEVICE).to(stored)
    phase = "prefill" if tokens == 100 else "decode"
    check_pool(delta(4, tokens, dtype), pool, int32([7, -1, 0, 3]), phase=phase)
    check_pool(
        delta(4, tokens, dtype), pool, int32([7, -1, 0, 3]), int32([5, 1, 0, -1]), phase=phase
    )


@pytest.mark.parametrize("tokens", [[0, 5, 200, 1], [64, 0, 1, 0]])
def test_packed_sequences_update_their_slots(tokens):
    pool = torch.randn(6, 4, 128, 128, device=DEVICE)
    args = [x[0] for x in delta(1, sum(tokens), torch.bfloat16)]
    check_pool(args, pool, int32([4, -1, 0, 2]), cu_seqlens=offsets(tokens))


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_every_token_has_its_own_slot(tokens):
    pool = torch.randn(64, 4, 128, 128, device=DEVICE)
    out = (
        torch.randperm(50, generator=torch.Generator().manual_seed(0))[: 3 * tokens]
        .int()
        .view(3, tokens)
        .to(DEVICE)
    )
    out[1, 0] = -1
    check_pool(delta(3, tokens, torch.bfloat16), pool, int32([60, -1, 61]), out, phase="decode")


def test_states_laid_out_v_first():
    @ac.op(scan="T", out="B T H V")
    def turned(
        q=ac.Activation("B T H K"), k=ac.Activation("B T H K"), v=ac.Activation("B T H V"),
        g=ac.Activation("B T H"), beta=ac.Activation("B T H"), s=ac.State("B H V K"),
    ):  # fmt: skip
        s = ac.exp(g) * s
        s = s + k * (beta * (v - ac.dot(s, k, "K")))
        return s, ac.dot(s, q, "K") * ac.rsqrt("K")

    args, pool = delta(2, 100, torch.bfloat16), torch.randn(3, 4, 128, 128, device=DEVICE)
    mirror = pool.transpose(2, 3).contiguous()
    o = turned(*args, s=ac.StatePool(mirror, int32([2, 0])), backend="triton")
    want = GDR(*args, s=ac.StatePool(pool, int32([2, 0])), backend="triton")
    assert (o.float() - want.float()).abs().max() < 2e-2
    assert (mirror.transpose(2, 3) - pool).abs().max() < 2e-2
    assert torch.equal(mirror[1].transpose(1, 2), pool[1])


def test_slots_past_two_to_the_31():
    # 2**31 elements at slot 4096
    pool = torch.zeros(4200, 32, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    slots = int32([4199, 4097])
    args = delta(2, 1, torch.bfloat16, heads=32)
    GDR.decode(*args, s=ac.StatePool(pool, slots), backend="triton")
    s, _ = GDR.decode(*args, backend="triton")
    assert (pool[slots.long()].float() - s).abs().max() < 2e-2
    assert s.abs().max() > 0.1
    assert not pool[:4097].any() and not pool[4098:4199].any()


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_captured_step_replays_with_other_slots(tokens):
    pool = torch.randn(40, 4, 128, 128, device=DEVICE)
    slots, out = int32([0, 1, 2]), torch.arange(3 * tokens, device=DEVICE).int().view(3, tokens) + 3
    args = delta(3, tokens, torch.bfloat16)
    o = torch.empty_like(args[2])
    view = ac.StatePool(pool, slots, out)
    graph = captured(lambda: GDR.decode(*args, s=view, out=o, backend="triton"))
    for seed, start in enumerate(([5, -1, 30], [31, 32, -1])):
        slots.copy_(torch.tensor(start))
        free = [i for i in range(30) if i not in start]
        order = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))[
            : 3 * tokens
        ]
        out.copy_(torch.tensor(free)[order].view(3, tokens))
        call, _ = bind(GDR.declaration, on_cpu(args), on_cpu({"s": view}))
        exact, each = reference_results(call)
        rough = pool.clone()
        rough_o = eager(GDR, args, {"s": ac.StatePool(rough, slots, out)})["o"]
        before = pool.clone()
        o.fill_(torch.nan)
        graph.replay()
        assert_close(o, exact["o"], rough_o, o.dtype, "o")
        for b, t in itertools.product(range(3), range(tokens)):
            slot = int(out[b, t])
            assert_close(pool[slot], each["s"][b, t], rough[slot], pool.dtype, f"slot {slot}")
        others = [i for i in range(40) if i not in out.flatten().tolist()]
        assert torch.equal(pool[others], before[others])


def test_checks_on_request_find_bad_slots_and_pages_and_nothing_is_written(monkeypatch):
    monkeypatch.setenv("ATTNCC_CHECK", "1")
    pool = torch.zeros(4, 4, 128, 128, device=DEVICE)
    args = delta(2, 1, torch.bfloat16)
    for slots in ([1, 1], [0, 4], [-2, 0]):
        with pytest.raises(errors.SlotError):
            GDR.decode(*args, s=ac.StatePool(pool, int32(slots)), backend="triton")
    assert not pool.any()
    cache = paged([3, 500], 640, 16, torch.bfloat16)
    before = {n: t.clone() for n, t in cache.pages.items()}
    for table in (cache.block_table[[0, 0]], cache.block_table + 1000, cache.block_table[:, :8]):
        wrong = ac.PagedCache(cache.pages, table.contiguous(), cache.lengths)
        with pytest.raises(errors.PageError):
            ATTENTION.decode(*qkv(2, 1, dtype=torch.bfloat16), wrong, backend="triton")
    assert all(
        torch.equal(before[n].nan_to_num(9), t.nan_to_num(9)) for n, t in cache.pages.items()
    )
