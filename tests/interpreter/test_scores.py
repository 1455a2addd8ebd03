"""The breadth of scores: generated kernels in Triton's interpreter, against the fp64 meaning."""

import dataclasses

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.runtime import softmax
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from tests import score_ops as ops
from tests.interpreter.test_softmax import check
from tests.strategies import randn

ONE_SOFTMAX = {"shared_prefix", "indexed", "relative", "dilated", "prefix_lm", "prefix_of",
               "documents", "by_importance", "forgetting"}  # fmt: skip


@pytest.mark.parametrize("name", list(ops.CASES))
def test_prefill_and_decode(name):
    for tokens, history, phase, splits in ((40, 75, "prefill", 1), (2, 150, "decode", 2)):
        args = ops.arguments(name, 2, tokens, history, torch.bfloat16)
        check(ops.CASES[name][0], phase=phase, splits=splits, lse=name in ONE_SOFTMAX, **args)


def documents_of(lengths, batch=1):
    """Which document each position belongs to."""
    found = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return found.int().expand(batch, -1).contiguous()


@pytest.mark.parametrize("splits", [1, 3])
def test_blocks_of_other_documents_are_never_touched(splits):
    args = ops.arguments("documents", 1, 70, 512, torch.bfloat16)
    args["document"] = documents_of([384, 128])
    call = check(ops.documents, splits=splits, **args)
    clean = call.outputs["o"].clone()
    args["v"][:, :384] = torch.nan  # weight 0 times NaN would be NaN
    call, _ = bind(ops.documents.declaration, (), args)
    form = analyse(call.program).softmax
    softmax.run(call, form, spec_of(call), "prefill", splits=splits)
    assert torch.equal(call.outputs["o"], clean)


def test_documents_of_many_blocks_in_any_order():
    args = ops.arguments("documents", 2, 300, 300, torch.float16)
    args["document"] = documents_of([70, 3, 90, 137], 2)
    args["document"][1] = args["document"][1].flip(0)
    args["document"][1, 200:240] = 2  # a document in two pieces
    check(ops.documents, **args)


def test_documents_in_packed_sequences_and_caches():
    lengths = [0, 150, 70, 0]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    args = {n: x[0] for n, x in ops.arguments("documents", 1, 220, 220, torch.bfloat16).items()}
    args["document"] = documents_of([100, 50, 10, 60])[0].contiguous()
    check(ops.documents, cu_seqlens=cu, **args)
    held = ops.arguments("documents", 2, 1, 200, torch.bfloat16)
    held["document"] = documents_of([90, 110], 2)
    cache = ac.DenseCache(
        {n: held[n].clone() for n in ("k", "v", "document")}, torch.tensor([150, 60]).int()
    )
    new = ops.arguments("documents", 2, 40, 40, torch.bfloat16)
    new["document"] = torch.ones(2, 40).int()
    check(ops.documents, cache=cache, **new)


def test_sums_between_key_and_query_over_many_blocks_and_splits():
    for splits in (1, 3):
        args = ops.arguments("forgetting", 1, 150, 230, torch.float16)
        check(ops.forgetting, splits=splits, **args)
    cu = torch.tensor([0, 30, 30, 150])
    args = {n: x[0] for n, x in ops.arguments("forgetting", 1, 150, 150, torch.float16).items()}
    check(ops.forgetting, cu_seqlens=cu, splits=2, **args)


@pytest.mark.parametrize("name", ["forgetting", "documents"])
def test_scores_of_a_history_in_pages(name):
    op, dtypes = ops.CASES[name][0], {"f": torch.float32, "document": torch.int32}
    cache = ac.PagedCache.allocate(
        op, sizes={"B": 2, "Hkv": 2, "G": 2, "D": 32, "E": 32}, capacity=160, page=16
    )
    held = {n: torch.zeros_like(t, dtype=dtypes.get(n, t.dtype)) for n, t in cache.pages.items()}
    cache = dataclasses.replace(cache, pages=held)
    past = ops.arguments(name, 2, 130, 130, torch.bfloat16)
    op(cache=cache, backend="torch", **past)
    new = ops.arguments(name, 2, 3, 3, torch.bfloat16)
    check(op, cache=cache, phase="decode", splits=2, **new)


def test_a_sum_over_many_heads_stays_a_loop():
    args = ops.arguments("indexed", 1, 20, 70, torch.bfloat16)
    args |= {"qi": randn(10, 1, 20, 6, 16).bfloat16(), "w": randn(11, 1, 20, 6).bfloat16()}
    check(ops.indexed, **args)


@ac.op(out="B T H E")
def between_axes(
    q=ac.Activation("B T H D"), k=ac.Cache("B S H D"), v=ac.Cache("B S H E"), slope=ac.Param("H")
):
    q = q * ac.sigmoid(0.1 * (ac.index("T") - ac.index("D")))
    k = k * ac.sigmoid(0.1 * (ac.index("S") - ac.index("D")))
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + slope * (ac.index("S") - ac.index("T"))
    o = ac.dot(ac.softmax(score, "S", where=ac.causal), v, "S")
    return o * (0.1 * (ac.index("T") - ac.index("E")))


@pytest.mark.parametrize("splits", [1, 2])
def test_distances_between_places_of_any_two_axes(splits):
    q, k, v = (randn(i, 1, n, 2, 16).bfloat16() for i, n in enumerate((20, 150, 150)))
    slope = torch.tensor([0.1, 0.01])
    check(between_axes, splits=splits, lse=False, q=q, k=k, v=v, slope=slope)


@ac.op(out="B T Hkv E")
def unlike(
    q=ac.Activation("B T Hkv D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    label=ac.Cache("B S"),
    other=ac.Activation("B Hkv"),
    more=ac.param(),
):
    where = ~(ac.eq(label, other) | ac.eq(label, more))
    return ac.dot(ac.softmax(ac.dot(q, k, "D"), "S", where=where), v, "S")


@pytest.mark.parametrize(("other", "more"), [(torch.nan, 3.0), (3.0, torch.nan), (5.0, 3.0)])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_nan_equals_no_label_so_it_hides_no_key(phase, other, more):
    q, k, v = (randn(i, 1, n, 2, 16, dtype=torch.bfloat16) for i, n in enumerate((1, 100, 100)))
    label = torch.arange(100.0)[None]
    args = {"label": label, "other": torch.full((1, 2), other), "more": more}
    check(unlike, q=q, k=k, v=v, phase=phase, splits=2, **args)
