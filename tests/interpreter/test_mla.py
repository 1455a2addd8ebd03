"""Latent attention's generated kernels in Triton's interpreter, against the fp64 meaning."""

import itertools

import pytest
import torch

import attncc as ac
from attncc.runtime import stages
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from attncc.runtime.reference import run_reference
from attncc.runtime.sources import call_sources
from attncc.runtime.trial import compare, trial_call
from tests.mla_ops import MLA, forced, scale, tensors
from tests.tolerance import assert_close

SMALL = {"H": 3, "D": 16, "P": 16, "R": 32, "V": 16}
WIDE = {"H": 40, "D": 16, "P": 16, "R": 512, "V": 16}
BF16 = torch.bfloat16


def check(form, named, phase="decode", **kwargs):
    """Outputs and lse within the contract; results are NaN before."""
    given = {**named, **kwargs, "return_lse": True}
    call, _ = bind(MLA.declaration, (), given)
    exact = run_reference(call)
    cache = kwargs.get("cache")
    copy = {"cache": copied(cache)} if cache is not None else {}
    rough, _ = bind(MLA.declaration, (), {**given, **copy})
    with forced(form):
        stages.run_eager(rough, stages.association_of(rough, phase), rounded=True)
    for tensor in (*call.outputs.values(), call.lse):
        tensor.fill_(torch.nan)
    with forced(form):
        stages.run(call, phase, "triton")
    assert_close(call.outputs["o"], exact["o"], rough.outputs["o"], call.dtype, "o")
    assert_close(call.lse, exact["lse"], rough.lse, torch.float32, "lse")
    if cache is not None:
        for name, held in cache.tensors.items():
            want = copy["cache"].tensors[name]
            assert torch.equal(held.float().nan_to_num(99), want.float().nan_to_num(99)), name


def copied(cache):
    """The same cache in other memory."""
    held = {n: t.clone() for n, t in cache.tensors.items()}
    if isinstance(cache, ac.PagedCache):
        return ac.PagedCache(held, cache.block_table, cache.lengths.clone())
    return ac.DenseCache(held, cache.lengths.clone())


def filled(sizes, held, capacity, page, dtype):
    """A cache with random rows where tokens are held, NaN elsewhere."""
    full = {"B": len(held), "R": sizes["R"], "P": sizes["P"]}
    if page is None:
        cache = ac.DenseCache.allocate(MLA, sizes=full, capacity=capacity, dtype=dtype)
    else:
        cache = ac.PagedCache.allocate(MLA, sizes=full, capacity=capacity, page=page, dtype=dtype)
        cache.block_table.copy_(cache.block_table.flip(0))
    for i, t in enumerate(cache.tensors.values()):
        t.fill_(torch.nan)
        for b, n in enumerate(held):
            new = torch.randn(n, t.shape[-1], generator=torch.Generator().manual_seed(9 * b + i))
            for at in range(n):
                row = t[b, at] if page is None else t[cache.block_table[b, at // page], at % page]
                row.copy_(new[at])
    cache.lengths.copy_(torch.tensor(held))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_a_prompt(form, dtype):
    check(form, tensors(1, 1, 20, 37, SMALL, dtype), "prefill", scale=scale(SMALL))


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_packed_steps_over_a_cache(form, page):
    counts, held = [1, 0, 3], [20, 5, 0]
    cache = filled(SMALL, held, 32, page, BF16)
    total = sum(counts)
    named = tensors(2, 1, total, total, SMALL, BF16)
    for name in ("q_nope", "q_rope", "c", "r"):
        named[name] = named[name][0]
    cu = torch.tensor([0, *itertools.accumulate(counts)])
    check(form, named, scale=scale(SMALL), cache=cache, cu_seqlens=cu)


@pytest.mark.parametrize("page", [None, 64])
def test_two_warpgroups_share_the_columns_of_a_wide_value(page):
    cache = filled(WIDE, [90], 128, page, BF16)
    named = tensors(3, 1, 2, 2, WIDE, BF16)  # 80 rows: two tiles, the second not full
    check("absorbed", named, scale=scale(WIDE), cache=cache)


def test_the_wide_tile_is_turned():
    named = tensors(3, 1, 2, 2, WIDE, BF16)
    call, _ = bind(MLA.declaration, (), {**named, "scale": 1.0})
    with forced("absorbed"):
        [whole, split, *merges] = call_sources(call, "decode", "sm_90")
    assert whole.plan.turned and split.plan.turned
    assert [m.plan.phase for m in merges] == ["merge", "merge_4", "merge_16"]


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_the_trial_of_a_fold_judges_it_by_what_it_sees(form):
    cache = filled(SMALL, [20, 5], 64, 16, BF16)
    named = tensors(6, 2, 1, 1, SMALL, BF16)
    call, _ = bind(MLA.declaration, (), {**named, "scale": 0.25, "cache": cache})
    with forced(form):
        fold = stages.fold_of(call, "decode")
    found = compare(trial_call(fold, "cpu"), spec_of(fold), "decode")
    assert {f.output for f in found} >= {"o"} and all(f.judged.right for f in found), found


def test_weights_that_want_gradients_get_no_half_of_one():
    named = tensors(7, 1, 2, 9, SMALL, BF16)
    want = {n: t.clone().requires_grad_() for n, t in named.items()}
    for form in ("absorbed", "expanded"):
        with forced(form):
            got = MLA(**want, scale=0.25, backend="triton")
            assert not got.requires_grad
            assert torch.equal(got, MLA(**named, scale=0.25, backend="triton"))


def test_recorded_calls_do_their_products_again():
    named = tensors(4, 2, 1, 1, SMALL, BF16)
    for form in ("absorbed", "expanded"):
        cache = filled(SMALL, [7, 3], 32, 16, BF16)
        other = copied(cache)
        with forced(form):
            prepared = MLA.prepare(**named, scale=0.25, cache=cache, phase="decode")
            fresh = tensors(5, 2, 1, 1, SMALL, BF16)
            got = prepared(**{n: fresh[n] for n in ("q_nope", "q_rope", "c", "r", "wuk", "wuv")})
            MLA.decode(**named, scale=0.25, cache=other)
            want = MLA.decode(**fresh, scale=0.25, cache=other)
        assert torch.equal(got, want), form
        assert cache.lengths.tolist() == other.lengths.tolist() == [9, 5]
