"""Generated softmax kernels in Triton's interpreter, against the fp64 meaning of the program."""

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.runtime import softmax
from attncc.runtime.backends import run_eager, spec_of
from attncc.runtime.bind import bind
from attncc.runtime.reference import run_reference
from tests.strategies import randn
from tests.tolerance import assert_close

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@ac.op(out="B T (Hkv G) E")
def windowed(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    width=ac.param(integer=True),
    scale=ac.param(),
):
    seen = ac.causal & (ac.index("T") - ac.index("S") < width)
    return ac.dot(ac.softmax(ac.dot(q, k, "D") * scale, "S", where=seen), v, "S")


@ac.op(out="B T (Hkv G) E")
def capped_with_sink(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    sink=ac.Param("(Hkv G)"),
    gate=ac.Activation("B T (Hkv G) E"),
):
    score = 3 * ac.tanh(ac.dot(q, k, "D") * ac.rsqrt("D") / 3)
    return ac.sigmoid(gate) * ac.dot(ac.softmax(score, "S", where=ac.causal, sink=sink), v, "S")


@ac.op(out="B T (Hkv G) E")
def alibi_of_documents(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    slope=ac.Param("(Hkv G)"),
    document=ac.Cache("B S"),
):
    same = ac.eq(ac.at_query(document, "S"), document)
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + slope * (ac.index("S") - ac.index("T"))
    return ac.dot(ac.softmax(score, "S", where=ac.causal & same), v, "S")


@ac.op(out="B T H R")
def latent(
    qc=ac.Activation("B T H R"),
    qr=ac.Activation("B T H P"),
    c=ac.Cache("B S R"),
    r=ac.Cache("B S P"),
):
    score = (ac.dot(qc, c, "R") + ac.dot(qr, r, "P")) * 0.1
    return ac.dot(ac.softmax(score, "S", where=ac.causal), c, "S")


def qkv(batch, tokens, history, heads, group, dim, dtype, value_dim=None):
    q = randn(0, batch, tokens, heads * group, dim, dtype=dtype)
    k = randn(1, batch, history, heads, dim, dtype=dtype)
    v = randn(2, batch, history, heads, value_dim or dim, dtype=dtype)
    return q, k, v


def check(op, *args, splits=None, phase="prefill", lse=True, **kwargs):
    """Every result against the oracle, with the contract's tolerance; outputs start as NaN."""
    call, _ = bind(op.declaration, args, {**kwargs, "return_lse": lse})
    exact = run_reference(call)
    analysis = analyse(call.program)
    rough = bind(op.declaration, args, {**kwargs, "return_lse": lse})[0]
    run_eager(rough, analysis)
    for tensor in (*call.outputs.values(), *([call.lse] if lse else [])):
        tensor.fill_(torch.nan)
    softmax.run(call, analysis.softmax, spec_of(call), phase, splits=splits)
    for name, tensor in call.outputs.items():
        assert_close(tensor, exact[name], rough.outputs[name], tensor.dtype, name)
    if lse:
        assert_close(call.lse, exact["lse"], rough.lse, torch.float32, "lse")
    return call


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_prefill_with_a_padded_head_dim(dtype):
    check(ac.ops.attention, *qkv(1, 40, 75, 2, 3, 96, dtype, value_dim=40))


@pytest.mark.parametrize(("group", "splits"), [(6, 3), (1, 1)])
def test_decode_of_grouped_queries_equals_repeated_keys(group, splits):
    q, k, v = qkv(2, 1, 150, 2, group, 64, torch.bfloat16)
    call = check(ac.ops.attention, q, k, v, phase="decode", splits=splits)
    wide = [x.repeat_interleave(group, 2) for x in (k, v)]
    plain = check(ac.ops.attention, q, *wide, phase="decode", splits=splits)
    assert torch.equal(call.outputs["o"], plain.outputs["o"])


@pytest.mark.parametrize("width", [40, 250])  # with 250 some blocks are seen by every row
def test_window_and_scale_given_by_the_caller(width):
    q, k, v = qkv(1, 300, 420, 1, 1, 32, torch.float16)
    check(windowed, q, k, v, width=width, scale=0.2)


@pytest.mark.parametrize("splits", [1, 4])
def test_values_follow_a_block_behind_their_scores(splits):
    q, k, v = qkv(1, 70, 300, 1, 2, 16, torch.bfloat16)
    v[:, :120] = 1e3  # out of the window: a weight that went to the wrong block would show
    call = check(windowed, q, k, v, width=100, scale=0.3, splits=splits)
    kernels = softmax.prepare(call.program, analyse(call.program).softmax, spec_of(call), "prefill")
    assert all(k.plan.ahead and k.plan.first_part == 0 for k in (kernels.whole, *kernels.parts))


@pytest.mark.parametrize("key", [3, 100])  # in the first block, and in another one
def test_an_infinite_value_stays_infinite(key):
    q, k, v = qkv(1, 64, 192, 1, 1, 16, torch.bfloat16)
    v[:, key, 0, 5] = torch.inf
    call = check(ac.ops.attention, q, k, v)
    kernels = softmax.prepare(call.program, analyse(call.program).softmax, spec_of(call), "prefill")
    assert kernels.whole.plan.ahead and call.outputs["o"][..., 5].isposinf().all()


@pytest.mark.parametrize("splits", [1, 5])
def test_soft_cap_sink_and_gated_output(splits):
    q, k, v = qkv(1, 3, 90, 2, 2, 32, torch.bfloat16)
    gate = randn(4, *q.shape, dtype=torch.bfloat16)
    check(capped_with_sink, q, k, v, sink=randn(3, 4).float(), gate=gate, splits=splits)


def test_alibi_within_documents():
    q, k, v = qkv(2, 30, 45, 2, 2, 32, torch.bfloat16)
    document = torch.arange(45).expand(2, 45).div(11, rounding_mode="floor").int().contiguous()
    check(
        alibi_of_documents, q, k, v, slope=torch.tensor([0.5, 0.25, 0.125, 1.0]), document=document
    )


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kind", [torch.int32, torch.float32])
def test_a_decode_step_reads_only_between_the_first_and_the_last_key_that_is_seen(splits, kind):
    q, k, v = qkv(2, 1, 300, 2, 2, 32, torch.bfloat16)
    document = torch.arange(300).div(130, rounding_mode="floor").repeat(2, 1).to(kind)
    document[1, -1] = 9  # a document of one key
    if kind.is_floating_point:
        document[0, 270] = torch.nan  # of no document
    args = {"slope": torch.tensor([0.5, 0.25, 0.125, 1.0]), "document": document.contiguous()}
    call = check(alibi_of_documents, q, k, v, phase="decode", splits=splits, **args)
    kernels = softmax.prepare(call.program, analyse(call.program).softmax, spec_of(call), "decode")
    assert kernels.whole.plan.scanned == ("document",)
    block = kernels.whole.plan.block_n
    for b, first in ((0, 260), (1, 299)):  # what is not read may hold anything
        call.tensors["v"][b, : first // block * block] = torch.nan
    call.outputs["o"].fill_(torch.nan)
    before = call.tensors["v"].isnan().sum()
    softmax.run(call, analyse(call.program).softmax, spec_of(call), "decode", splits=splits)
    assert before > 400 * 32 and not call.outputs["o"].isnan().any()


def test_packed_steps_scan_their_own_documents():
    q, k, v = (x[0] for x in qkv(1, 4, 300, 2, 2, 32, torch.bfloat16))
    document = torch.arange(300).div(70, rounding_mode="floor").int()
    offsets = {"cu_seqlens": [0, 1, 3, 3, 4], "cu_seqlens_k": [0, 130, 200, 200, 300]}
    args = {n: torch.tensor(x) for n, x in offsets.items()} | {"document": document}
    args["slope"] = torch.tensor([0.5, 0.25, 0.125, 1.0])
    check(alibi_of_documents, q, k, v, phase="decode", splits=3, **args)


def test_a_latent_cache_is_key_and_value():
    qc, qr = (
        randn(0, 1, 2, 5, 64, dtype=torch.bfloat16),
        randn(1, 1, 2, 5, 16, dtype=torch.bfloat16),
    )
    c, r = randn(2, 1, 70, 64, dtype=torch.bfloat16), randn(3, 1, 70, 16, dtype=torch.bfloat16)
    check(latent, qc, qr, c, r, phase="decode", splits=2)


def test_packed_sequences_with_empty_ones():
    lengths, past = [0, 5, 0, 70, 1, 0], [3, 2, 0, 10, 60, 0]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    cu_k = torch.tensor([0, *(a + b for a, b in zip(lengths, past, strict=True))]).cumsum(0)
    for splits, dim in ((1, 32), (2, 32), (1, 256)):
        made = qkv(1, int(cu[-1]), int(cu_k[-1]), 2, 6, dim, torch.bfloat16)
        q, k, v = (x[0] for x in made)
        check(ac.ops.attention, q, k, v, cu_seqlens=cu, cu_seqlens_k=cu_k, splits=splits)


@pytest.mark.parametrize("packed", [False, True])
def test_decode_appends_to_a_cache(packed):
    sizes = {"B": 3, "Hkv": 2, "D": 32, "E": 32}
    cache = ac.DenseCache.allocate(ac.ops.attention, sizes=sizes, capacity=80)
    for t in cache.tensors.values():
        t.normal_()
    cache.lengths.copy_(torch.tensor([0, 70, 33]))
    held = {n: t.clone() for n, t in cache.tensors.items()}
    q, k, v = qkv(3, 2, 2, 2, 4, 32, torch.bfloat16)
    kwargs = {}
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        kwargs["cu_seqlens"] = torch.tensor([0, 2, 2, 6])
    for t in cache.tensors.values():
        for b, n in enumerate([0, 70, 33]):
            t[b, n:] = torch.nan  # what is not appended must not be read
    call = check(ac.ops.attention, q, k, v, cache=cache, phase="decode", splits=2, **kwargs)
    counts = [2, 0, 4] if packed else [2, 2, 2]
    new = k if packed else k.flatten(0, 1)
    for b, (n, fresh) in enumerate(zip([0, 70, 33], new.split(counts), strict=True)):
        assert torch.equal(cache.tensors["k"][b, :n], held["k"][b, :n])
        assert torch.equal(cache.tensors["k"][b, n : n + counts[b]], fresh)
    assert call.lengths is cache.lengths


def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity():
    q, k, v = qkv(1, 4, 2, 1, 1, 16, torch.bfloat16)
    for keys in (2, 0):
        call = check(ac.ops.attention, q, k[:, :keys], v[:, :keys], splits=1)
        assert not call.outputs["o"][0, : 4 - keys].any()
        assert torch.isneginf(call.lse[0, : 4 - keys]).all()
    for tokens, batch in ((0, 1), (4, 0)):
        check(ac.ops.attention, q[:batch, :tokens], k[:batch], v[:batch])


def test_huge_negative_scores_and_strided_keys():
    q = torch.full((1, 1, 1, 128), 64.0, dtype=torch.bfloat16)
    k = torch.full((1, 1, 2, 128), -64.0, dtype=torch.bfloat16).transpose(1, 2)
    v = torch.ones(1, 2, 1, 128, dtype=torch.bfloat16)
    call = check(ac.ops.attention, q, k, v, phase="decode")
    assert (call.outputs["o"] == 1).all()
