"""Cache objects: frozen views over tensors that the caller allocates.

A history grows by appending rows in place; only ``lengths`` and the rows themselves change. Rows
lie end to end in one tensor a sequence (:class:`DenseCache`) or in pages that a block table finds
(:class:`PagedCache`). What a history is stored as is the cache's affair: a dtype, or e4m3 beside
scales (:class:`attncc.Quantised`); the declaration and the call stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attncc.dsl.axes import PAGE, PAGES, Pattern, block_axis, paged, parse, scales_of
from attncc.dsl.build import Declaration
from attncc.dsl.errors import CacheError
from attncc.dsl.ir import Lifetime, Tensor
from attncc.runtime import checks
from attncc.runtime.quantised import Quantised

Storage = torch.dtype | Quantised
"""What a history may be stored as."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one history: of its elements, and of its scales (0 if it is not quantised)."""

    data: int
    scales: int

    @property
    def total(self) -> int:
        """Both."""
        return self.data + self.scales


@dataclass(frozen=True, slots=True)
class DenseCache:
    """One tensor ``[B, capacity, ...]`` per history of an op, and how much of each row is filled.

    Attributes:
        tensors: by name of the op's ``Cache`` arguments, in their patterns with S = capacity.
        lengths: int32 ``[B]``, tokens held. A call that is given the cache appends its tokens and
            adds their number here, on the device.
        scales: of histories stored as e4m3, by name; :mod:`attncc.runtime.quantised` has the
            layout, ``[B Hkv D' S]`` for ``[B S Hkv D]``, and the rule.
    """

    tensors: Mapping[str, torch.Tensor]
    lengths: torch.Tensor
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def allocate(
        op: Any,
        *,
        sizes: Mapping[str, int],
        capacity: int,
        dtype: Storage | Mapping[str, Storage] = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> DenseCache:
        """An empty cache for an op.

        Args:
            op: the op (or its declaration); its ``Cache`` tensors are allocated.
            sizes: sizes of ``B`` and of every other axis of those tensors but S.
            capacity: most tokens a sequence may hold.
            dtype: storage, of all or by name.
            device: where it lives.

        Raises:
            CacheError: the op has no ``Cache``, a size or a history's storage is missing, or a
                block does not divide its axis.
            DtypeError: no call takes a history of that dtype.
        """
        name, histories = _histories(op)
        full = {**sizes, "S": capacity}
        patterns = {t.name: t.pattern for t in histories}
        tensors, scales = storage(name, histories, patterns, full, dtype, device)
        lengths = torch.zeros(full["B"], dtype=torch.int32, device=device)
        return DenseCache(tensors, lengths, scales)

    def pattern(self, op: str, t: Tensor) -> Pattern:
        """Memory axes of a history: the declared ones."""
        return t.pattern

    def bytes(self) -> dict[str, Bytes]:
        """What each history's elements and scales take."""
        return _bytes(self)


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
        scales: of histories stored as e4m3, by name; :mod:`attncc.runtime.quantised` has the
            layout, ``[pages Hkv D' page]`` for ``[pages page Hkv D]``, and the rule.
    """

    pages: Mapping[str, torch.Tensor]
    block_table: torch.Tensor
    lengths: torch.Tensor
    layouts: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def allocate(
        op: Any,
        *,
        sizes: Mapping[str, int],
        capacity: int,
        page: int,
        pages: int | None = None,
        layouts: Mapping[str, str] | None = None,
        dtype: Storage | Mapping[str, Storage] = torch.bfloat16,
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
            dtype: storage, of all or by name.
            device: where it lives.

        Raises:
            CacheError: the op has no ``Cache``, a size or a history's storage is missing, a layout
                does not fit, or a block does not divide its axis.
            DtypeError: no call takes a history of that dtype.
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
        patterns = {t.name: cache.pattern(name, t) for t in histories}
        held, scales = storage(name, histories, patterns, full, dtype, device)
        return PagedCache(held, cache.block_table, cache.lengths, cache.layouts, scales)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The pages by name."""
        return self.pages

    def bytes(self) -> dict[str, Bytes]:
        """What each history's elements and scales take."""
        return _bytes(self)

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


def storage(
    op: str, histories: Iterable[Tensor], patterns: Mapping[str, Pattern],
    sizes: Mapping[str, int], dtype: Storage | Mapping[str, Storage], device: torch.device | str,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
    """Zeros for histories, and for the scales of those that are quantised.

    Args:
        op: the op's name.
        histories: the tensors of its signature.
        patterns: memory axes by name.
        sizes: every axis.
        dtype: storage, of all or by name.
        device: where they live.

    Raises:
        CacheError: a size or a history's storage is missing, or a block does not divide its axis.
        DtypeError: no call takes a history of that dtype.
    """
    tensors, scales = {}, {}
    for t in histories:
        name, pattern = t.name, patterns[t.name]
        if isinstance(dtype, Mapping) and name not in dtype:
            raise CacheError(
                "a storage is missing", op=op, argument=name, expected="an entry in dtype="
            )
        own = dtype[name] if isinstance(dtype, Mapping) else dtype
        shape = _shape(op, name, pattern, sizes)
        plain = own.dtype if isinstance(own, Quantised) else _plain(op, name, own)
        tensors[name] = torch.zeros(shape, dtype=plain, device=device)
        if isinstance(own, Quantised):
            axis = scaled_axis(op, t)
            width = sizes[axis]
            block = own.block or width
            if not block or width % block:
                raise CacheError(
                    "the block does not divide the row",
                    op=op, argument=name, axis=axis, expected=f"a multiple of {block}", found=width,
                )  # fmt: skip
            full = {**sizes, block_axis(axis): width // block}
            shape = _shape(op, name, scales_of(pattern, axis), full)
            scales[name] = torch.zeros(shape, dtype=own.scale_dtype, device=device)
    return tensors, scales


def _plain(op: str, name: str, dtype: torch.dtype) -> torch.dtype:
    """A dtype that some call takes a history of: numbers, or labels such as document ids."""
    allowed = (*checks.REAL, *checks.WHOLE)
    return checks.usable(op, name, dtype, allowed, "no call takes a history of this dtype")


def scaled_axis(op: str, t: Tensor) -> str:
    """The axis that a history's scales run along: the innermost of its declaration.

    Raises:
        CacheError: the history has no axis besides those of sequences and tokens.
    """
    axis = t.pattern.axes[-1]
    if axis in ("B", "S", "T") or "S" not in t.pattern.axes:
        raise CacheError(
            "no rows that a scale could belong to",
            op=op, argument=t.name, expected="[... S ... D]", found=f"[{t.pattern}]",
        )  # fmt: skip
    return axis


def _bytes(cache: Cache) -> dict[str, Bytes]:
    none = torch.empty(0)
    return {
        name: Bytes(data.nbytes, cache.scales.get(name, none).nbytes)
        for name, data in cache.tensors.items()
    }


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
