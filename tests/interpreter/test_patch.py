"""The patch of Triton's interpreter: number formats, dots, scans, and the language kernels use."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.interpreter import triton_patch, type_memo

BLOCK: tl.constexpr = tl.constexpr(64)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

FORMATS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
formats = pytest.mark.parametrize("dtype", list(FORMATS), ids=str)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The storage of `x` as integers, every NaN as one code."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.where(
        x.float().isnan(), torch.tensor(-1, dtype=torch.int64), x.view(integer).long()
    )


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def finite_codes(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a format as fp32."""
    width = torch.finfo(dtype).bits
    codes = torch.arange(1 << width, dtype=torch.int64)
    integer = {8: torch.uint8, 16: torch.int16}[width]
    values = codes.to(integer).view(dtype).float()
    return values[values.isfinite()]


def hard_values(dtype: torch.dtype) -> torch.Tensor:
    """Edges, every value of the format, every midpoint and its neighbours, random bits."""
    edges = [0.0, -0.0, 1000.0, -1000.0, 1e-45, 1e-40, 2.0**-126, 3.4028235e38, 65504.0, 65519.9]
    edges += [65520.0, 448.0, 464.0, 464.1, 480.0, 57344.0, 61439.9, 61440.0, 61441.0, 2.0**-17]
    edges += [2.0**-10, 2.0**-9, 2.0**-25, 2.0**-24, float("inf"), float("-inf"), float("nan")]
    codes = finite_codes(dtype).unique().double()
    middle = ((codes[1:] + codes[:-1]) / 2).float()
    inf = torch.tensor(float("inf"))
    generator = torch.Generator().manual_seed(3)
    noise = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), generator=generator).int()
    return torch.cat(
        [
            torch.tensor(edges),
            codes.float(),
            middle,
            torch.nextafter(middle, inf),
            torch.nextafter(middle, -inf),
            noise.view(torch.float32),
            seeded(1 << 14) * 100,
        ]
    )


@triton.jit
def cast_kernel(x_ptr, y_ptr, n, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < n)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(triton.cdiv(x.numel(), 8192),)](x, y, x.numel(), SIZE=8192)
    return y


@formats
def test_a_cast_from_fp32_is_torchs(dtype: torch.dtype) -> None:
    x = hard_values(dtype)
    assert torch.equal(bits(cast(x, dtype)), bits(x.to(dtype)))


@formats
def test_a_cast_to_fp32_is_exact_for_every_code(dtype: torch.dtype) -> None:
    width = torch.finfo(dtype).bits
    integer = {8: torch.uint8, 16: torch.int16}[width]
    x = torch.arange(1 << width).to(integer).view(dtype)
    assert torch.equal(bits(cast(x, torch.float32)), bits(x.float()))


@pytest.mark.parametrize("source", list(FORMATS), ids=str)
@formats
def test_a_cast_between_small_formats_is_torchs(source: torch.dtype, dtype: torch.dtype) -> None:
    x = finite_codes(source).to(source)
    assert torch.equal(bits(cast(x, dtype)), bits(x.float().to(dtype)))


def test_1000_as_fp8() -> None:
    x = torch.tensor([1000.0])
    assert cast(x, torch.float8_e4m3fn).item() == 448.0
    assert cast(x, torch.float8_e5m2).item() == 1024.0


@pytest.mark.parametrize("source", [torch.int32, torch.int64, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_cast_from_a_wide_type_is_torchs(source: torch.dtype, dtype: torch.dtype) -> None:
    x = (seeded(4096).double() * 1e4).to(source)
    assert torch.equal(bits(cast(x, dtype)), bits(x.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_to_int_truncates(dtype: torch.dtype) -> None:
    x = (seeded(4096) * 1e3).to(dtype)
    assert torch.equal(cast(x, torch.int32), x.int())


@pytest.mark.parametrize("name", ["bf16", "fp8e4nv", "fp8e5"])
def test_rounding_toward_zero_never_grows(name: str) -> None:
    dtype = {"bf16": tl.bfloat16, "fp8e4nv": tl.float8e4nv, "fp8e5": tl.float8e5}[name]
    x = seeded(4096).numpy() * 10
    down = triton_patch.decode(triton_patch._encode_toward_zero(x, dtype), dtype)
    near = triton_patch.decode(triton_patch.encode(x, dtype), dtype)
    assert (np.abs(down) <= np.abs(x)).all()
    assert (np.abs(near) > np.abs(x)).any()
    assert (down == near)[np.abs(near) <= np.abs(x)].all()


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, o_ptr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    a = tl.load(a_ptr + at)
    b = tl.load(b_ptr + at)
    c = tl.load(c_ptr + at)
    out = tl.dot(a, tl.trans(b), c, input_precision=PRECISION)
    out += tl.dot(a, tl.trans(b), input_precision=PRECISION)
    tl.store(o_ptr + at, out)


def parts(x: np.ndarray, bits: int, count: int) -> list[np.ndarray]:
    """An fp32 array as a sum of numbers of so many bits, rounded to nearest."""
    found = []
    for _ in range(count):
        mantissa, exponent = np.frexp(x.astype(np.float64))
        found.append(np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits))
        x = x - found[-1]
    return found


SPLIT = {
    "tf32x3": triton_patch._tf32x3, "bf16x3": triton_patch._bf16x3, "bf16x6": triton_patch._bf16x6,
}  # fmt: skip
KEPT = {"tf32x3": 2.0**-21, "bf16x3": 2.0**-15, "bf16x6": 2.0**-22}


@pytest.mark.parametrize("precision", list(SPLIT))
def test_split_products_of_one_term_are_the_kept_parts_cut_off(precision: str) -> None:
    """One term: nothing but the dropped parts and the last cut separate it from the exact one."""
    x, y = seeded(4096, seed=1).numpy(), seeded(4096, seed=2).numpy()
    split = SPLIT[precision]
    found = np.concatenate([split(x[i : i + 1, None], y[None, i : i + 1])[0] for i in range(4096)])
    exact = x.astype(np.float64) * y
    error = (found - exact) / np.abs(exact)
    assert np.abs(error).max() <= KEPT[precision]
    if precision != "bf16x3":  # what that drops has either sign
        assert (np.abs(found) <= np.abs(exact)).mean() > 0.7  # a tensor core cuts off


def test_bf16x6_takes_numbers_whole_and_tf32x3_does_not() -> None:
    x = seeded(1, 512, seed=1).numpy().astype(np.float32)
    assert np.array_equal(sum(parts(x, 8, 3)), x)
    one = np.ones((1, 1), np.float32)
    assert np.array_equal(triton_patch._bf16x6(one, x), x)
    assert not np.array_equal(triton_patch._tf32x3(one, x), x)


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x6"])
def test_sums_of_a_tensor_core_lean_towards_zero(precision: str) -> None:
    """Positive terms: each step cuts off, so that longer sums lose more."""
    split = {"tf32x3": triton_patch._tf32x3, "bf16x6": triton_patch._bf16x6}[precision]
    lost = []
    for length in (16, 64, 256):
        x, y = (seeded(16, length, seed=s).abs().numpy() for s in (1, 2))
        exact = x.astype(np.float64) @ y.T.astype(np.float64)
        lost.append(float(((exact - split(x, np.ascontiguousarray(y.T))) / exact).mean()))
    assert 0 < lost[0] < lost[1] < lost[2] < 64 * 2.0**-23


def test_infinities_of_split_products_stay() -> None:
    x = np.array([[np.inf, 1.0], [1.5, 2.5]], np.float32)
    y = np.array([[2.0, -2.0], [1.0, 1.0]], np.float32)
    with np.errstate(invalid="ignore"):
        for split in SPLIT.values():
            assert np.array_equal(split(x, y), x @ y)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16x6", "ieee"])
@pytest.mark.parametrize("dtype", [torch.float32, *FORMATS], ids=str)
def test_a_dot_is_exact_to_fp32(dtype: torch.dtype, precision: str) -> None:
    a, b = (seeded(64, 64, seed=s).to(dtype) for s in (1, 2))
    c, out = seeded(64, 64, seed=3), torch.empty(64, 64)
    dot_kernel[(1,)](a, b, c, out, SIZE=64, PRECISION=precision)
    expected = 2 * a.double() @ b.double().T + c.double()
    bound = 1e-6 * (2 * a.double().abs() @ b.double().abs().T + c.double().abs())
    assert ((out - expected).abs() <= bound).all()


@triton.jit
def elementwise_kernel(x_ptr, y_ptr, o_ptr, p_ptr, scale, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(o_ptr + at, x + y)
    tl.store(o_ptr + SIZE + at, x - y)
    tl.store(o_ptr + 2 * SIZE + at, x * y)
    tl.store(o_ptr + 3 * SIZE + at, tl.where(x < y, x, y))
    tl.store(o_ptr + 4 * SIZE + at, tl.maximum(x, y))
    tl.store(o_ptr + 5 * SIZE + at, tl.abs(-x))
    tl.store(o_ptr + 6 * SIZE + at, x * 1.5)
    tl.store(o_ptr + 7 * SIZE + at, tl.full((SIZE,), 0.3, o_ptr.dtype.element_ty))
    less = (x < y).to(tl.float32)
    tl.store(p_ptr + at, less * scale)
    tl.store(p_ptr + SIZE + at, x * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_elementwise_arithmetic_is_torchs(dtype: torch.dtype) -> None:
    x, y = (seeded(256, seed=s).to(dtype) for s in (1, 2))
    out, wide = torch.empty(8, 256, dtype=dtype), torch.empty(2, 256)
    elementwise_kernel[(1,)](x, y, out, wide, 0.7, SIZE=256)
    half = torch.full_like(x, 0.3)
    rows = [x + y, x - y, x * y, torch.minimum(x, y), torch.maximum(x, y), x.abs(), x * 1.5, half]
    assert torch.equal(bits(out), bits(torch.stack(rows)))
    # A float argument is an fp32 scalar: the product is fp32, as in compiled code.
    assert torch.equal(wide[0], (x < y).float() * 0.7)
    assert torch.equal(wide[1], x.float() * 0.7)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def affine(a0, b0, a1, b1):
    return a0 * a1, b0 * a1 + b1


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def scan_kernel(x_ptr, y_ptr, o_ptr, ROWS: tl.constexpr, COLS: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    n: tl.constexpr = ROWS * COLS
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(o_ptr + at, tl.cumsum(x, AXIS))
    tl.store(o_ptr + n + at, tl.cumprod(x, AXIS))
    tl.store(o_ptr + 2 * n + at, tl.cumsum(x, AXIS, reverse=True))
    tl.store(o_ptr + 3 * n + at, tl.associative_scan(x, AXIS, product))
    a, b = tl.associative_scan((x, y), AXIS, affine)
    tl.store(o_ptr + 4 * n + at, a)
    tl.store(o_ptr + 5 * n + at, b)
    tl.store(o_ptr + 6 * n + at, tl.associative_scan(x, AXIS, larger, reverse=True))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scans(dtype: torch.dtype, axis: int) -> None:
    x = (1 + 0.1 * seeded(16, 32)).to(dtype)
    y = seeded(16, 32, seed=1).to(dtype)
    out = torch.empty(7, 16, 32)
    scan_kernel[(1,)](x, y, out, ROWS=16, COLS=32, AXIS=axis)
    xs, ys = (v.double().movedim(axis, 0) for v in (x, y))
    state, states = torch.zeros_like(xs[0]), []
    for a, b in zip(xs, ys, strict=True):
        state = state * a + b
        states.append(state)
    expected = [
        xs.cumsum(0),
        xs.cumprod(0),
        xs.flip(0).cumsum(0).flip(0),
        xs.cumprod(0),
        xs.cumprod(0),
        torch.stack(states),
        xs.flip(0).cummax(0).values.flip(0),
    ]
    # Up to 32 roundings a row, each half a unit.
    tolerance = 32 * torch.finfo(dtype).eps
    for row, value in zip(out, expected, strict=True):
        error = (row.double().movedim(axis, 0) - value).abs()
        assert error.max() <= tolerance * value.abs().max()


@triton.jit
def reduce_kernel(x_ptr, o_ptr, i_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.arange(0, ROWS)
    x = tl.load(x_ptr + row[:, None] * COLS + tl.arange(0, COLS)[None, :])
    tl.store(o_ptr + row, tl.sum(x, 1))
    tl.store(o_ptr + ROWS + row, tl.max(x, 1))
    tl.store(o_ptr + 2 * ROWS + row, tl.min(x, 1))
    tl.store(o_ptr + 3 * ROWS + row, tl.reduce(x, 1, larger))
    tl.store(o_ptr + 4 * ROWS + row[:, None], tl.reduce(x, 1, larger, keep_dims=True))
    tl.store(o_ptr + 5 * ROWS + row, tl.zeros((ROWS,), tl.float32) + tl.reduce(x, None, larger))
    value, index = tl.max(x, 1, return_indices=True)
    tl.store(o_ptr + 6 * ROWS + row, value)
    tl.store(i_ptr + row, index)
    tl.store(i_ptr + ROWS + row, tl.argmin(x, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reductions(dtype: torch.dtype) -> None:
    x = (seeded(8, 64) - 3).to(dtype)  # mostly negative: bit patterns would order them backwards
    out, index = torch.empty(7, 8), torch.empty(2, 8, dtype=torch.int32)
    reduce_kernel[(1,)](x, out, index, ROWS=8, COLS=64)
    top, low = x.float().max(1).values, x.float().min(1).values
    torch.testing.assert_close(out[0], x.double().sum(1).to(dtype).float(), rtol=1e-2, atol=0)
    assert torch.equal(out[1:3], torch.stack([top, low]))
    assert torch.equal(out[3], top) and torch.equal(out[4], top) and torch.equal(out[6], top)
    assert (out[5] == top.max()).all()
    rows = torch.arange(8)
    assert torch.equal(x[rows, index[0].long()].float(), top)
    assert torch.equal(x[rows, index[1].long()].float(), low)


# --- the language that generated kernels use --------------------------------------------------


@triton.jit
def online(acc, m, l, s, v):
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s - m_safe[:, None])
    rescale = tl.exp2(m - m_safe)
    acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v)
    return acc, m_new, l * rescale + tl.sum(p, 1)


@triton.jit
def flash_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bounds_ptr, scale, stride_h, T, D: tl.constexpr
):
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    lo = tl.load(bounds_ptr)
    used = tl.load(bounds_ptr + 1)
    if block * BLOCK >= used:
        return
    rows = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    base = head * stride_h
    q = tl.load(q_ptr + base + rows[:, None] * D + d[None, :], mask=rows[:, None] < T, other=0.0)
    acc = tl.zeros((BLOCK, D), tl.float32)
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK,), tl.float32)
    hi = tl.minimum((block + 1) * BLOCK, used)
    for j in tl.range(lo, hi, BLOCK, num_stages=2):
        cols = j + tl.arange(0, BLOCK)
        at = base + cols[:, None].to(tl.int64) * D + d[None, :]
        k = tl.load(k_ptr + at, mask=cols[:, None] < used, other=0.0)
        v = tl.load(v_ptr + at, mask=cols[:, None] < used, other=0.0)
        s = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
        s = tl.where((cols[None, :] <= rows[:, None]) & (cols[None, :] < used), s, float("-inf"))
        acc, m, l = online(acc, m, l, s, v)
    safe = tl.where(l == 0.0, 1.0, l)
    out = (acc / safe[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + base + rows[:, None] * D + d[None, :], out, mask=rows[:, None] < T)
    tl.store(lse_ptr + head * T + rows, (m + tl.log2(safe)) / LOG2E, mask=rows < T)


def test_a_flash_kernel_is_right_and_patches_the_language_once() -> None:
    heads, length, width = 4, 512, 64
    q, k, v = (seeded(heads, length, width, seed=s).bfloat16() for s in (1, 2, 3))
    out, lse = torch.empty_like(q), torch.empty(heads, length)
    bounds = torch.tensor([0, length], dtype=torch.int32)
    flash_kernel[(length // 64, heads)](
        q, k, v, out, lse, bounds, width**-0.5, length * width, length, D=width
    )
    scores = q.double() @ k.double().mT * width**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), rtol=2e-2, atol=2e-2)
    # What makes it quick: one patching for the process, where the shipped code does one a call.
    assert triton_patch._patch_language.cache_info().misses == 1


@triton.jit
def split(x, N: tl.constexpr):
    y = tl.reshape(x, (2, N // 2))
    return tl.sum(y, 0), tl.max(y, 0), x.dtype


@triton.jit
def language_kernel(x_ptr, index_ptr, o_ptr, flag, N: tl.constexpr, REPEAT: tl.constexpr):
    at = tl.arange(0, N)
    half = tl.arange(0, N // 2)
    total = tl.zeros((N,), tl.float32)
    for i in tl.static_range(REPEAT):
        total += tl.load(x_ptr + i * N + at)
    for i in range(0, REPEAT):
        total += i.to(tl.float32)
    i64 = tl.load(index_ptr)
    if i64 > 2**32:
        total += 1.0
    elif flag:
        total += 2.0
    else:
        total += 4.0
    if flag and i64 < 0:
        total = total * 0.0
    step = 0
    while step < i64 - 2**33:
        step += 1
    total += step
    first, second, dtype = split(total, N)
    tl.store(o_ptr + half, first.to(dtype))
    tl.store(o_ptr + N // 2 + half, second)
    grid = tl.reshape(total, (2, N // 2))
    tl.store(o_ptr + N + at, tl.reshape(tl.trans(grid), (N,)))
    tl.store(o_ptr + 2 * N + at, tl.math.exp2(tl.sigmoid(total)))
    if tl.program_id(0) == 0:
        return
    tl.store(o_ptr + at, float("nan"))


def test_the_language_of_the_generated_kernels() -> None:
    n, repeat = 32, 3
    x, out = seeded(repeat, n), torch.empty(3, n)
    language_kernel[(1,)](x, torch.tensor([2**33 + 5]), out, True, N=n, REPEAT=repeat)
    total = x.sum(0) + 3 + 1 + 5
    pairs = total.reshape(2, -1)
    expected = [torch.cat([pairs.sum(0), pairs.max(0).values]), pairs.T.flatten()]
    expected.append(torch.exp2(total.sigmoid()))
    torch.testing.assert_close(out, torch.stack(expected), rtol=1e-6, atol=1e-6)


@triton.jit
def wide_range_kernel(o_ptr, lo, hi, index_ptr):
    hi64 = tl.load(index_ptr)
    count = 0
    for j in tl.range(lo, hi, 2, num_stages=2):
        count += j
    tl.store(o_ptr, count)
    for j in range(hi64 - 2, hi64):
        tl.store(o_ptr + 1, j)


def test_loop_bounds_may_be_tensors() -> None:
    out = torch.zeros(2, dtype=torch.int64)
    wide_range_kernel[(1,)](out, 3, 10, torch.tensor([2**40]))
    assert out.tolist() == [3 + 5 + 7 + 9, 2**40 - 1]


@triton.jit
def block_and_kernel(o_ptr):
    i = tl.arange(0, 16)
    mask = (i > 3) and (i < 8)
    tl.store(o_ptr + i, 1.0, mask=mask)


@triton.jit
def block_not_kernel(o_ptr):
    i = tl.arange(0, 16)
    tl.store(o_ptr + i, 1.0, mask=not i > 3)


@pytest.mark.parametrize("kernel", [block_and_kernel, block_not_kernel], ids=["and", "not"])
def test_a_python_operator_on_a_block_is_refused(kernel: Any) -> None:
    with pytest.raises(Exception, match="take scalars"):
        kernel[(1,)](torch.zeros(16))


@triton.jit
def bad_combine_kernel(x_ptr, SIZE: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.reduce(x, 0, widening)


@triton.jit
def widening(a, b):
    return a.to(tl.float32) + b.to(tl.float32)


def test_a_combine_that_changes_its_type_is_refused() -> None:
    with pytest.raises(Exception, match="combine returned fp32 where the input is bf16"):
        bad_combine_kernel[(1,)](torch.ones(16, dtype=torch.bfloat16), SIZE=16)


@triton.jit
def atomic_kernel(x_ptr):
    tl.atomic_add(x_ptr, tl.full((), 1.0, x_ptr.dtype.element_ty))


def test_a_bf16_atomic_is_refused() -> None:
    with pytest.raises(Exception, match="no bf16 atomics"):
        atomic_kernel[(1,)](torch.ones(1, dtype=torch.bfloat16))


SHAPES = {
    "ints": [4, 1, 8],
    "constexpr": [tl.constexpr(4), 16],
    "tuple": tl.tuple([tl.constexpr(2), tl.constexpr(64)]),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_what_is_kept_of_a_type_is_what_triton_says(kind: str) -> None:
    shape, handle = SHAPES[kind], triton_patch.ti.TensorHandle(np.zeros(1, np.float16), tl.float16)
    for element in (tl.float16, tl.pointer_type(tl.int8)):
        shipped = object.__new__(tl.block_type)
        type_memo._BLOCK_INIT(shipped, element, shape)
        own = tl.block_type(element, shape)
        assert own == shipped and (own.name, own.numel) == (shipped.name, shipped.numel)
        assert tl.block_type(element, own.shape) == shipped  # the shape of another type
        held = object.__new__(tl.tensor)
        type_memo._TENSOR_INIT(held, handle, shipped)
        kept = tl.tensor(handle, own)
        assert repr(kept.shape) == repr(held.shape) and repr(kept.numel) == repr(held.numel)
        assert (kept.dtype, kept.type, kept.handle) == (held.dtype, held.type, handle)


@pytest.mark.parametrize(
    ("shape", "error"), [([3], ValueError), ([4.0], TypeError), ([], TypeError)]
)
def test_a_shape_that_triton_refuses_is_refused(shape: list[float], error: type[Exception]) -> None:
    with pytest.raises(error):
        tl.block_type(tl.float32, shape)


@triton.jit
def joined_kernel(x_ptr, y_ptr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.arange(0, N), tl.arange(0, M)
    x = tl.load(x_ptr + rows[:, None] + tl.zeros((1, M), tl.int32)) + columns[None, :] * 100.0
    x = x + tl.arange(0, K)  # of one axis less
    tl.store(y_ptr + rows[:, None] * M + columns, x)


def test_blocks_of_other_shapes_are_joined_or_refused() -> None:
    x, y = torch.arange(4.0), torch.empty(4, 8)
    joined_kernel[(1,)](x, y, N=4, M=8, K=8)
    assert torch.equal(y, x[:, None] + torch.arange(8.0) * 101)
    with pytest.raises(Exception, match="incompatible dimensions"):
        joined_kernel[(1,)](x, y, N=4, M=8, K=4)


def test_installing_again_changes_nothing() -> None:
    interpreter = triton_patch.ti
    before = interpreter.InterpreterBuilder.create_atomic_rmw, interpreter._implicit_cvt
    triton_patch.install()
    assert before == (interpreter.InterpreterBuilder.create_atomic_rmw, interpreter._implicit_cvt)


def test_an_unknown_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = triton_patch.ti
    monkeypatch.delattr(interpreter.ScanOps, "cumprod")
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", lambda self, a, b: None)
    with pytest.raises(RuntimeError, match=r"create_dot, ScanOps\.cumprod differ"):
        triton_patch._check_internals()
