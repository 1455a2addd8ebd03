"""Selections and sparse attention on the GPU: exact sets, the oracle, caches, CUDA graphs."""

import math
from dataclasses import replace

import pytest
import torch

import attncc as ac
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan_picked import PickedPlan
from attncc.codegen.plan_table import Family, Measured, PlanTable, TableEntry, Time
from attncc.dsl.masked import best
from attncc.runtime import selected
from attncc.runtime.backends import spec_of
from attncc.runtime.bind import bind
from tests import selected_ops as ops
from tests.gpu.checking import DEVICE, check, offsets
from tests.gpu.test_caches import captured
from tests.tolerance import assert_close

pytestmark = pytest.mark.gpu
SPARSE = ac.ops.sparse_mla
BF16 = torch.bfloat16


def on_gpu(args):
    return {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in args.items()}


def top(k):
    @ac.op(out="B T J")
    def found(q=ac.Activation("B T D"), x=ac.Cache("B S D"), hidden=ac.Cache("B S")):
        return ac.topk(ac.dot(q, x, "D"), "S", k=k, where=hidden < 1)

    return found


def picked(rows, k, hidden=None):
    """The picks of rows of scores ``[rows, S]`` by the kernels; a product with 1 is exact."""
    n, width = rows.shape[0], 16
    x = torch.zeros(*rows.shape, width, device=DEVICE)
    x[..., 0] = rows
    q = torch.zeros(n, 1, width, device=DEVICE)
    q[..., 0] = 1.0
    none = torch.zeros(rows.shape, device=DEVICE) if hidden is None else hidden
    return top(k).decode(q, x, none, backend="triton")[:, 0]


def same_as_the_contract(rows, k, hidden=None):
    got = picked(rows, k, hidden)
    seen = torch.ones_like(rows, dtype=torch.bool) if hidden is None else hidden < 1
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), best(rows, seen, k))


def bits(shape, low, high):
    rng = torch.Generator(device=DEVICE).manual_seed(0)
    found = torch.randint(low, high, shape, generator=rng, device=DEVICE, dtype=torch.int32)
    return found.view(torch.float32)


@pytest.mark.parametrize("s", [16384, 16385, 65536])
def test_one_more_than_a_power_of_two(s):  # a24
    rows = 1.0 + 0.245 * torch.rand(33 if s < 60000 else 3, s, device=DEVICE)
    rows = (rows * 4096).floor() / 4096  # a product with 1 keeps every bit
    same_as_the_contract(rows, 2048)


@pytest.mark.parametrize("spread", [1, 1 << 16])
def test_thousands_of_equal_or_near_candidates(spread):  # a25
    rows = bits((4, 5001), 0x3F800000, 0x3F800000 + spread)
    same_as_the_contract(rows.bfloat16().float(), 2048)


def test_all_alike_in_the_first_digits():
    rows = bits((3, 20001), 0x3F800000, 0x3F800000 + 300).view(torch.int32)
    rows[1] = 0x3F800000  # one number, several times what is looked at together
    rows[2, ::20] = 0x40000000  # fewer than are wanted are above the others
    same_as_the_contract(rows.view(torch.float32), 2048)
    same_as_the_contract(-rows.view(torch.float32), 2048)


@pytest.mark.parametrize(("s", "k"), [(95, 128), (32, 2048), (1, 16), (2049, 2048)])
def test_more_wanted_than_there_are(s, k):  # a27
    rows = torch.randn(5, s, device=DEVICE).bfloat16().float()
    same_as_the_contract(rows, k)
    hidden = (torch.rand(5, s, device=DEVICE) < 0.5).float()
    hidden[0] = 1.0
    same_as_the_contract(rows, k, hidden)


def test_nan_infinities_and_zeros_of_either_sign():
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.0]
    at = torch.randint(0, len(values), (6, 3000), device=DEVICE)
    rows = torch.tensor(values, device=DEVICE)[at]
    # inf times the zeros of the other columns is NaN, so the row is a product of one column

    @ac.op(out="B T J")
    def alone(w=ac.Activation("B T"), q=ac.Activation("B T D"), k=ac.Cache("B S D"),
              x=ac.Cache("B S")):  # fmt: skip
        return ac.topk(x + 0.0 * w * ac.dot(q, k, "D"), "S", k=2500, where=ac.causal)

    zeros = torch.zeros(6, 3000, 16, device=DEVICE)
    got = alone.decode(torch.ones(6, 1, device=DEVICE), zeros[:, :1], zeros, rows, backend="triton")
    seen = torch.ones_like(rows, dtype=torch.bool)
    assert torch.equal(got[:, 0].long(), best(rows, seen, 2500))


@pytest.mark.parametrize(("b", "t", "s"), [(2, 1, 5000), (1, 300, 300), (2, 3, 4200)])
def test_exact_sets_of_small_whole_numbers(b, t, s):
    x = ops.index_arguments(b, t, s, heads=64, width=128)
    x = on_gpu(x)
    got = ops.picks(**x, backend="triton")
    assert torch.equal(got, ops.picks(**x, backend="torch"))


def real(b, t, s, heads=16, dtype=BF16):
    """Arguments of the library's op at its own sizes, an exact index."""
    return on_gpu(ops.arguments(b, t, s, dtype, heads=heads, width=512, part=64, index_width=128,
                                index_heads=64))  # fmt: skip


@pytest.mark.parametrize(
    ("b", "t", "s", "heads", "phase"),
    [
        (2, 1, 6000, 128, "decode"),
        (32, 1, 2100, 128, "decode"),
        (3, 2, 900, 16, "decode"),
        (1, 260, 2600, 16, "prefill"),
        (1, 90, 2600, 128, "prefill"),
    ],
)
def test_sparse_attention_at_its_own_sizes(b, t, s, heads, phase):
    check(SPARSE, **real(b, t, s, heads), phase=phase, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_small_widths(dtype):
    check(ops.sparse, **on_gpu(ops.arguments(2, 30, 500, dtype)), return_lse=True)


def test_values_other_than_keys_a_sink_and_positions():
    for dtype in (BF16, torch.float16):
        args = on_gpu(ops.grouped_arguments(2, 40, 400, dtype))
        exact = ops.grouped.reference(**args)
        eager = ops.grouped(**args, backend="torch")
        got = ops.grouped(**args, backend="triton")
        assert torch.equal(got.J.long(), exact.J.long())
        assert_close(got.o, exact.o, eager.o, dtype)


def test_packed_sequences_of_which_some_are_empty():
    args = real(1, 700, 700)
    args = {n: x[0] if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    check(SPARSE, **args, cu_seqlens=offsets([0, 333, 0, 367]))


def filled(kind, lengths, dtype=BF16, **made):
    """A cache that holds rows; what appends them has tests of its own."""
    sizes = {"B": len(lengths), "Di": 128, "R": 512, "P": 64}
    cache = kind.allocate(
        SPARSE, sizes=sizes, capacity=3072, dtype=dtype, device=DEVICE, **made
    )  # fmt: skip
    rows = real(len(lengths), 3000, 3000, 1, dtype if isinstance(dtype, torch.dtype) else BF16)
    SPARSE(**rows, cache=cache, backend="triton")
    cache.lengths.copy_(torch.tensor(lengths))
    return cache


STORED = {"ki": ac.Quantised(block=128, scale="ue8m0"), "c": BF16, "r": BF16}
LATENT = {"ki": BF16, "c": ac.Quantised(), "r": BF16}


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        (ac.DenseCache, {}), (ac.PagedCache, {"page": 64}), (ac.PagedCache, {"page": 16}),
        (ac.PagedCache, {"page": 64, "dtype": STORED}),
        (ac.PagedCache, {"page": 64, "dtype": LATENT}),
    ],
)  # fmt: skip
def test_caches_of_different_lengths(kind, made):
    lengths = [3000, 7, 0, 2047]
    cache, other = (filled(kind, lengths, **made) for _ in range(2))
    args = real(4, 2, 2)
    exact = SPARSE.reference(**args, cache=cache)
    eager = SPARSE.decode(**args, cache=other, backend="torch")
    got = SPARSE.decode(**args, cache=cache, backend="triton")
    assert_close(got, exact, eager, BF16)
    assert cache.lengths.tolist() == [n + 2 for n in lengths]


FOR_PICKS = PlanTable(
    tuple(
        TableEntry(
            f"by-test-{phase}", Family.WARP, (("phase", f"{phase}_picked"),), (),
            (("block_n", 64), ("shares", 2)),
            Measured("a test", (), "", "", (Time("none", 1.0),)),
        )
        for phase in ("decode", "prefill")
    ),
    "picks",
)  # fmt: skip


@pytest.mark.gluon
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="written for compute capability 9.0",
)
@pytest.mark.parametrize(
    ("kind", "made", "sequences", "tokens", "heads", "dtype"),
    [
        (None, {}, 70, 1, 128, BF16),
        (None, {}, 1, 90, 128, BF16),
        (ac.PagedCache, {"page": 64}, 4, 1, 72, BF16),
        (ac.PagedCache, {"page": 16}, 4, 3, 40, torch.float16),
        (ac.DenseCache, {}, 4, 2, 96, BF16),
        (ac.DenseCache, {}, 1, 1, 128, BF16),
    ],
)
def test_picked_rows_that_warps_of_their_own_copy(kind, made, sequences, tokens, heads, dtype):
    if kind is None:
        args, cache, other = real(sequences, tokens, 300, heads, dtype), {}, {}
    else:
        args = real(sequences, tokens, tokens, heads, dtype)
        lengths = [3000, 7, 0, 2047][:sequences]
        cache, other = ({"cache": filled(kind, lengths, dtype, **made)} for _ in range(2))
    out = torch.full((sequences, tokens, heads, 512), torch.nan, dtype=dtype, device=DEVICE)
    exact = SPARSE.reference(**args, **cache)
    eager = SPARSE.decode(**args, **other, backend="torch")
    call, _ = bind(SPARSE.declaration, (), {**args, **cache, "out": out})
    form, spec = analyse(call.program).selected, replace(spec_of(call), tuned=FOR_PICKS)
    phase = "prefill" if tokens > 3 else "decode"
    kernels = selected.prepare(call.program, form, spec, phase)
    assert isinstance(kernels.whole.plan, PickedPlan)
    ranges = selected._ranges(call, kernels, None)
    assert (ranges == 1) == (kind is None)
    assert selected._part(call, kernels, ranges)[1] == (2 if sequences * tokens == 1 else 1)
    selected.run(call, form, spec, phase)
    assert_close(out, exact, eager, dtype)


def test_a_captured_call_follows_the_lengths():
    cache = filled(ac.PagedCache, [2900, 100], page=64, dtype=STORED)
    start = cache.lengths.clone()
    args = real(2, 1, 1)
    out = torch.zeros(2, 1, 16, 512, dtype=BF16, device=DEVICE)

    def step():
        SPARSE.decode(**args, cache=cache, out=out, backend="triton")

    graph = captured(step)
    for at in (start, torch.tensor([5, 2950], device=DEVICE).int()):
        cache.lengths.copy_(at)
        graph.replay()
        replayed = out.clone()
        cache.lengths.copy_(at)
        step()
        assert torch.equal(replayed, out)


def test_the_same_bits_every_time_and_of_every_cut():
    args = real(2, 64, 2500)
    first = SPARSE(**args, backend="triton")
    for _ in range(3):
        assert torch.equal(SPARSE(**args, backend="triton"), first)
    cache = ac.DenseCache.allocate(
        SPARSE, sizes={"B": 2, "Di": 128, "R": 512, "P": 64}, capacity=2500, dtype=BF16,
        device=DEVICE,
    )  # fmt: skip
    rows = {n: args[n][:, :2436] for n in ("ki", "c", "r")}
    for name, held in rows.items():
        cache.tensors[name][:, :2436] = held
    cache.lengths.fill_(2436)
    got = []
    for lo, hi in ((0, 1), (1, 40), (40, 64)):
        part = {n: args[n][:, lo:hi] for n in ("qi", "w", "qc", "qr")}
        part |= {n: args[n][:, 2436 + lo : 2436 + hi] for n in ("ki", "c", "r")}
        got.append(SPARSE.decode(**part, scale=args["scale"], cache=cache, backend="triton"))
    exact = SPARSE.reference(**args)
    eager = SPARSE(**args, backend="torch")
    assert_close(torch.cat(got, 1), exact, eager, BF16)
    assert_close(first, exact, eager, BF16)
