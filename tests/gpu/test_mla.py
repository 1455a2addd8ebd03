"""Latent attention on the GPU: both orders, caches, graphs, held to the contract."""

import itertools

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import BackendError
from attncc.runtime import stages
from attncc.runtime.bind import bind
from tests.gpu.checking import DEVICE, offsets
from tests.mla_ops import FORMS, MLA, REAL, forced, scale, tensors
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
FULL = {**REAL, "H": 128}
BF16 = torch.bfloat16
BACKENDS = ["triton", pytest.param("gluon", marks=pytest.mark.gluon)]


@pytest.fixture(autouse=True)
def _on_hopper(request):
    named = getattr(request.node, "callspec", None)
    gluon = named is not None and named.params.get("backend") == "gluon"
    if gluon and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")


def check(form, named, phase="decode", other=None, backend="triton", **kwargs):
    """One call within the contract, with its lse where the backend writes it.

    ``other`` is a copy of its cache for the eager reference.
    """
    lse = backend != "gluon"
    given = {**named, **kwargs, "return_lse": lse}
    exact = MLA.reference(**given)
    rough, _ = bind(MLA.declaration, (), {**given, **({} if other is None else {"cache": other})})
    call, _ = bind(MLA.declaration, (), given)
    out = torch.full_like(call.outputs["o"], torch.nan)
    with forced(form):
        stages.run_eager(rough, stages.association_of(rough, phase), rounded=True)
        got = getattr(MLA, phase)(**given, out=out, backend=backend)
    o, wanted = (got.o, exact.o) if lse else (got, exact)
    assert_close(o, wanted, rough.outputs["o"], o.dtype, f"{form} o")
    if lse:
        assert_close(got.lse, exact.lse, rough.lse, torch.float32, f"{form} lse")


def cache_of(sizes, held, capacity, page=None):
    """A cache and its copy: random rows where tokens are held, NaN elsewhere, pages permuted."""
    full = {"B": len(held), "R": sizes["R"], "P": sizes["P"]}
    if page is None:
        cache = ac.DenseCache.allocate(MLA, sizes=full, capacity=capacity, device=DEVICE)
    else:
        cache = ac.PagedCache.allocate(MLA, sizes=full, capacity=capacity, page=page, device=DEVICE)
        order = torch.randperm(cache.block_table.numel(), device=DEVICE).int()
        cache.block_table.copy_(order.view(cache.block_table.shape))
    for t in cache.tensors.values():
        t.fill_(torch.nan)
        for b, n in enumerate(held):
            new = torch.randn(n, t.shape[-1], device=DEVICE, dtype=t.dtype)
            if page is None:
                t[b, :n] = new
                continue
            at = torch.arange(n, device=DEVICE)
            t[cache.block_table[b].long()[at // page], at % page] = new
    cache.lengths.copy_(torch.tensor(held))
    copies = {n: t.clone() for n, t in cache.tensors.items()}
    if page is None:
        return cache, ac.DenseCache(copies, cache.lengths.clone())
    return cache, ac.PagedCache(copies, cache.block_table, cache.lengths.clone())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [1, 16, 40, 128])
@pytest.mark.parametrize(("batch", "history"), [(1, 1), (1, 3000), (3, 65), (20, 700), (70, 130)])
def test_a_step_over_whole_histories(heads, batch, history, backend):
    sizes = {**REAL, "H": heads}
    named = tensors(1, batch, 1, history, sizes, BF16, DEVICE)
    check("absorbed", named, scale=scale(sizes), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "heads"), [(2, 128), (5, 40), (16, 16)])
def test_several_tokens_over_whole_histories(tokens, heads, backend):
    sizes = {**REAL, "H": heads}
    for history in (tokens, 64, 129, 2000):
        named = tensors(1, 2, tokens, history, sizes, BF16, DEVICE)
        check("absorbed", named, scale=scale(sizes), backend=backend)


@pytest.mark.gluon
@pytest.mark.parametrize("backend", ["gluon"])
def test_fp16_by_specialised_warps(backend):
    sizes = {**REAL, "H": 64}
    named = tensors(2, 3, 1, 500, sizes, torch.float16, DEVICE)
    check("absorbed", named, scale=scale(sizes), backend=backend)


@pytest.mark.gluon
@pytest.mark.parametrize("backend", ["gluon"])
def test_specialised_warps_are_refused_where_an_lse_is_wanted(backend):
    named = tensors(2, 3, 1, 500, FULL, BF16, DEVICE)
    wanted = {**named, "scale": scale(FULL), "return_lse": True}
    with forced("absorbed"), pytest.raises(BackendError, match="it writes no lse: a score of"):
        MLA.decode(**wanted, backend=backend)
    check("absorbed", named, scale=scale(FULL), backend="auto")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    named = tensors(2, 2, 1, 200, REAL, dtype, DEVICE)
    check("absorbed", named, scale=scale(REAL))
    prompt = tensors(2, 1, 90, 90, REAL, dtype, DEVICE)
    check("expanded", prompt, "prefill", scale=scale(REAL))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (33, 0), (300, 0), (70, 200)])
def test_a_prompt(form, tokens, past):
    named = tensors(3, 2, tokens, tokens + past, REAL, BF16, DEVICE)
    check(form, named, "prefill", scale=scale(REAL))


@pytest.mark.parametrize("page", [None, 16, 64])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("form", "backend"), [
    *((form, "triton") for form in FORMS),
    pytest.param("absorbed", "gluon", marks=pytest.mark.gluon),
])  # fmt: skip
def test_steps_over_a_cache(form, tokens, page, backend):
    cache, other = cache_of(FULL, [700, 0, 129], 1024, page)
    named = tensors(4, 3, tokens, tokens, FULL, BF16, DEVICE)
    check(form, named, scale=scale(FULL), cache=cache, other=other, backend=backend)
    assert cache.lengths.tolist() == [700 + tokens, tokens, 129 + tokens]
    for name, held in cache.tensors.items():
        assert torch.equal(held.nan_to_num(99), other.tensors[name].nan_to_num(99)), name


@pytest.mark.parametrize("form", FORMS)
def test_packed_prompts_and_steps_in_one_call(form):
    counts, held = [1, 40, 0, 2], [300, 0, 5, 64]
    cache, other = cache_of(FULL, held, 512, 64)
    total = sum(counts)
    named = tensors(5, 1, total, total, FULL, BF16, DEVICE)
    named |= {n: named[n][0] for n in ("q_nope", "q_rope", "c", "r")}
    check(
        form, named, "prefill", scale=scale(FULL), cache=cache, other=other,
        cu_seqlens=offsets(counts),
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_longest_history_of_the_benchmark(backend):
    named = tensors(6, 1, 1, 32768, FULL, BF16, DEVICE)
    check("absorbed", named, scale=scale(FULL), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_step_follows_its_cache(backend):
    cache, other = cache_of(FULL, [100, 63], 256, 64)
    named = tensors(7, 2, 1, 1, FULL, BF16, DEVICE)
    out = torch.empty(2, 1, 128, 128, device=DEVICE, dtype=BF16)

    def step(to):
        return MLA.decode(**named, scale=scale(FULL), cache=to, out=out, backend=backend)

    warm, _ = cache_of(FULL, [100, 63], 256, 64)
    for _ in range(3):
        step(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(cache)
    cache.lengths.copy_(torch.tensor([100, 63]))
    for turn in range(3):
        fresh = tensors(8 + turn, 2, 1, 1, FULL, BF16, DEVICE)
        for name, t in named.items():
            t.copy_(fresh[name])
        graph.replay()
        got = out.clone()
        assert torch.equal(got, step(other)), turn
    assert cache.lengths.tolist() == other.lengths.tolist() == [103, 66]


@pytest.mark.parametrize(("form", "backend"), [
    *((form, "triton") for form in FORMS),
    pytest.param("absorbed", "gluon", marks=pytest.mark.gluon),
])  # fmt: skip
def test_repeated_and_prepared_calls_are_the_first_one_again(form, backend):
    named = tensors(11, 2, 2, 300, FULL, BF16, DEVICE)
    with forced(form):
        outs = [MLA(**named, scale=scale(FULL), backend=backend) for _ in range(4)]
        prepared = MLA.prepare(**named, scale=scale(FULL), backend=backend)
        outs.append(prepared(**named))
    assert all(torch.equal(outs[0], o) for o in outs[1:])


def test_any_cut_of_a_sequence_gives_the_same():
    named = tensors(12, 2, 150, 150, FULL, BF16, DEVICE)
    own = ("q_nope", "q_rope", "c", "r")
    exact = MLA.reference(**named, scale=scale(FULL))
    call, _ = bind(MLA.declaration, (), {**named, "scale": scale(FULL)})
    with forced("absorbed"):
        stages.run_eager(call, stages.association_of(call, "decode"), rounded=True)
    for cuts, forms in (((149, 1), FORMS), ((1, 64, 3, 82), [*FORMS, *FORMS])):
        cache, _ = cache_of(FULL, [0, 0], 256, 64)
        outs = []
        for first, count, form in zip(itertools.accumulate((0, *cuts)), cuts, forms, strict=False):
            part = {n: t[:, first : first + count] if n in own else t for n, t in named.items()}
            with forced(form):
                outs.append(MLA(**part, scale=scale(FULL), cache=cache, backend="triton"))
        assert_close(torch.cat(outs, 1), exact, call.outputs["o"], BF16)
