"""Products of two tensors beside the folds: matrix products of torch, done again when recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from attncc.dsl.axes import union
from attncc.runtime.recorder import step


@dataclass(frozen=True, slots=True)
class Terms:
    """What a product means, and where its operands lie.

    Attributes:
        left: axes of the left operand, one for each dimension after ``left_shape``.
        left_shape: its shape as named axes; a workspace is flat.
        right: axes of the right one.
        right_shape: its shape as named axes.
        over: axes that are summed.
        axes: axes of the result.
        dtype: of the result; operands of another one are converted first.
    """

    left: tuple[str, ...]
    left_shape: tuple[int, ...]
    right: tuple[str, ...]
    right_shape: tuple[int, ...]
    over: tuple[str, ...]
    axes: tuple[str, ...]
    dtype: torch.dtype


@step
def product(left: torch.Tensor, right: torch.Tensor, terms: Terms) -> torch.Tensor:
    """A product as a new tensor ``[*terms.axes]``, its innermost axis dense."""
    value = _product(left, right, terms, None)
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()


@step
def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, terms: Terms) -> None:
    """A product written into ``out``, whose memory axes may hold several of ``terms.axes``."""
    sizes = dict(zip((*terms.left, *terms.right), (*terms.left_shape, *terms.right_shape),
                     strict=True))  # fmt: skip
    target = out.view([sizes[a] for a in terms.axes])
    value = _product(left, right, terms, target)
    if value is not target:
        target.copy_(value)


@step
def dense_rows(pages: torch.Tensor, table: torch.Tensor, at: int, row: int) -> torch.Tensor:
    """A paged history as ``[B, capacity, ...]``: every page that a table names, read or not.

    Args:
        pages: the pool.
        table: int32 ``[B, n]``; places that are not used may hold anything.
        at: dimension of the pool that counts pages.
        row: dimension that counts the rows of a page.
    """
    order = [at, row, *(i for i in range(pages.dim()) if i not in (at, row))]
    held = pages.permute(order)
    return held[table.long().clamp(0, max(held.shape[0] - 1, 0))].flatten(1, 2)


def _product(
    left: torch.Tensor, right: torch.Tensor, terms: Terms, out: torch.Tensor | None
) -> torch.Tensor:
    """By batched matrix product: shared axes, then rows of the left, then columns of the right."""
    both = [a for a in terms.left if a in terms.right]
    batch = [a for a in both if a not in terms.over]
    inner = [a for a in both if a in terms.over]
    rows = [a for a in terms.left if a not in (*both, *terms.over)]
    columns = [a for a in terms.right if a not in (*both, *terms.over)]
    sizes = dict(zip((*terms.left, *terms.right), (*terms.left_shape, *terms.right_shape),
                     strict=True))  # fmt: skip

    def matrix(value: torch.Tensor, shape: tuple[int, ...], axes: tuple[str, ...],
               order: list[list[str]]) -> torch.Tensor:  # fmt: skip
        lies, alone = value.view(shape), [a for a in axes if a in terms.over and a not in both]
        if alone:  # the other operand lacks these
            lies = lies.sum([axes.index(a) for a in alone], dtype=_wide(terms.dtype))
            axes = tuple(a for a in axes if a not in alone)
        lies = lies.to(terms.dtype).permute([axes.index(a) for group in order for a in group])
        return lies.reshape([prod(sizes[a] for a in group) for group in order])

    a = matrix(left, terms.left_shape, terms.left, [batch, rows, inner])
    b = matrix(right, terms.right_shape, terms.right, [batch, inner, columns])
    order = (*batch, *rows, *columns)
    target = None if out is None else _as_matrix(out, terms.axes, batch, rows, columns)
    with _full_precision(a):
        if target is not None and not (
            torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
        ):
            torch.bmm(a, b, out=target)
            assert out is not None
            return out
        made = torch.bmm(a, b) if batch else torch.mm(a[0], b[0])
    return made.view([sizes[x] for x in order]).permute([order.index(x) for x in terms.axes])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of numbers of a type add up in."""
    return torch.promote_types(dtype, torch.float32)


def _as_matrix(out: torch.Tensor, axes: tuple[str, ...], *groups: list[str]) -> torch.Tensor | None:
    """The target as ``[batch, rows, columns]`` without a copy, where its layout allows it."""
    order = [axes.index(a) for group in groups for a in group]
    shape = [prod(out.shape[axes.index(a)] for a in group) for group in groups]
    try:
        return out.permute(order).view(shape)
    except RuntimeError:  # the strides of axes that become one do not fit
        return None


_FLAGS: dict[torch.dtype, tuple[tuple[str, object], ...]] = {
    torch.bfloat16: (("allow_bf16_reduced_precision_reduction", False),),
    torch.float16: (
        ("allow_fp16_reduced_precision_reduction", False),
        ("allow_fp16_accumulation", False),
    ),
    torch.float32: (
        ("fp32_precision", "ieee")
        if hasattr(torch.backends.cuda.matmul, "fp32_precision")
        else ("allow_tf32", False),  # before torch 2.9
    ),
}
"""What of ``torch.backends.cuda.matmul`` makes products sum in fp32, fp32 operands as they are."""


@contextmanager
def _full_precision(operand: torch.Tensor) -> Iterator[None]:
    """Sums in fp32, whatever the process allows elsewhere."""
    flags = torch.backends.cuda.matmul
    wanted = _FLAGS.get(operand.dtype, ()) if operand.device.type == "cuda" else ()
    before = {n: getattr(flags, n) for n, value in wanted if getattr(flags, n, value) != value}
    for name, value in wanted:
        if name in before:
            setattr(flags, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(flags, name, value)


def result_axes(
    left: tuple[str, ...], right: tuple[str, ...], axes: tuple[str, ...]
) -> tuple[str, ...]:
    """Axes of a result whose operands lack some: packed rows have no ``B``."""
    have = union(left, right)
    return tuple(a for a in axes if a in have)
