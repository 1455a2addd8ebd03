"""What adapters share: heads as axes, errors in the caller's words, checks of a document."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from attncc.dsl.axes import Pattern
from attncc.dsl.errors import (
    ArgumentError,
    BackendError,
    CallError,
    OverlapError,
    SizeError,
    ValueRangeError,
)
from attncc.runtime import checks, knobs

HALF = (torch.float16, torch.bfloat16)
OVERLAP = "overlap with "


@contextmanager
def in_words_of(op: str, names: Mapping[str, str]) -> Iterator[None]:
    """Errors of a call name the adapter and its arguments.

    Args:
        op: the adapter.
        names: its name of each argument that the op beneath names differently.
    """
    try:
        yield
    except (CallError, BackendError) as error:
        error.op = op
        error.argument = names.get(error.argument or "", error.argument)
        if isinstance(error, SizeError):  # "6 as in q, sizes="
            expected = str(error.expected)
            error.expected = expected.replace("sizes=", names.get("sizes=", "sizes="))
        if isinstance(error, OverlapError):
            other = str(error.found).removeprefix(OVERLAP)
            error.found = OVERLAP + names.get(other, other)
        error.args = (error.render(),)
        raise


def check_count(op: str, name: str, value: object) -> None:
    """A whole number from 1.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(
            "a whole number from 1 is wanted", op=op, argument=name, expected=">= 1", found=value
        )


def check_fraction(op: str, name: str, value: torch.Tensor | None) -> None:
    """Every element is in [0, 1], where values are looked at on request (the check knob).

    Raises:
        ValueRangeError: one is not (NaN is not either); ``found`` says which came first.
    """
    if value is None or not knobs.check() or not checks.looks(value):
        return
    outside = ~((value >= 0) & (value <= 1))
    if outside.any():
        first = tuple(outside.nonzero()[0].tolist())
        raise ValueRangeError(
            "a decay in linear space is in [0, 1]", op=op, argument=name, expected="[0, 1]",
            found=f"{value[first].item():g} at {first}",
        )  # fmt: skip


def check_tensors(
    op: str,
    tensors: Mapping[str, object],
    patterns: Mapping[str, Sequence[str]],
    required: Collection[str],
) -> None:
    """Tensors are tensors, with as many axes as they must have.

    Args:
        op: named in errors.
        tensors: what was given, None for what was not.
        patterns: the axes of each.
        required: names of those that have no default.

    Raises:
        ArgumentError: it is no tensor.
        RankError: it has another number of axes.
    """
    for name, axes in patterns.items():
        value = tensors[name]
        pattern = Pattern(tuple((axis,) for axis in axes))
        if value is None and name not in required:
            continue
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                "a tensor is wanted", op=op, argument=name, expected=f"a tensor [{pattern}]",
                found=type(value).__name__,
            )  # fmt: skip
        checks.rank(op, name, value, pattern)


def heads(op: str, q: int, k: int, v: int) -> tuple[str, dict[str, int]]:
    """The axes of query, key and value heads ``(H Gq)`` and ``(H Gv)``, of which one G is 1.

    Args:
        op: named in errors.
        q: query heads.
        k: key heads.
        v: value heads.

    Returns:
        The axis that keys are grouped by, and the sizes of Gq and Gv.

    Raises:
        SizeError: neither of query and value heads is a multiple of the other, or there are as
            many key heads as of neither.
    """
    least = max(min(q, v), 1)
    if max(q, v) % least:
        raise SizeError(
            "one of query and value heads is a multiple of the other",
            op=op, argument="v", axis="heads", expected=f"a multiple or a divisor of {q}", found=v,
        )  # fmt: skip
    if k not in (q, v):
        raise SizeError(
            "keys have the heads of the queries or those of the values",
            op=op, argument="k", axis="heads", expected=" or ".join(map(str, sorted({q, v}))),
            found=k,
        )  # fmt: skip
    return "Gq" if k == q else "Gv", {"Gq": max(q, 1) // least, "Gv": max(v, 1) // least}
