"""Prepared calls equal ordinary ones bit for bit, on other tensors and after changes in place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attncc as ac
from attncc.dsl.errors import (
    ArgumentError,
    BackendError,
    CacheError,
    OverlapError,
    SizeError,
)
from attncc.runtime import recorder
from attncc.runtime.recording import KEPT
from tests.interpreter.test_softmax import alibi_of_documents, windowed
from tests.runtime import state_ops
from tests.strategies import randn

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
SIZES = {"B": 3, "Hkv": 2, "D": 16, "E": 16}


def floats(seed, *shape):
    return randn(seed, *shape).float()


def tokens_of(seed, *shape, heads=(4, 2, 2)):
    """q, k and v of some tokens."""
    return [floats(seed + i, *shape, h, 16) for i, h in enumerate(heads)]


def dense(seed, lengths, capacity=80):
    cache = ac.DenseCache.allocate(ATTENTION, sizes=SIZES, capacity=capacity, dtype=torch.float32)
    for i, held in enumerate(cache.tensors.values()):
        held.copy_(floats(seed + i, *held.shape))
    cache.lengths.copy_(torch.tensor(lengths))
    return cache


def paged(seed, lengths, page=16):
    spare = ac.PagedCache.allocate(
        ATTENTION, sizes=SIZES, capacity=80, page=page, pages=20, dtype=torch.float32
    )
    for i, held in enumerate(spare.pages.values()):
        held.copy_(floats(seed + i, *held.shape))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed)).int()
    table = order[: spare.block_table.numel()].view(spare.block_table.shape).clone()
    spare.lengths.copy_(torch.tensor(lengths))
    return ac.PagedCache(spare.pages, table, spare.lengths)


def copied(value):
    """The same values in other tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, ac.StatePool):
        out = None if value.out_slots is None else value.out_slots.clone()
        return ac.StatePool(value.pool.clone(), value.slots.clone(), out)
    held = {n: t.clone() for n, t in value.tensors.items()}
    if isinstance(value, ac.DenseCache):
        scales = {n: t.clone() for n, t in value.scales.items()}
        return ac.DenseCache(held, value.lengths.clone(), scales)
    return ac.PagedCache(held, value.block_table.clone(), value.lengths.clone())


def held_by(value):
    """Every tensor of an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, ac.StatePool):
        return [value.pool, value.slots]
    return [*value.tensors.values(), *value.scales.values(), value.lengths]


def as_tuple(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def same(prepared, op, phase, args, given=None, **options):
    """A run of the prepared call against an ordinary one on copies; what both write agrees."""
    given = args if given is None else given
    copies = {n: copied(x) for n, x in args.items()}
    want = getattr(op, phase)(**copies, **options, backend="triton")
    found = prepared(**given)
    for a, b in zip(as_tuple(found), as_tuple(want), strict=True):
        assert a.shape == b.shape and torch.equal(a, b)
    for name, value in copies.items():
        for a, b in zip(held_by(args[name]), held_by(value), strict=True):
            assert torch.equal(a, b), name
    return found


@pytest.mark.parametrize("make", [dense, paged])
def test_decode_with_a_cache(make):
    def arguments(seed, lengths):
        q, k, v = tokens_of(seed, 3, 1)
        return {"q": q, "k": k, "v": v, "cache": make(seed, lengths)}

    args = arguments(1, [70, 3, 0])
    prepared = ATTENTION.prepare(
        **copied_all(args), phase="decode", return_lse=True, backend="triton"
    )
    mine = {**args}
    same(prepared, ATTENTION, "decode", mine, return_lse=True)
    same(prepared, ATTENTION, "decode", mine, return_lse=True)  # one token later
    others = arguments(9, [5, 66, 31])
    same(prepared, ATTENTION, "decode", others, return_lse=True)
    others["cache"].lengths.copy_(torch.tensor([20, 1, 64]))
    if make is paged:
        table = others["cache"].block_table
        table.copy_(table.flip(0))
    same(prepared, ATTENTION, "decode", others, return_lse=True)


@pytest.mark.parametrize("scale", [torch.float32, "ue8m0"])
def test_decode_with_a_quantised_cache(scale):
    storage = ac.Quantised(scale=scale)

    def arguments(seed, lengths):
        cache = ac.DenseCache.allocate(ATTENTION, sizes=SIZES, capacity=80, dtype=storage)
        cache.lengths.copy_(torch.tensor([40, 40, 40]))
        for _ in range(2):  # something to read
            q, k, v = tokens_of(seed, 3, 40)
            cache.lengths.sub_(40)
            ATTENTION(q, k, v, cache=cache, backend="torch")
        cache.lengths.copy_(torch.tensor(lengths))
        q, k, v = tokens_of(seed + 5, 3, 1)
        return {"q": q, "k": k, "v": v, "cache": cache}

    args = arguments(1, [30, 3, 0])
    prepared = ATTENTION.prepare(**copied_all(args), phase="decode", backend="triton")
    same(prepared, ATTENTION, "decode", args)
    same(prepared, ATTENTION, "decode", arguments(9, [5, 36, 31]))


def copied_all(args):
    return {n: copied(x) for n, x in args.items()}


def test_without_replacements_the_cache_of_the_preparation_grows():
    q, k, v = tokens_of(1, 3, 1)
    cache = dense(2, [7, 0, 30])
    rival = copied(cache)
    out = torch.full((3, 1, 4, 16), torch.nan)
    prepared = ATTENTION.prepare(q, k, v, cache, phase="decode", out=out, backend="triton")
    assert prepared._frame is not None and out.isfinite().all()
    for step in range(3):
        want = ATTENTION.decode(q, k, v, rival, backend="triton")
        if step:
            assert prepared() is out
        assert torch.equal(out, want) and torch.equal(cache.lengths, rival.lengths)
        for t in (q, k, v):  # in place
            t.mul_(1.5)
    assert cache.lengths.tolist() == [10, 3, 33]


def delta(seed, batch, tokens, pool=True, out_slots=None):
    shape = (batch, tokens, 2)
    q, k = (torch.nn.functional.normalize(floats(seed + i, *shape, 16), dim=-1) for i in range(2))
    args = {
        "q": q, "k": k, "v": floats(seed + 2, *shape, 16), "g": -floats(seed + 3, *shape).abs(),
        "beta": floats(seed + 4, *shape).sigmoid(),
    }  # fmt: skip
    if pool:
        slots = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:batch].int()
        args["s"] = ac.StatePool(floats(seed + 5, 12, 2, 16, 16), slots, out_slots)
    return args


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_in_a_pool(tokens):
    out = None if tokens == 1 else torch.tensor([[9, 10, -1], [11, -1, -1]]).int()
    args = delta(1, 2, tokens, out_slots=out)
    prepared = GDR.prepare(**copied_all(args), phase="decode", backend="triton")
    same(prepared, GDR, "decode", args)
    others = delta(7, 2, tokens, out_slots=out)
    same(prepared, GDR, "decode", others)
    others["s"].slots.copy_(others["s"].slots.flip(0))
    others["s"].slots[0] = -1
    same(prepared, GDR, "decode", others)


def test_chunked_prefill():
    args = delta(1, 2, 150, pool=False)
    prepared = GDR.prepare(**copied_all(args), backend="triton")
    same(prepared, GDR, "prefill", args)
    same(prepared, GDR, "prefill", delta(8, 2, 150, pool=False))


def packed(args, cu):
    total = int(cu[-1])
    return {n: x[0, :total] for n, x in args.items()} | {"cu_seqlens": cu}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chunked_prefill_of_packed_sequences_whose_lengths_change_in_place(dtype):
    cu = torch.tensor([0, 70, 70, 180], dtype=dtype)
    args = packed(delta(1, 1, 180, pool=False), cu)
    prepared = GDR.prepare(**copied_all(args), backend="triton")
    same(prepared, GDR, "prefill", args)
    cu.copy_(torch.tensor([0, 1, 120, 180]))
    same(prepared, GDR, "prefill", args)
    other = torch.tensor([0, 64, 128, 180], dtype=dtype)
    same(prepared, GDR, "prefill", packed(delta(5, 1, 180, pool=False), other))


def test_packed_prefill_with_a_cache():
    cu = torch.tensor([0, 1, 1, 12])
    q, k, v = tokens_of(3, 12)
    args = {"q": q, "k": k, "v": v, "cache": dense(4, [3, 9, 40]), "cu_seqlens": cu}
    prepared = ATTENTION.prepare(**copied_all(args), backend="triton")
    same(prepared, ATTENTION, "prefill", args)
    cu.copy_(torch.tensor([0, 5, 12, 12]))
    same(prepared, ATTENTION, "prefill", args)


def test_ranges_of_labels_are_found_again():
    q, k, v = (x.clone() for x in tokens_of(3, 2, 140))
    label = (torch.arange(140) // 30).float().expand(2, -1).contiguous()
    args = {
        "q": q, "k": k, "v": v, "document": label, "slope": torch.tensor([0.5, 0.25, 0.1, 1.0]),
    }  # fmt: skip
    prepared = alibi_of_documents.prepare(**copied_all(args), backend="triton")
    same(prepared, alibi_of_documents, "prefill", args)
    label.copy_((torch.arange(140) // 90).float().expand(2, -1))
    same(prepared, alibi_of_documents, "prefill", args)


@pytest.mark.parametrize("name", ["convolution", "stacked"])
def test_windows(name):
    op, args, _, _ = state_ops.cases(2, 5)[name]
    sizes = {"sizes": state_ops.SIZES[name]} if name in state_ops.SIZES else {}
    prepared = op.prepare(**copied_all(args), **sizes, backend="triton")
    same(prepared, op, "prefill", args, **sizes)
    changed = {n: x * 0.5 for n, x in args.items()}
    same(prepared, op, "prefill", changed, **sizes)


def test_two_preparations_interleaved():
    a, b = delta(1, 2, 1), delta(5, 2, 1)
    one = GDR.prepare(**copied_all(a), phase="decode", backend="triton")
    two = GDR.prepare(**copied_all(b), phase="decode", backend="triton")
    for prepared, args in ((one, a), (two, b), (one, b), (two, a), (one, a)):
        same(prepared, GDR, "decode", args)


def test_numbers_and_outputs_may_be_replaced():
    q, k, v = tokens_of(2, 2, 9)
    prepared = windowed.prepare(q, k, v, 4, scale=0.3, backend="triton")
    out = torch.full_like(q, torch.nan)

    def plain(scale, width):
        return windowed(q, k, v, width, scale, backend="triton")

    assert prepared(scale=0.7, width=2, out=out) is out
    assert torch.equal(out, plain(0.7, 2)) and not torch.equal(out, plain(0.3, 4))
    assert torch.equal(prepared(), plain(0.3, 4))
    assert prepared(scale=1, out={"o": out}) is out and torch.equal(out, plain(1, 4))
    with pytest.raises(ArgumentError, match=r"scale: another kind .*expected float, found str"):
        prepared(scale="big")
    with pytest.raises(ArgumentError, match=r"width: another kind .*expected int, found float"):
        prepared(width=2.0)


def test_a_partial_comes_back():
    q, k, v = tokens_of(2, 2, 3)
    prepared = ATTENTION.prepare(q, k, v, return_partial=True, phase="decode", backend="triton")
    want = ATTENTION.decode(v.repeat(1, 1, 2, 1), k, v, return_partial=True, backend="triton")
    found = prepared(q=v.repeat(1, 1, 2, 1))
    assert torch.equal(found.u, want.u) and torch.equal(found.m, want.m)


def test_one_tensor_may_be_two_arguments():
    q, k, _ = tokens_of(2, 2, 9)
    prepared = ATTENTION.prepare(q, k, k, backend="triton")
    other = k * 2
    assert torch.equal(prepared(v=other), ATTENTION(q, k, other, backend="triton"))
    assert torch.equal(prepared(k=other), ATTENTION(q, other, k, backend="triton"))


@pytest.mark.parametrize(
    ("replacement", "error", "text"),
    [
        ({"q": torch.zeros(2, 8, 4, 16)}, SizeError, r"argument q: .*shape .*\[2, 8, 4, 16\]"),
        ({"q": torch.zeros(2, 9, 4, 32)[..., ::2]}, SizeError, "another strides"),
        ({"k": torch.zeros(2, 9, 2, 16).half()}, SizeError, "another dtype .*found torch.float16"),
        ({"k": torch.zeros(2, 9, 2, 16, device="meta")}, SizeError, "another device"),
        ({"v": torch.zeros(577)[1:].view(2, 9, 2, 16)}, SizeError, "another alignment"),
        ({"w": torch.zeros(1)}, ArgumentError, "argument w: not an argument .*expected q, k, v"),
        ({"q": None}, ArgumentError, "argument q: another kind"),
        ({"cache": dense(1, [1, 1, 1])}, ArgumentError, "not an argument of the prepared call"),
        ({"out": torch.zeros(2, 9, 4, 16).bfloat16()}, SizeError, "argument out: .*dtype"),
    ],
)
def test_a_replacement_of_another_layout_is_an_error_and_nothing_runs(replacement, error, text):
    q, k, v = tokens_of(2, 2, 9)
    out = torch.zeros(2, 9, 4, 16)
    prepared = ATTENTION.prepare(q, k, v, out=out, backend="triton")
    out.fill_(7)
    with pytest.raises(error, match=text):
        prepared(**replacement)
    assert (out == 7).all()


def test_what_is_written_must_lie_apart():
    q, k, v = tokens_of(2, 2, 9)
    prepared = ATTENTION.prepare(q, k, v, backend="triton")
    with pytest.raises(OverlapError, match=r"argument out\[o\]: .*overlap with q"):
        prepared(out=q)
    args = delta(1, 2, 1)
    step = GDR.prepare(**args, phase="decode", backend="triton")
    inside = args["s"].pool.view(-1)[: args["v"].numel()].view_as(args["v"])
    with pytest.raises(OverlapError, match="overlap with v"):
        step(v=inside)


def test_gradients_are_refused():
    q, k, v = tokens_of(2, 2, 9)
    prepared = ATTENTION.prepare(q, k, v, backend="triton")
    with pytest.raises(ArgumentError, match="knows no gradient"):
        prepared(q=q.clone().requires_grad_())
    with torch.no_grad():
        prepared(q=q.clone().requires_grad_())


def test_calls_without_kernels_of_ours_cannot_be_prepared():
    q, k, v = tokens_of(2, 3, 1)
    cache = dense(2, [7, 0, 30])
    for backend in ("torch", "reference"):
        with pytest.raises(BackendError, match=f"cannot be prepared: the {backend}"):
            ATTENTION.prepare(q, k, v, cache, phase="decode", backend=backend)
    assert cache.lengths.tolist() == [7, 0, 30]
    with pytest.raises(ArgumentError, match="no such phase"):
        ATTENTION.prepare(q, k, v, phase="training")


def test_device_work_that_no_step_does_again_is_refused(monkeypatch):
    from attncc.runtime import affine

    args = packed(delta(1, 1, 180, pool=False), torch.tensor([0, 70, 180]))
    workspace = affine.workspace
    monkeypatch.setattr(affine, "workspace", lambda *a: workspace(*a) * 1)
    with pytest.raises(BackendError, match=r"chunks_ptr of .* outside the steps"):
        GDR.prepare(**args, backend="triton")
    with pytest.raises(BackendError, match="computes with a number"):
        recorder.marked(0.5, 0) * 2


def test_the_check_knob_makes_each_run_an_ordinary_call(monkeypatch):
    q, k, v = tokens_of(2, 3, 1)
    monkeypatch.setenv("ATTNCC_CHECK", "1")
    cache = dense(2, [7, 0, 78])
    out = torch.zeros(3, 1, 4, 16)
    prepared = ATTENTION.prepare(q, k, v, cache, phase="decode", backend="triton")
    same(prepared, ATTENTION, "decode", {"cache": cache, "q": q * 2, "k": k, "v": v})
    with pytest.raises(CacheError, match="no room"):
        prepared(out=out)
    cache.lengths.zero_()
    assert prepared(out=out) is out and cache.lengths.tolist() == [1, 1, 1]


def test_after_a_fork_it_says_so(monkeypatch):
    prepared = ATTENTION.prepare(*tokens_of(2, 2, 9), backend="triton")
    monkeypatch.setattr(KEPT, "loaded", KEPT.loaded + 1)
    with pytest.raises(BackendError, match="another process"):
        prepared()


def test_calls_import_no_sympy():
    code = (
        "from tests.interpreter.triton_patch import install; install()\n"
        "import sys, torch, attncc as ac\n"
        "q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 9, 2, 16)\n"
        "call = ac.ops.attention.prepare(q, k, k, phase='decode', backend='triton')\n"
        "assert torch.equal(call(), ac.ops.attention.decode(q, k, k, backend='triton'))\n"
        "sys.exit('sympy' in sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root / ".pkg"), str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
