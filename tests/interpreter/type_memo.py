"""Makes Triton's interpreter remember what it works out about types for every operation anew.

As shipped it builds each block's type, its shape and its number of elements from lists of constexpr
objects whenever an operation has a result, and compares shapes object by object: most of the time
of a kernel of small blocks. No number depends on any of that, so the facts are kept, by shape.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as ti

Sizes = tuple[int, ...]

# What is replaced, with the parameters it must have after self.
EXPECTED: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (tl.block_type, "__init__", ("element_ty", "shape")),
    (tl.tensor, "__init__", ("handle", "type")),
    (TritonSemantic, "broadcast_impl_value", ("lhs", "rhs")),
)

_BLOCK_INIT = tl.block_type.__init__
_TENSOR_INIT = tl.tensor.__init__
_BROADCAST = TritonSemantic.broadcast_impl_value
_GET_NP_DTYPE = ti._get_np_dtype


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the shipped constructors say about a shape.

    Attributes:
        sizes: ints.
        shape: the type's, of ints.
        numel: elements.
        text: as it stands in the type's name.
        tensor_shape: the tensor's, of constexpr.
        tensor_numel: elements, a constexpr.
    """

    sizes: Sizes
    shape: Any
    numel: int
    text: str
    tensor_shape: Any
    tensor_numel: Any


@functools.cache
def _facts(sizes: Sizes) -> _Facts:
    made = object.__new__(tl.block_type)
    _BLOCK_INIT(made, tl.float32, list(sizes))
    held = object.__new__(tl.tensor)
    _TENSOR_INIT(held, None, made)
    found = _Facts(sizes, made.shape, made.numel, str(made.shape), held.shape, held.numel)
    made.shape.facts = held.shape.facts = found
    return found


def _facts_of(shape: Any) -> _Facts | None:
    """Of a list or tuple of ints or constexpr; None for anything else."""
    if type(shape) is tl.tuple:
        known = vars(shape).get("facts")
        if known is not None:
            return known
        shape = shape.values
    sizes = tuple([v.value if type(v) is tl.constexpr else v for v in shape])
    return _facts(sizes) if all(isinstance(size, int) for size in sizes) else None


@functools.cache
def _scalar_facts() -> tuple[Any, Any]:
    held = object.__new__(tl.tensor)
    _TENSOR_INIT(held, None, tl.float32)
    return held.shape, held.numel


def _block_init(self: Any, element_ty: Any, shape: Any) -> None:
    facts = _facts_of(shape)
    if facts is None:
        _BLOCK_INIT(self, element_ty, shape)  # which refuses it
        return
    self.element_ty, self.facts = element_ty, facts
    self.shape, self.numel = facts.shape, facts.numel
    self.name = f"<{facts.text}, {element_ty.name}>"


def _tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        self.shape, self.numel = type.facts.tensor_shape, type.facts.tensor_numel
    else:
        self.shape, self.numel = _scalar_facts()


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    left, right = lhs.type, rhs.type
    if not (left.is_block() and right.is_block()):
        return _BROADCAST(self, lhs, rhs) if left.is_block() or right.is_block() else (lhs, rhs)
    a, b = left.facts.sizes, right.facts.sizes
    if a == b:
        return lhs, rhs
    both = tuple(map(max, a, b))
    fits = len(a) == len(b) and all(n in (1, m) for n, m in zip(a + b, both + both, strict=True))
    if not fits:
        return _BROADCAST(self, lhs, rhs)
    return _grown(self, lhs, a, both), _grown(self, rhs, b, both)


def _grown(self: Any, x: Any, sizes: Sizes, wanted: Sizes) -> Any:
    if sizes == wanted:
        return x
    handle = self.builder.create_broadcast(x.handle, wanted)
    return self.tensor(handle, tl.block_type(x.type.scalar, wanted))


@functools.cache
def _named_np_dtype(name: str) -> np.dtype[Any]:
    return _GET_NP_DTYPE(tl.dtype(name))


def _get_np_dtype(tt_dtype: Any) -> Any:
    scalar = tt_dtype.scalar
    return _GET_NP_DTYPE(scalar) if scalar.is_ptr() else _named_np_dtype(scalar.name)


def install() -> None:
    """Replace the constructors and the broadcast of this process' interpreter."""
    tl.block_type.__init__ = _block_init
    tl.tensor.__init__ = _tensor_init
    TritonSemantic.broadcast_impl_value = _broadcast
    ti._get_np_dtype = _get_np_dtype
