"""Cache objects: frozen views over tensors that the caller allocates.

A history grows by appending rows in place; only ``lengths`` and the rows themselves change. Rows
lie end to end in one tensor a sequence (:class:`DenseCache`) or in pages that a block table finds
(:class:`PagedCache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attncc.dsl.axes import PAGE, PAGES, Pattern, paged, parse
from attncc.dsl.build import Declaration
from attncc.dsl.errors import CacheError
from attncc.dsl.ir import Lifetime, Tensor


@dataclass(frozen=True, slots=True)
class DenseCache:
    """One tensor ``[B, capacity, ...]`` per history of an op, and how much of each row is filled.

    Attributes:
        tensors: by name of the op's ``Cache`` arguments, in their patterns with S = capacity.
        lengths: int32 ``[B]``, tokens held. A call that is given the cache appends its tokens and
            adds their number here, on the device.
    """

    tensors: Mapping[str, torch.Tensor]
    lengths: torch.Tensor

    @staticmethod
    def allocate(
        op: Any,
        *,
        sizes: Mapping[str, int],
        capacity: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> DenseCache:
        """An empty cache for an op.

        Args:
            op: the op (or its declaration); its ``Cache`` tensors are allocated.
            sizes: sizes of ``B`` and of every other axis of those tensors but S.
            capacity: most tokens a sequence may hold.
            dtype: storage dtype.
            device: where it lives.

        Raises:
            CacheError: the op has no ``Cache``, or a size is missing.
        """
        name, histories = _histories(op)
        full = {**sizes, "S": capacity}
        tensors = {
            t.name: torch.zeros(_shape(name, t.name, t.pattern, full), dtype=dtype, device=device)
            for t in histories
        }
        return DenseCache(tensors, torch.zeros(full["B"], dtype=torch.int32, device=device))

    def pattern(self, op: str, t: Tensor) -> Pattern:
        """Memory axes of a history: the declared ones."""
        return t.pattern


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Pages of rows shared by all sequences, and a table of the pages that each sequence owns.

    Row ``i`` of sequence ``b`` lies in page ``block_table[b, i // page]`` at ``i % page``. The page
    size is compiled into the kernels; the table, the lengths and the number of pages are data, so
    that a captured CUDA graph may be replayed after changing them in place. Prefill and decode may
    be mixed in one packed call. Sequences may share full pages that nobody writes (a prefix).

    Attributes:
        pages: by name of the op's ``Cache`` arguments: ``[pages, page, ...]``, the history's
            pattern with ``pages`` in place of B and ``page`` in place of S, any strides (keys and
            values may interleave in one allocation) with a dense innermost axis.
        block_table: int32 ``[B, most pages of a sequence]``. Places past a sequence's rows are not
            read and may hold anything; -1 is a place without a page.
        lengths: int32 ``[B]``, tokens held. A call that is given the cache appends its tokens and
            adds their number here, on the device.
        layouts: for histories whose pages are laid out otherwise, the axes in memory order, for
            instance ``{"k": "pages Hkv page D"}``.
    """

    pages: Mapping[str, torch.Tensor]
    block_table: torch.Tensor
    lengths: torch.Tensor
    layouts: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def allocate(
        op: Any,
        *,
        sizes: Mapping[str, int],
        capacity: int,
        page: int,
        pages: int | None = None,
        layouts: Mapping[str, str] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> PagedCache:
        """An empty cache in which every sequence owns the pages for ``capacity`` tokens.

        Args:
            op: the op (or its declaration); pages for its ``Cache`` tensors are allocated.
            sizes: sizes of ``B`` and of every other axis of those tensors but S.
            capacity: tokens that each sequence has pages for.
            page: rows of a page.
            pages: pages in all; just enough if None.
            layouts: as the attribute.
            dtype: storage dtype.
            device: where it lives.

        Raises:
            CacheError: the op has no ``Cache``, a size is missing, or a layout does not fit.
        """
        name, histories = _histories(op)
        if "B" not in sizes:
            raise CacheError("a size is missing", op=name, axis="B", expected="an entry in sizes=")
        each = -(-capacity // page)
        table = torch.arange(sizes["B"] * each, dtype=torch.int32, device=device)
        full = {**sizes, PAGES: table.numel() if pages is None else pages, PAGE: page}
        cache = PagedCache(
            {},
            table.view(sizes["B"], each),
            torch.zeros(sizes["B"], dtype=torch.int32, device=device),
            dict(layouts or {}),
        )
        held = {
            t.name: torch.zeros(
                _shape(name, t.name, cache.pattern(name, t), full), dtype=dtype, device=device
            )
            for t in histories
        }
        return PagedCache(held, cache.block_table, cache.lengths, cache.layouts)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The pages by name."""
        return self.pages

    def pattern(self, op: str, t: Tensor) -> Pattern:
        """Memory axes of a history's pages.

        Raises:
            CacheError: a history without B and S, or a layout with other axes.
        """
        if not {"B", "S"} <= set(t.pattern.axes):
            raise CacheError(
                "only a history along B and S can lie in pages",
                op=op, argument=t.name, expected="[B S ...]", found=f"[{t.pattern}]",
            )  # fmt: skip
        plain = paged(t.pattern)
        if t.name not in self.layouts:
            return plain
        given = parse(self.layouts[t.name])
        if set(given.axes) != set(plain.axes):
            raise CacheError(
                "a page layout with other axes",
                op=op, argument=f"layouts[{t.name}]", expected=f"the axes of [{plain}]",
                found=f"[{given}]",
            )  # fmt: skip
        return given


Cache = DenseCache | PagedCache


def _histories(op: Any) -> tuple[str, list[Tensor]]:
    declaration: Declaration = getattr(op, "declaration", op)
    found = [t for t in declaration.tensors if t.lifetime is Lifetime.CACHE]
    if not found:
        raise CacheError("the op has no Cache argument", op=declaration.name)
    return declaration.name, found


def _shape(op: str, argument: str, pattern: Pattern, sizes: Mapping[str, int]) -> list[int]:
    return [_extent(op, argument, dim, sizes) for dim in pattern.dims]


def _extent(op: str, argument: str, dim: Iterable[str], sizes: Mapping[str, int]) -> int:
    n = 1
    for axis in dim:
        if axis not in sizes:
            raise CacheError(
                "a size is missing",
                op=op, argument=argument, axis=axis, expected="an entry in sizes=",
            )  # fmt: skip
        n *= sizes[axis]
    return n
