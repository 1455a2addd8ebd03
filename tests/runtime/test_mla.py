"""Latent attention: both orders of its contractions are the declaration's meaning."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncc as ac
from attncc.codegen import printers
from attncc.dsl.errors import (
    ArgumentError,
    BackendError,
    CacheError,
    MissingArtifactError,
    RefusedError,
)
from attncc.runtime import backends, softmax, stages, tolerance
from attncc.runtime.bind import bind
from attncc.runtime.sources import call_sources
from tests.codegen.test_associate import rectified
from tests.mla_ops import FORMS, MLA, REAL, TINY, forced, scale, tensors
from tests.strategies import cuts, randn, seeds
from tests.tolerance import assert_close, max_error

PROPERTY = settings(max_examples=25)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn_sizes() -> st.SearchStrategy[dict[str, int]]:
    """Head dims that are no powers of two among them."""
    return st.fixed_dictionaries({a: st.sampled_from([1, 3, 8, 12]) for a in "HDPRV"})


def cache_of(sizes, batch, capacity, page=None, **options):
    """An empty cache, every row NaN: what nobody appended must not be read."""
    kind = ac.DenseCache if page is None else ac.PagedCache
    pages = {} if page is None else {"page": page}
    full = {"B": batch, "R": sizes["R"], "P": sizes["P"]}
    cache = kind.allocate(MLA, sizes=full, capacity=capacity, **pages, **options)
    for tensor in cache.tensors.values():
        if tensor.dtype.is_floating_point and tensor.element_size() > 1:
            tensor.fill_(torch.nan)
    return cache


def rows(named, at):
    """The inputs with some tokens of the activations and histories."""
    own = {"q_nope", "q_rope", "c", "r"}
    return {n: t[:, at] if n in own else t for n, t in named.items()}


# --- against the interpreter


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
@PROPERTY
def test_both_orders_are_the_meaning(dtype, data):
    sizes, seed = data.draw(drawn_sizes()), data.draw(seeds())
    tokens, past = data.draw(st.sampled_from([0, 1, 2, 17])), data.draw(st.sampled_from([0, 1, 40]))
    named = tensors(seed, data.draw(st.integers(0, 2)), tokens, tokens + past, sizes, dtype)
    exact = MLA.reference(**named, scale=scale(sizes), return_lse=True)
    call, _ = bind(MLA.declaration, (), {**named, "scale": scale(sizes), "return_lse": True})
    backends.run_eager(call, backends.analyse(call.program))  # the contraction as it stands
    for form in FORMS:
        with forced(form):
            got = MLA(**named, scale=scale(sizes), return_lse=True, backend="torch")
        assert_close(got.o, exact.o, call.outputs["o"], dtype, f"{form} o")
        # One score's terms may all but cancel: its error is small beside them, not beside it.
        terms = MLA.reference(
            **{n: t.abs() for n, t in named.items()}, scale=scale(sizes), return_lse=True
        )
        near = max_error(call.lse, exact.lse, "eager lse")
        bound = tolerance.allowed(near, tolerance.largest(terms.lse), torch.float32)
        assert max_error(got.lse, exact.lse, f"{form} lse") <= bound


@pytest.mark.parametrize("form", FORMS)
def test_real_dims(form):
    named = tensors(1, 2, 3, 70, REAL, torch.bfloat16)
    exact = MLA.reference(**named, scale=scale(REAL))
    with forced(form):
        got = MLA(**named, scale=scale(REAL), backend="torch")
    assert max_error(got, exact) <= 2.0**-8 * float(exact.abs().max())


def test_the_order_is_that_of_the_call():
    def before(tokens, keys, phase):
        named = tensors(2, 1, tokens, keys, REAL)
        call, _ = bind(MLA.declaration, (), {**named, "scale": 1.0})
        return [p.name for p in stages.association_of(call, phase).before]

    assert before(1, 300, "decode") == ["q_nope_wuk"]
    assert before(4, 300, "decode") == ["q_nope_wuk"]
    assert before(512, 512, "prefill") == ["c_wuk", "c_wuv"]


def test_the_scale_is_given():
    named = tensors(3, 1, 1, 5, TINY)
    with pytest.raises(ArgumentError, match="scale"):
        MLA(**named)
    uniform = MLA(**named, scale=0)
    want = torch.einsum("bsr,hvr->bhv", named["c"], named["wuv"]) / 5
    assert torch.allclose(uniform[:, 0], want, atol=1e-6)


def test_rows_that_see_nothing_are_empty():
    named = tensors(4, 1, 4, 2, TINY)
    for form in FORMS:
        with forced(form):
            got = MLA(**named, scale=1.0, return_lse=True)
        assert bool((got.o[:, :2] == 0).all()) and bool((got.lse[:, :2] == -torch.inf).all())
        assert bool(got.lse[:, 2:].isfinite().all())


def test_partials_of_two_parts_of_a_history_merge():
    named = tensors(5, 2, 1, 30, TINY)
    whole = MLA.reference(**named, scale=0.3)
    first, last = rows(named, slice(0, 12)), rows(named, slice(12, 30))
    for form in FORMS:
        parts = []
        for part in (first, last):
            own = {**part, "q_nope": named["q_nope"], "q_rope": named["q_rope"]}
            with forced(form):
                parts.append(MLA(**own, scale=0.3, return_partial=True))
        assert parts[0].o.dtype == torch.float32
        assert max_error(ac.merge(parts).o, whole) < 1e-6


@ac.op(out="B T M")
def projected(
    q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H E"), wo=ac.Param("H E M"),
):  # fmt: skip
    """Heads close behind the fold: no other order exists."""
    weights = ac.softmax(ac.dot(q, k, "D") * ac.rsqrt("D"), "S", where=ac.causal)
    return ac.dot(weights, v, wo, "S H E")


@pytest.mark.parametrize("packed", [False, True])
def test_a_product_behind_the_fold_may_close_its_rows(packed):
    q, k, v = (randn(i, 1, 6, 3, 8).float() for i in range(3))
    wo, options = randn(3, 3, 8, 5).float(), {"return_lse": True}
    if packed:
        q, k, v = q[0], k[0], v[0]
        options["cu_seqlens"] = torch.tensor([0, 2, 6])
    exact = projected.reference(q, k, v, wo, **options)
    got = projected(q, k, v, wo, **options, backend="torch")
    assert got.lse.shape == exact.lse.shape == q.shape[:-1]
    assert max_error(got.o, exact.o) < 4e-6 and max_error(got.lse, exact.lse) < 4e-6


@pytest.mark.parametrize("form", FORMS)
def test_the_torch_lowering_has_gradients_through_its_products(form):
    drawn = tensors(11, 1, 3, 5, TINY)
    named = {n: t.clone().requires_grad_() for n, t in drawn.items()}
    plain = {n: t.double().requires_grad_() for n, t in drawn.items()}
    with forced(form):
        MLA(**named, scale=0.3, backend="torch").sum().backward()
    score = torch.einsum("bthd,hdr,bsr->bths", plain["q_nope"], plain["wuk"], plain["c"])
    score = score + torch.einsum("bthp,bsp->bths", plain["q_rope"], plain["r"])
    seen = torch.arange(5) <= torch.arange(3)[:, None] + 2
    p = (score * 0.3).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    torch.einsum("bths,bsr,hvr->bthv", p, plain["c"], plain["wuv"]).sum().backward()
    for name, t in named.items():
        error, largest = max_error(t.grad, plain[name].grad), float(plain[name].grad.abs().max())
        assert error < 4e-6 * max(largest, 1), name


@ac.op(out="B T H V")
def twice(
    q=ac.Activation("B T H D"), w=ac.Param("H D R"), c=ac.Cache("B S R"), e=ac.Cache("B S D"),
    v=ac.Cache("B S V"),
):  # fmt: skip
    """The same two tensors are summed over other axes in each score; one has R alone."""
    score = ac.dot(q, w, c, "D R") + ac.dot(q, w, e, "D R")
    return ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")


def test_two_products_of_the_same_tensors_are_told_apart():
    shapes = {"q": (1, 3, 2, 8), "w": (2, 8, 8), "c": (1, 9, 8), "e": (1, 9, 8), "v": (1, 9, 4)}
    named = {n: randn(i, *shape).float() / 3 for i, (n, shape) in enumerate(shapes.items())}
    call, _ = bind(twice.declaration, (), named)
    found = stages.association_of(call, "prefill").before
    assert {p.over for p in found} == {("D",), ("R",)} and len({p.name for p in found}) == 2
    assert max_error(twice(**named, backend="torch"), twice.reference(**named)) < 2e-6


def test_results_may_be_given_and_strided():
    named = tensors(6, 2, 3, 9, TINY)
    room = torch.full((2, 3, 6, 6), torch.nan)
    for form in FORMS:
        with forced(form):
            MLA(**named, scale=1.0, out=room[:, :, ::2])
            assert torch.equal(room[:, :, ::2], MLA(**named, scale=1.0))
    assert bool(room[:, :, 1::2].isnan().all())


def test_a_weight_may_be_part_of_the_joint_projection():
    named = tensors(7, 1, 2, 9, TINY)
    joint = torch.cat([named["wuk"], named["wuv"]], 1)  # [H, D + V, R], as checkpoints have it
    split = {**named, "wuk": joint[:, : TINY["D"]], "wuv": joint[:, TINY["D"] :]}
    for form in FORMS:
        with forced(form):
            assert torch.equal(MLA(**split, scale=1.0), MLA(**named, scale=1.0))


# --- caches


@pytest.mark.parametrize("page", [None, 1, 4])
@pytest.mark.parametrize("form", FORMS)
@given(st.data())
@settings(max_examples=12)
def test_any_cut_of_the_tokens_gives_the_same(form, page, data):
    total, seed = data.draw(st.integers(1, 20)), data.draw(seeds())
    named = tensors(seed, 2, total, total, TINY)
    whole = MLA.reference(**named, scale=scale(TINY), return_lse=True)
    cache = cache_of(TINY, 2, total + 3, page, dtype=torch.float32)
    at, outs, logs = 0, [], []
    for count in data.draw(cuts(total)):
        with forced(form):
            got = MLA.decode(
                **rows(named, slice(at, at + count)), scale=scale(TINY), cache=cache,
                return_lse=True, backend="torch",
            )  # fmt: skip
        outs.append(got.o)
        logs.append(got.lse)
        at += count
    assert cache.lengths.tolist() == [total] * 2
    assert max_error(torch.cat(outs, 1), whole.o) < 2e-6 * max(float(whole.o.abs().max()), 1)
    assert max_error(torch.cat(logs, 1), whole.lse) < 4e-6 * max(float(whole.lse.abs().max()), 1)


@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_of_any_length_over_a_cache(form, page):
    held, counts = [5, 0, 9], [1, 4, 0]
    total = [a + b for a, b in zip(held, counts, strict=True)]
    each = [tensors(10 * b, 1, n, n, TINY) for b, n in enumerate(total)]
    weights = {n: each[0][n] for n in ("wuk", "wuv")}
    cache = cache_of(TINY, 3, 16, page, dtype=torch.float32)
    for first, last in ((None, held), (held, total)):
        spans = [slice(a, b) for a, b in zip(first or [0] * 3, last, strict=True)]
        cu = torch.tensor([0, *itertools.accumulate(s.stop - s.start for s in spans)])
        parts = {
            n: torch.cat([x[n][0, s] for x, s in zip(each, spans, strict=True)])
            for n in ("q_nope", "q_rope", "c", "r")
        }
        with forced(form):
            got = MLA(**parts, **weights, scale=0.4, cache=cache, cu_seqlens=cu, backend="torch")
    wanted = [
        MLA.reference(**{**x, **weights}, scale=0.4)[0, a:] for x, a in zip(each, held, strict=True)
    ]
    assert max_error(got, torch.cat(wanted)) < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_without_a_cache(form):
    lengths = [4, 0, 7]
    each = [tensors(10 * b, 1, n, n, TINY) for b, n in enumerate(lengths)]
    weights = {n: each[0][n] for n in ("wuk", "wuv")}
    names = ("q_nope", "q_rope", "c", "r")
    parts = {n: torch.cat([x[n][0] for x in each]) for n in names}
    cu = torch.tensor([0, 4, 4, 11])
    with forced(form):
        got = MLA(**parts, **weights, scale=0.4, cu_seqlens=cu, backend="torch")
    wanted = [MLA.reference(**{**x, **weights}, scale=0.4)[0] for x in each]
    assert max_error(got, torch.cat(wanted)) < 2e-6


def test_a_quantised_latent_is_absorbed_whatever_the_lengths():
    cache = cache_of(TINY, 1, 64, dtype=ac.Quantised(), device="cpu")
    named = tensors(8, 1, 40, 40, TINY)
    call, _ = bind(MLA.declaration, (), {**named, "scale": 0.3, "cache": cache})
    for phase in ("decode", "prefill"):
        found = stages.association_of(call, phase)
        assert not found.read_before(call.program)
    exact = MLA.reference(**named, scale=0.3, cache=cache)  # reads what will be stored
    got = MLA(**named, scale=0.3, cache=cache, backend="torch")
    assert max_error(got, exact) < 4e-6


@pytest.mark.parametrize("page", [None, 16])
def test_of_two_histories_one_may_be_quantised(page):
    sizes = {**TINY, "P": 32}
    storage = {"c": torch.float32, "r": ac.Quantised()}
    cache = cache_of(sizes, 1, 64, page, dtype=storage, device="cpu")
    named = tensors(8, 1, 40, 40, sizes)
    call, _ = bind(MLA.declaration, (), {**named, "scale": 0.3, "cache": cache})
    with forced("expanded"):
        found = stages.association_of(call, "prefill").read_before(call.program)
        assert found == (frozenset() if page else {"c"})
        fold = stages.fold_of(call, "prefill")
        assert [s.text for s in call_sources(call, "prefill", "sm_90")]
        assert (fold.block_table is None) == (page is None)
        exact = MLA.reference(**named, scale=0.3, cache=cache)
        got = MLA(**named, scale=0.3, cache=cache, backend="torch")
    assert max_error(got, exact) < 4e-6


def test_a_call_without_room_writes_nothing():
    for form in FORMS:
        cache = cache_of(TINY, 2, 3, dtype=torch.float32)
        named = tensors(9, 2, 4, 4, TINY)
        with forced(form), pytest.raises(CacheError):
            MLA(**named, scale=1.0, cache=cache)
        assert all(bool(t.isnan().all()) for t in cache.tensors.values())
        assert cache.lengths.tolist() == [0, 0]


# --- what is launched, and what is refused


def test_the_kernels_of_a_call_are_those_of_its_order():
    def phases(form, **options):
        named = tensors(1, 1, 2, 2, REAL, torch.bfloat16)
        call, _ = bind(MLA.declaration, (), {**named, "scale": 1.0, **options})
        with forced(form):
            return [s.plan.phase for s in call_sources(call, "decode", "sm_90")]

    usual = ["decode", "decode_split", "merge", "merge_4", "merge_16"]
    assert phases("absorbed") == usual
    cache = cache_of(REAL, 1, 32, 16)
    assert phases("absorbed", cache=cache) == ["append", *usual]
    assert phases("expanded", cache=cache)[:2] == ["append", "decode"]


def test_a_fold_that_cannot_be_printed_is_refused_before_a_cache_is_written(monkeypatch):
    """The rows that products read are appended first, by a kernel of their own."""
    usual, appended = printers.printer, []

    def no_text(plan):
        raise RefusedError("no text for it")

    def printer(template):
        return no_text if "softmax_tiled" in template else usual(template)

    sizes = {**TINY, "V": 5}  # no other test has printed these
    cache = cache_of(sizes, 1, 8, dtype=torch.float32)
    named = tensors(3, 1, 2, 2, sizes)
    monkeypatch.setattr(printers, "printer", printer)
    monkeypatch.setattr(backends, "has_triton", lambda call: True)
    monkeypatch.setattr(stages, "_append", lambda call, phase: appended.append(call))
    with forced("expanded"), pytest.raises(BackendError, match="no text for it"):
        MLA(**named, scale=1.0, cache=cache, backend="triton")
    assert not appended


def test_a_missing_artifact_is_found_out_before_a_cache_is_written(monkeypatch, tmp_path):
    appended = []
    monkeypatch.setenv("ATTNCC_EXPECT_HIT", "1")
    monkeypatch.setenv("ATTNCC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(backends, "has_triton", lambda call: True)
    monkeypatch.setattr(softmax, "append_rows", lambda call, kernel: appended.append(call))
    sizes = {**TINY, "V": 7}
    with forced("absorbed"), pytest.raises(MissingArtifactError):
        MLA(
            **tensors(3, 1, 2, 2, sizes), scale=1.0, backend="triton",
            cache=cache_of(sizes, 1, 8, dtype=torch.float32),
        )  # fmt: skip
    assert not appended


def test_no_possible_order_is_an_error_before_anything_is_written():
    q, c, w = randn(0, 1, 2, 3, 8).float(), randn(1, 1, 2, 4).float(), randn(2, 3, 8, 4).float()
    out = torch.full((1, 2, 3, 4), torch.nan)
    with pytest.raises(RefusedError, match="no order of this contraction"):
        rectified(q, c, w, out=out)
    assert bool(out.isnan().all())
    exact = rectified.reference(q, c, w)
    assert torch.allclose(rectified(q, c, w, backend="reference").double(), exact, atol=1e-6)
