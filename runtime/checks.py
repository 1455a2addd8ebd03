"""Checks of a call's arguments: one error class a mistake, raised before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch

from attncc.dsl.axes import Pattern
from attncc.dsl.errors import (
    DeviceError,
    DtypeError,
    OverlapError,
    RankError,
    SeqlensError,
    SizeError,
    StrideError,
    UnknownSizeError,
)
from attncc.runtime import knobs
from attncc.runtime.tables import as_int32

REAL = (torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int32, torch.int64)


def looks(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor are looked at: never while a CUDA graph is captured.

    A call that is captured runs later, with other values, and nothing can be read meanwhile.
    """
    if tensor.device.type == "cpu":
        return True
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return knobs.check() and not capturing


def rank(op: str, name: str, tensor: torch.Tensor, pattern: Pattern) -> None:
    """The tensor has one dimension for each memory axis of its pattern."""
    if tensor.dim() != pattern.rank:
        raise RankError(
            "wrong number of axes",
            op=op,
            argument=name,
            expected=f"{pattern.rank} axes [{pattern}]",
            found=f"{tensor.dim()} axes {tuple(tensor.shape)}",
        )


def dense(op: str, name: str, tensor: torch.Tensor) -> None:
    """The innermost axis has stride 1."""
    if tensor.layout is not torch.strided:
        raise StrideError(
            "a tensor without strides",
            op=op, argument=name, expected="torch.strided", found=str(tensor.layout),
        )  # fmt: skip
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise StrideError(
            "the innermost axis must be dense",
            op=op,
            argument=name,
            expected="stride 1",
            found=f"stride {tensor.stride(-1)}",
            help="call .contiguous() on it, or lay its last axis out innermost",
        )


def device(op: str, name: str, tensor: torch.Tensor, want: torch.device) -> None:
    """The tensor lives where the others do."""
    if tensor.device != want:
        raise DeviceError(
            "arguments on different devices",
            op=op,
            argument=name,
            expected=str(want),
            found=str(tensor.device),
        )


def dtype(
    op: str, name: str, tensor: torch.Tensor, allowed: Iterable[torch.dtype], why: str = ""
) -> None:
    """The tensor's dtype is one of those allowed."""
    usable(op, name, tensor.dtype, allowed, why)


def usable(
    op: str, name: str, found: torch.dtype, allowed: Iterable[torch.dtype], why: str = ""
) -> torch.dtype:
    """A dtype, if it is one of those allowed."""
    allowed = tuple(dict.fromkeys(allowed))
    if found not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise DtypeError(
            why or "dtype outside the contract",
            op=op,
            argument=name,
            expected=names,
            found=str(found).removeprefix("torch."),
        )
    return found


_REMEMBERED = 4096
_SETTLED: dict[object, tuple[dict[str, int], dict[str, str]]] = {}


class Sizes:
    """Axis sizes as the arguments fix them, each remembered with the argument that did."""

    def __init__(self, op: str, given: Mapping[str, int]) -> None:
        self.op = op
        self.found = dict(given)
        self.by = dict.fromkeys(given, "sizes=")
        self.pending: list[tuple[str, tuple[str, ...], int]] = []

    def add(self, name: str, shape: Iterable[int], pattern: Pattern) -> None:
        """Note the extents of one argument's memory axes."""
        for names, extent in zip(pattern.dims, shape, strict=True):
            self.pending.append((name, names, extent))

    def settle(self) -> None:
        """Solve for every axis and check every extent; shapes that were solved are remembered.

        Raises:
            SizeError: two extents disagree, or a group is not divisible by its known axes.
        """
        key = (tuple(self.found.items()), tuple(self.pending))
        known = _SETTLED.get(key)
        if known is None:
            self._settle()
            if len(_SETTLED) >= _REMEMBERED:
                _SETTLED.clear()
            known = _SETTLED[key] = (self.found, self.by)
        self.found, self.by = dict(known[0]), dict(known[1])

    def _settle(self) -> None:
        while self._single() or self._quotient() or self._shared():
            pass
        for name, names, extent in self.pending:
            if all(n in self.found for n in names) and self._product(names) != extent:
                self._disagree(name, names, extent)

    def _open(self) -> Iterator[tuple[str, tuple[str, ...], int]]:
        """Groups with unknown axes: the argument, those axes, and what is left for them."""
        for name, names, extent in self.pending:
            unknown = tuple(n for n in names if n not in self.found)
            rest = self._product(names)
            if not unknown or rest == 0:
                continue
            if extent % rest:
                raise SizeError(
                    "the group's known axes do not divide its extent",
                    op=self.op, argument=name, axis=" ".join(unknown),
                    expected=f"a multiple of {rest}", found=extent,
                )  # fmt: skip
            yield name, unknown, extent // rest

    def _single(self) -> bool:
        """Groups with one unknown axis fix it."""
        before = len(self.found)
        for name, unknown, left in self._open():
            if len(unknown) == 1:
                self.found[unknown[0]], self.by[unknown[0]] = left, name
        return len(self.found) > before

    def _quotient(self) -> bool:
        """``(H Gq)`` and ``(H Gq Gv)`` fix Gv though not H and Gq."""
        for (name, axes, left), (_, inner, part) in itertools.permutations(list(self._open()), 2):
            more = [a for a in axes if a not in inner]
            if len(more) == 1 and len(axes) == len(inner) + 1 and part and left % part == 0:
                self.found[more[0]], self.by[more[0]] = left // part, name
                return True
        return False

    def _shared(self) -> bool:
        """``(H Gq)`` and ``(H Gv)`` alone: one of Gq and Gv is 1, so H is the smaller extent."""
        pairs = [group for group in self._open() if len(group[1]) == 2]
        for (name, axes, left), (other, others, right) in itertools.combinations(pairs, 2):
            both = [a for a in axes if a in others]
            if len(both) != 1:
                continue
            (small, by), (large, last) = sorted([(left, name), (right, other)])
            if small and large % small:
                raise SizeError(
                    "one of two groups over the same axis has one element of it each",
                    op=self.op, argument=last, axis=both[0],
                    expected=f"a multiple of {small} as in {by}", found=large,
                )  # fmt: skip
            self.found[both[0]], self.by[both[0]] = small, by
            return True
        return False

    def _product(self, names: tuple[str, ...]) -> int:
        n = 1
        for name in names:
            n *= self.found.get(name, 1)
        return n

    def _disagree(self, name: str, names: tuple[str, ...], extent: int) -> None:
        label = names[0] if len(names) == 1 else f"({' '.join(names)})"
        others = sorted({self.by[n] for n in names if self.by[n] != name})
        raise SizeError(
            "unequal sizes of one axis",
            op=self.op,
            argument=name,
            axis=label,
            expected=f"{self._product(names)}" + (f" as in {', '.join(others)}" if others else ""),
            found=extent,
        )

    def need(self, axes: Iterable[str]) -> None:
        """Every one of the axes has a size.

        Raises:
            UnknownSizeError: no argument fixes it.
        """
        for axis in axes:
            if axis not in self.found:
                raise UnknownSizeError(
                    "no argument fixes the size of the axis",
                    op=self.op,
                    axis=axis,
                    help=f"pass sizes={{{axis!r}: ...}}",
                )


def seqlens(op: str, name: str, value: torch.Tensor, total: int) -> torch.Tensor:
    """``cu_seqlens`` as int32 on its device.

    Values are looked at where that is free (CPU) or asked for (the check knob of
    ``runtime.knobs``).

    Raises:
        SeqlensError: wrong rank, dtype or length; not starting at 0, decreasing, or not ending at
            ``total``.
    """

    def fail(message: str, expected: object, found: object) -> None:
        raise SeqlensError(message, op=op, argument=name, expected=expected, found=found)

    if value.dim() != 1 or value.numel() < 1:
        fail("cu_seqlens must be a vector", "[B + 1]", tuple(value.shape))
    if value.dtype not in WHOLE:
        fail("cu_seqlens must hold whole numbers", "int32 or int64", value.dtype)
    if looks(value):
        ends = value.tolist()
        if ends[0] != 0:
            fail("cu_seqlens must start at 0", 0, ends[0])
        if any(b < a for a, b in itertools.pairwise(ends)):
            fail("cu_seqlens must not decrease", "ascending values", ends[:8])
        if ends[-1] != total:
            fail("cu_seqlens must end at the number of rows", total, ends[-1])
    return as_int32(value)


def _extent(t: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True) if n)
    start = t.data_ptr()
    return start, start + (last + 1) * t.element_size()


def overlap(op: str, name: str, tensor: torch.Tensor, others: Mapping[str, torch.Tensor]) -> None:
    """An output shares no memory with the other tensors.

    The test is by address range, so two views that interleave without touching are refused as well.
    """
    if not tensor.numel():
        return
    lo, hi = _extent(tensor)
    for other, t in others.items():
        if t.device != tensor.device or not t.numel():
            continue
        start, end = _extent(t)
        if lo < end and start < hi:
            raise OverlapError(
                "an output shares memory with another argument",
                op=op,
                argument=name,
                expected="separate memory",
                found=f"overlap with {other}",
            )
