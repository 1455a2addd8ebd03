"""Makes Triton's CPU interpreter compute bf16, fp16 and fp8 as a GPU would.

As shipped (3.6.0 and 3.7.1) the interpreter keeps bf16 and fp8 as bit patterns and then does
arithmetic on those patterns, rounds wrongly when it casts, accumulates fp16 dots in fp16, and
patches `triton.language` again for every device function call. `install()` replaces the parts of
`triton.runtime.interpreter` that do so:

* bits stay the storage form (loads and stores are untouched); every operation decodes its
  operands to fp32, computes, and rounds to nearest even once;
* `tl.dot` decodes exactly and accumulates in fp32; of fp32 operands at `tf32x3`, `bf16x3`
  and `bf16x6` it takes the products that Triton makes of one and truncates as a tensor core does
  (other products are exact);
* `tl.reduce` and `tl.associative_scan` with a jitted combine run in log2(n) steps on whole blocks,
  not element by element;
* a Python float argument becomes an fp32 scalar and the variable of a `range` / `tl.range` loop an
  int32 scalar, as in compiled code (so `scale * bf16` and `j.to(tl.int64)` mean the same);
* `and`, `or` and `not` on a block are refused: Python would silently take one operand;
* the language is patched once for the process, and what is known about types is kept
  (`type_memo`). A process that has interpreted cannot compile.

Casts agree with torch 2.13 bit for bit: fp32 -> fp8e4m3fn saturates (1000.0 and inf give 448), as
Triton's `cvt.rn.satfinite` does; fp32 -> fp8e5m2 overflows to inf, where Triton's NVIDIA backend
saturates at 57344: kernels that may overflow e5m2 must clamp.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as ti
from triton.runtime import jit

from tests.interpreter import type_memo

Array = np.ndarray[Any, Any]

_FLOAT8 = {"fp8e4nv": (4, 3), "fp8e5": (5, 2)}  # exponent bits, mantissa bits
_COMPARISONS = frozenset(
    (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
)

_SHIPPED_VISIT_ASSIGN = ti.ASTTransformer.visit_Assign

# What is replaced, with the parameters it must have: (owner, method, parameters after self).
_EXPECTED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("InterpreterBuilder", "cast_impl", ("src", "dst_type")),
    ("InterpreterBuilder", "create_fp_to_fp", ("src", "dst_type", "rounding_mode")),
    ("InterpreterBuilder", "binary_op", ("lhs", "rhs", "op")),
    ("InterpreterBuilder", "unary_op", ("arg", "op")),
    ("InterpreterBuilder", "create_minnumf", ("lhs", "rhs")),
    ("InterpreterBuilder", "create_maxnumf", ("lhs", "rhs")),
    ("InterpreterBuilder", "create_clampf", ("arg", "lo", "hi", "propagate_nans")),
    ("InterpreterBuilder", "create_fma", ("x", "y", "z")),
    ("InterpreterBuilder", "create_rsqrt", ("arg",)),
    (
        "InterpreterBuilder",
        "create_dot",
        ("a", "b", "d", "input_precision", "max_num_imprecise_acc"),
    ),
    ("InterpreterBuilder", "create_atomic_rmw", ("rmwOp", "ptr", "val", "mask", "sem", "scope")),
    ("ReduceScanOpInterface", "to_tensor", ("ret", "dtype")),
    ("ReduceOps", "unravel", ("input", "axis")),
    ("ReduceOps", "generic_reduce", ("input",)),
    ("ReduceOps", "min_max", ("input", "val_reduce_op", "idx_reduce_op")),
    ("ReduceOps", "sum", ("input",)),
    ("ScanOps", "cumsum", ("input",)),
    ("ScanOps", "cumprod", ("input",)),
    ("ScanOps", "generic_scan", ("input",)),
    ("InterpretedFunction", "rewrite", ()),
    ("ASTTransformer", "visit_Assign", ("node",)),
    ("GridExecutor", "__call__", ("args_dev", "kwargs")),
)
_EXPECTED_NAMES = (
    *("TensorHandle", "_LangPatchScope", "_patch_lang", "_patch_lang_tensor", "_patch_builtin"),
    *("_patch_lang_core", "_implicit_cvt", "_get_np_dtype", "_validate_np_data_size"),
    *("interpreter_builder", "interpreter_semantic"),
)


# --- number formats ---------------------------------------------------------------------------


@functools.cache
def _float8_values(name: str) -> Array:
    """The fp32 value of each of the 256 codes of an fp8 format."""
    exponent_bits, mantissa_bits = _FLOAT8[name]
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(256)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    if name == "fp8e5":
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    else:
        values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values).astype(np.float32)


@functools.cache
def _float8_midpoints(name: str) -> Array:
    """Midpoints between neighbouring non-negative codes, the last before overflow."""
    last = 0x7B if name == "fp8e5" else 0x7E
    values = _float8_values(name)[: last + 1].astype(np.float64)
    step = values[-1] - values[-2]
    return (values + np.append(values[1:], values[-1] + step)).astype(np.float32) / 2


def _is_packed(dtype: tl.dtype) -> bool:
    """Whether the interpreter keeps `dtype` as integers: bf16 and every fp8."""
    return dtype.name == "bf16" or dtype.name.startswith("fp8")


def _require_float8(dtype: tl.dtype) -> str:
    if dtype.name not in _FLOAT8:
        raise NotImplementedError(f"triton_patch: {dtype.name} is not interpreted")
    return str(dtype.name)


def decode(data: Array, dtype: tl.dtype) -> Array:
    """Returns `data`, stored as `dtype`, as real numbers (fp32 for bf16 and fp8, else as it is)."""
    dtype = dtype.scalar
    if dtype.name == "bf16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if _is_packed(dtype):
        return _float8_values(_require_float8(dtype))[data]
    return data


def encode(values: Array, dtype: tl.dtype) -> Array:
    """Rounds fp32 `values` to nearest even, as torch does; returns the storage form of `dtype`."""
    dtype = dtype.scalar
    if not _is_packed(dtype):
        return values.astype(ti._get_np_dtype(dtype))
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(values.shape)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    nan = magnitude > 0x7F800000
    if dtype.name == "bf16":
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16
        return np.where(nan, np.uint16(0x7FC0), rounded.astype(np.uint16))
    name = _require_float8(dtype)
    midpoints = _float8_midpoints(name)
    real = magnitude.view(np.float32)
    code = np.searchsorted(midpoints, real, side="left")
    tie = midpoints[np.minimum(code, len(midpoints) - 1)] == real
    code = code + (tie & (code & 1 == 1))
    if name == "fp8e4nv":
        code = np.minimum(code, 0x7E)
    return (np.where(nan, 0x7F, code) | (bits >> np.uint32(24)) & 0x80).astype(np.uint8)


def _encode_toward_zero(values: Array, dtype: tl.dtype) -> Array:
    """As `encode`, rounding toward zero."""
    code = encode(values, dtype)
    unsigned = code.view(f"u{code.dtype.itemsize}")
    away = np.abs(decode(code, dtype).astype(np.float32)) > np.abs(values)
    return (unsigned - away.astype(unsigned.dtype)).view(code.dtype)


def _real(handle: Any) -> Array:
    """The numbers in a handle, at fp32 or more for every floating type but fp16."""
    return decode(handle.data, handle.dtype)


def _wide(handle: Any) -> Array:
    """As `_real`, with fp16 widened to fp32 too."""
    data = _real(handle)
    return data.astype(np.float32) if data.dtype == np.float16 else data


# --- the builder ------------------------------------------------------------------------------


def _cast_impl(self: Any, src: Any, dst_type: tl.dtype) -> Any:
    target = dst_type.scalar
    data = _real(src)
    # torch goes through fp32 to every 16- and 8-bit format.
    if _is_packed(target) or (target == tl.float16 and data.dtype != np.float16):
        data = data.astype(np.float32, copy=False)
    return ti.TensorHandle(encode(data, target), target)


def _create_fp_to_fp(self: Any, src: Any, dst_type: tl.dtype, rounding_mode: Any) -> Any:
    if rounding_mode is None or rounding_mode == ti._ir.ROUNDING_MODE.RTNE:
        return _cast_impl(self, src, dst_type)
    target = dst_type.scalar
    values = _real(src).astype(np.float32, copy=False)
    return ti.TensorHandle(_encode_toward_zero(values, target), target)


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    dtype = lhs.dtype.scalar
    output = op(_real(lhs), _real(rhs))
    if op in _COMPARISONS:  # as shipped: a bool block that calls itself fp32
        return ti.TensorHandle(output, tl.int1)
    if _is_packed(dtype):
        output = encode(output, dtype)
    elif not ti._validate_np_data_size(output, dtype):
        output = output.astype(ti._get_np_dtype(dtype))
    return ti.TensorHandle(output, dtype)


def _unary_op(self: Any, arg: Any, op: Any) -> Any:
    dtype = arg.dtype.scalar
    if dtype.is_floating():
        return ti.TensorHandle(encode(op(_wide(arg)), dtype), dtype)
    return ti.TensorHandle(op(arg.data), dtype)


def _create_minnumf(self: Any, lhs: Any, rhs: Any) -> Any:
    return self.binary_op(lhs, rhs, np.fmin)


def _create_maxnumf(self: Any, lhs: Any, rhs: Any) -> Any:
    return self.binary_op(lhs, rhs, np.fmax)


def _create_clampf(self: Any, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
    if propagate_nans == ti._ir.PROPAGATE_NAN.ALL:
        output = np.minimum(np.maximum(_real(arg), _real(lo)), _real(hi))
    else:
        output = np.fmin(np.fmax(_real(arg), _real(lo)), _real(hi))
    return ti.TensorHandle(encode(output, arg.dtype), arg.dtype.scalar)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    exact = _real(x).astype(np.float64) * _real(y) + _real(z)
    if not z.dtype.scalar.is_fp64():
        exact = exact.astype(np.float32)
    return ti.TensorHandle(encode(exact, z.dtype), z.dtype.scalar)


def _create_rsqrt(self: Any, arg: Any) -> Any:
    return self.unary_op(arg, lambda data: np.reciprocal(np.sqrt(data)))


def _to_tf32(x: Array, half: int) -> Array:
    """The upper 19 bits: nearest, ties away (`cvt.rna`), for a half of 0x1000; cut off for 0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    kept = ((bits + np.uint32(half)) & np.uint32(0xFFFFE000)).view(np.float32).reshape(x.shape)
    return np.where(np.isfinite(x), kept, x).astype(np.float32)


def _tensor_core(x: Array, y: Array, sums: Array, terms: int) -> Array:
    """Products of narrow operands added to `sums`, so many terms at a time.

    Each time the terms and the sum so far are cut off two bits below the last one of the largest,
    added exactly, and the result is cut off to fp32: what probes of Hopper's tensor cores found
    (Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores", 2025).
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    x_exponent, y_exponent = (np.where(v == 0, -500, np.frexp(v)[1]) - 1 for v in (x, y))
    for k in range(0, x.shape[-1], terms):
        at = slice(k, k + terms)
        exponents = x_exponent[..., :, at, None] + y_exponent[..., None, at, :]
        largest = np.maximum(exponents.max(-2), np.where(sums == 0, -500, np.frexp(sums)[1]) - 1)
        unit = np.ldexp(1.0, np.maximum(largest, -300) - 25)
        products = x[..., :, at, None] * y[..., None, at, :]
        exact = np.trunc(products / unit[..., None, :]).sum(-2) + np.trunc(sums / unit)
        exact *= unit
        near = exact.astype(np.float32)
        sums = np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near)
    return sums


def _chain(products: list[tuple[Array, Array]], terms: int) -> Array:
    """The products of parts of operands in one accumulator; the last are the large parts.

    As in Triton's F32DotTC, what infinities leave in the small parts (NaN) counts as 0. (An
    accumulator of the dot's own is added afterwards, rounded to nearest.)
    """
    *small, (x, y) = products
    sums = np.zeros((*x.shape[:-1], y.shape[-1]), np.float32)
    for pair in small:
        sums = _tensor_core(*pair, sums, terms)
    return _tensor_core(x, y, np.where(np.isnan(sums), np.float32(0), sums), terms)


def _tf32x3(x: Array, y: Array) -> Array:
    """Three products of tf32 parts; hardware cuts the small ones off to tf32."""
    x_large, y_large = _to_tf32(x, 0x1000), _to_tf32(y, 0x1000)
    x_small, y_small = _to_tf32(x - x_large, 0), _to_tf32(y - y_large, 0)
    return _chain([(x_small, y_large), (x_large, y_small), (x_large, y_large)], 8)


def _bf16_parts(x: Array) -> list[Array]:
    parts = []
    for _ in range(3):
        parts.append(decode(encode(x, tl.bfloat16), tl.bfloat16))
        x = x - parts[-1]
    return parts


def _bf16x3(x: Array, y: Array) -> Array:
    """Three products of the first two bf16 parts."""
    (x0, x1, _), (y0, y1, _) = _bf16_parts(x), _bf16_parts(y)
    return _chain([(x1, y0), (x0, y1), (x0, y0)], 16)


def _bf16x6(x: Array, y: Array) -> Array:
    """Six products of the three bf16 parts that make up an fp32 number."""
    (x0, x1, x2), (y0, y1, y2) = _bf16_parts(x), _bf16_parts(y)
    return _chain([(x1, y1), (x2, y0), (x0, y2), (x1, y0), (x0, y1), (x0, y0)], 16)


def _create_dot(
    self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    dtype = d.dtype.scalar
    if not dtype.is_floating():
        return ti.TensorHandle(np.matmul(a.data, b.data, dtype=d.data.dtype) + d.data, dtype)
    named = ti._ir.INPUT_PRECISION
    known = {named.TF32x3: _tf32x3, named.BF16x3: _bf16x3, named.BF16x6: _bf16x6}
    split = known.get(input_precision, np.matmul)
    single = a.dtype.scalar.is_fp32() and b.dtype.scalar.is_fp32()
    product = split if single else np.matmul
    return ti.TensorHandle(encode(product(_wide(a), _wide(b)) + _wide(d), dtype), dtype)


def _get_bf16(self: Any, value: float) -> Any:
    return ti.TensorHandle(encode(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)


def _patch_builder() -> None:
    builder = ti.InterpreterBuilder
    shipped_atomic_rmw = builder.create_atomic_rmw

    def create_atomic_rmw(
        self: Any, rmwOp: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        if _is_packed(val.dtype.scalar):
            raise NotImplementedError(f"triton_patch: no {val.dtype.scalar} atomics on the CPU")
        return shipped_atomic_rmw(self, rmwOp, ptr, val, mask, sem, scope)

    replacements = {
        "cast_impl": _cast_impl,
        "create_fp_to_fp": _create_fp_to_fp,
        "binary_op": _binary_op,
        "unary_op": _unary_op,
        "create_minnumf": _create_minnumf,
        "create_maxnumf": _create_maxnumf,
        "create_clampf": _create_clampf,
        "create_fma": _create_fma,
        "create_rsqrt": _create_rsqrt,
        "create_dot": _create_dot,
        "create_atomic_rmw": create_atomic_rmw,
        "get_bf16": _get_bf16,
    }
    for name, function in replacements.items():
        setattr(builder, name, function)
    # Shipped: each int32 operation is done again in int64 for a check that only debug mode reads.
    live = ti.interpreter_builder
    precisions = (*live.options.allowed_dot_input_precisions, "bf16x3", "bf16x6")
    live.options = dataclasses.replace(
        live.options, sanitize_overflow=False, allowed_dot_input_precisions=precisions
    )


# --- reductions and scans ---------------------------------------------------------------------


def _combine(op: Any, left: list[Array], right: list[Array], dtypes: list[tl.dtype]) -> list[Array]:
    """Applies a jitted combine function to two lists of blocks in storage form."""
    combine = op.combine_fn
    function = combine.rewrite() if isinstance(combine, ti.InterpretedFunction) else combine.fn
    operands = [
        op.to_tensor(data, dtype)
        for side in (left, right)
        for data, dtype in zip(side, dtypes, strict=True)
    ]
    results = function(*operands)
    results = results if isinstance(results, tuple) else (results,)
    if len(results) != len(dtypes):
        raise TypeError(f"combine returned {len(results)} values for {len(dtypes)} inputs")
    output = []
    for data, result, dtype in zip(left, results, dtypes, strict=True):
        result = ti.interpreter_semantic.to_tensor(result)
        if result.dtype != dtype:
            raise TypeError(f"combine returned {result.dtype} where the input is {dtype}")
        output.append(np.broadcast_to(result.handle.data.squeeze(), data.squeeze().shape))
    return [block.reshape(data.shape) for block, data in zip(output, left, strict=True)]


def _generic_reduce(self: Any, input: tuple[Any, ...]) -> list[Any]:
    original_axis, rank = self.axis, len(input[0].shape)
    input, axis = self.unravel(input, self.axis)
    dtypes = [block.dtype for block in input]
    blocks = [np.moveaxis(block.handle.data, axis, 0) for block in input]
    while blocks[0].shape[0] > 1:  # neighbours first: order is kept, associativity is enough
        blocks = _combine(self, [x[0::2] for x in blocks], [x[1::2] for x in blocks], dtypes)
    output = []
    for block, dtype in zip(blocks, dtypes, strict=True):
        data: Any = block[0]
        if self.keep_dims:
            data = (
                data.reshape((1,) * rank) if original_axis is None else np.expand_dims(data, axis)
            )
        output.append(self.to_tensor(data, dtype))
    return output


def _generic_scan(self: Any, input: Any) -> list[Any]:
    dtypes = [block.dtype for block in input]
    blocks = [np.moveaxis(block.handle.data, self.axis, 0) for block in input]
    length, distance = blocks[0].shape[0], 1
    while distance < length:
        combined = _combine(self, [np.roll(x, distance, 0) for x in blocks], blocks, dtypes)
        blocks = [
            np.concatenate([x[:distance], y[distance:]])
            for x, y in zip(blocks, combined, strict=True)
        ]
        distance *= 2
    return [
        self.to_tensor(np.moveaxis(block, 0, self.axis), dtype)
        for block, dtype in zip(blocks, dtypes, strict=True)
    ]


def _min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    input = input[0] if isinstance(input, tuple) else input
    data = _real(input.handle)
    # nanmax and nanmin warn on an all-NaN row; fmax and fmin are the same without the warning.
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
    results = []
    if val_reduce_op is not None:
        reduce = quiet.get(val_reduce_op, val_reduce_op)
        value = np.asarray(reduce(data, axis=self.axis, keepdims=self.keep_dims))
        results.append(self.to_tensor(encode(value, input.dtype), input.dtype))
    if idx_reduce_op is not None:
        index = idx_reduce_op(data, axis=self.axis, keepdims=self.keep_dims)
        results.append(self.to_tensor(index, tl.int32))
    return results[0] if len(results) == 1 else tuple(results)


def _accumulated(self: Any, input: Any, op: Any, **options: Any) -> Any:
    """Sums or scans at fp32 and rounds once; integers and fp64 as they are."""
    value = np.asarray(op(_wide(input.handle), axis=self.axis, **options))
    return self.to_tensor(encode(value, input.dtype), input.dtype)


def _sum(self: Any, input: Any) -> Any:
    return _accumulated(self, input, np.sum, keepdims=self.keep_dims)


def _cumsum(self: Any, input: Any) -> list[Any]:
    return [_accumulated(self, input, np.cumsum)]


def _cumprod(self: Any, input: Any) -> list[Any]:
    return [_accumulated(self, input, np.cumprod)]


def _patch_reductions() -> None:
    ti.ReduceOps.generic_reduce = _generic_reduce
    ti.ReduceOps.min_max = _min_max
    ti.ReduceOps.sum = _sum
    ti.ScanOps.generic_scan = _generic_scan
    ti.ScanOps.cumsum = _cumsum
    ti.ScanOps.cumprod = _cumprod


# --- the language and the launch --------------------------------------------------------------


def _int_scalar(value: int, dtype: tl.dtype) -> Any:
    return tl.tensor(ti.TensorHandle(np.array([value], ti._get_np_dtype(dtype)), dtype), dtype)


def _tensor_range(start: Any, stop: Any = None, step: Any = 1, **options: Any) -> Any:
    """`range` and `tl.range`: yields int32 (or int64) scalars, as the compiled loop does."""
    start, stop = (0, start) if stop is None else (start, stop)
    bounds = (start, stop, 1 if step is None else step)
    wide = any(isinstance(b, tl.tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
    first, last, stride = (
        int(b.handle.data.item()) if isinstance(b, tl.tensor) else int(b) for b in bounds
    )
    for value in range(first, last, stride):
        yield _int_scalar(value, tl.int64 if wide else tl.int32)


def _scalar_bool(self: Any) -> bool:
    data = self.handle.data
    return bool(data.item()) if data.size == 1 else True  # blocks: Triton itself relies on True


@functools.cache
def _patch_language() -> None:
    """Patches `triton.language` for this process; the shipped code does it for every call."""
    scope = ti._LangPatchScope()
    for lang in (tl, tl.core):
        ti._patch_builtin(lang, ti.interpreter_builder, scope)
        ti._patch_builtin(lang.tensor, ti.interpreter_builder, scope)
        ti._patch_lang_tensor(lang.tensor, scope)
        ti._patch_lang_core(lang, scope)
        scope.set_attr(lang, "range", _tensor_range)
    ti._patch_builtin(tl.math, ti.interpreter_builder, scope)
    ti._patch_builtin(tl.core.tensor_descriptor_base, ti.interpreter_builder, scope)
    # A one-element array converts to a scalar in numpy >= 2.4 by item() only.
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    scope.set_attr(tl.tensor, "__bool__", _scalar_bool)


def _patch_lang(fn: Any) -> Any:
    _patch_language()
    return ti._LangPatchScope()  # nothing to restore


def _visit_for(self: Any, node: ast.For) -> ast.For:
    """Sends the builtin `range` to `_tensor_range` too."""
    self.generic_visit(node)
    call = node.iter
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range":
        call.func = ast.Name(id="_tensor_range", ctx=ast.Load())
    return node


def _scalar_operand(value: Any) -> Any:
    """An operand of `and`, `or`, `not`: a block has no truth value, and Python would take True."""
    if isinstance(value, tl.tensor) and value.type.is_block():
        raise TypeError("`and`, `or` and `not` take scalars: use &, | and ~ between blocks")
    return value


def _guarded(node: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(id="_scalar_operand", ctx=ast.Load()), [node], [])


def _visit_bool_op(self: Any, node: ast.BoolOp) -> ast.BoolOp:
    self.generic_visit(node)
    node.values = [_guarded(value) for value in node.values]
    return node


def _visit_unary_op(self: Any, node: ast.UnaryOp) -> ast.UnaryOp:
    self.generic_visit(node)
    if isinstance(node.op, ast.Not):
        node.operand = _guarded(node.operand)
    return node


def _visit_assign(self: Any, node: ast.Assign) -> ast.Assign:
    """As shipped, which leaves the assigned value unvisited, with its operators visited too."""
    node.value = self.visit(node.value)
    return _SHIPPED_VISIT_ASSIGN(self, node)


def _patch_launch() -> None:
    shipped_call = ti.GridExecutor.__call__
    shipped_convert = ti._implicit_cvt

    @functools.wraps(shipped_call)
    def call(self: Any, *args_dev: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            shipped_call(self, *args_dev, **kwargs)

    def implicit_convert(arg: Any) -> Any:
        if isinstance(arg, float):
            return tl.tensor(ti.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
        if isinstance(arg, bool):
            return tl.tensor(ti.TensorHandle(np.array([arg], np.bool_), tl.int1), tl.int1)
        return shipped_convert(arg)

    ti._patch_lang = _patch_lang
    ti._implicit_cvt = implicit_convert
    ti.GridExecutor.__call__ = call
    ti.ASTTransformer.visit_For = _visit_for
    ti.ASTTransformer.visit_BoolOp = _visit_bool_op
    ti.ASTTransformer.visit_UnaryOp = _visit_unary_op
    ti.ASTTransformer.visit_Assign = _visit_assign
    ti._tensor_range = _tensor_range  # rewritten kernels see the interpreter's globals
    ti._scalar_operand = _scalar_operand


# --- entry ------------------------------------------------------------------------------------


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def _check_internals() -> None:
    """Raises unless every part that is replaced looks as it did in 3.6.0 and 3.7.1."""
    wrong = [name for name in _EXPECTED_NAMES if not hasattr(ti, name)]
    for owner, name, parameters in _EXPECTED:
        function = getattr(getattr(ti, owner, None), name, None)
        if function is None or _parameters(function) != parameters:
            wrong.append(f"{owner}.{name}")
    wrong += [
        f"{owner.__name__}.{name}"
        for owner, name, parameters in type_memo.EXPECTED
        if _parameters(getattr(owner, name)) != parameters
    ]
    if wrong:
        raise RuntimeError(
            f"triton_patch knows the interpreter of Triton 3.6.0 and 3.7.1, not of "
            f"{triton.__version__}: {', '.join(wrong)} differ; adapt the patch"
        )


def install() -> None:
    """Patches the interpreter of this process; a second call does nothing.

    Raises:
        RuntimeError: `triton` was imported without `TRITON_INTERPRET=1`, or its interpreter is one
            that this patch does not know.
    """
    if getattr(ti, "_attncc_patched", False):
        return
    if isinstance(tl.standard.cumsum, jit.JITFunction):
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    _check_internals()
    _patch_builder()
    _patch_reductions()
    _patch_launch()
    type_memo.install()
    ti._attncc_patched = True
