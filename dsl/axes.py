"""Axis patterns: the physical layout of a tensor as a line of named axes.

A pattern such as ``"B T (Hkv G) D"`` lists memory axes from outermost to innermost. A group in
parentheses is *one* memory axis that the maths sees as several, the last name varying fastest.
Names start with a letter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from attncc.dsl.errors import PatternError

_TOKEN = re.compile(r"\s*([()]|[A-Za-z][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed layout: one tuple of axis names per memory axis.

    Attributes:
        dims: names of each memory axis, outermost first.
        axes: every axis name, outermost first.
    """

    dims: tuple[tuple[str, ...], ...]
    axes: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(name for dim in self.dims for name in dim))

    @property
    def rank(self) -> int:
        """Number of memory axes."""
        return len(self.dims)

    def dim_of(self, axis: str) -> int:
        """The memory axis that holds ``axis``.

        Raises:
            KeyError: the pattern has no such axis.
        """
        for i, dim in enumerate(self.dims):
            if axis in dim:
                return i
        raise KeyError(axis)

    def without(self, axis: str) -> Pattern:
        """The pattern with one axis taken out (an emptied memory axis disappears)."""
        dims = (tuple(a for a in dim if a != axis) for dim in self.dims)
        return Pattern(tuple(dim for dim in dims if dim))

    def __str__(self) -> str:
        return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in self.dims)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.dims)


def _tokens(text: str) -> Iterator[str]:
    """Parentheses and names, in order."""
    at = 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if match is None:
            raise PatternError(text, f"unexpected {stripped[at:].strip()[:1]!r}")
        at = match.end()
        yield match[1]


@lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """Read a pattern.

    Args:
        text: for instance ``"B T (Hkv G) D"``; empty for a scalar.

    Raises:
        PatternError: unbalanced or nested parentheses, an empty group, a repeated or malformed
            name.
    """
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in _tokens(text):
        if token == "(":
            if group is not None:
                raise PatternError(text, "a group inside a group")
            group = []
        elif token == ")":
            if not group:
                raise PatternError(text, "')' without '('" if group is None else "an empty group")
            dims.append(tuple(group))
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append((token,))
    if group is not None:
        raise PatternError(text, "'(' without ')'")
    pattern = Pattern(tuple(dims))
    for name, count in Counter(pattern.axes).items():
        if count > 1:
            raise PatternError(text, f"axis {name} stands twice")
    return pattern


def history_dim(pattern: Pattern) -> tuple[str, ...] | None:
    """The memory axis of a cache that grows: the one with an axis S, or blocks such as (Sb C)."""
    if "S" in pattern.axes:
        return pattern.dims[pattern.dim_of("S")]
    return next((dim for dim in pattern.dims if dim[0].startswith("S")), None)


def shared_dims(one: Pattern, other: Pattern) -> int:
    """How many leading memory axes two layouts have in common."""
    count = 0
    for a, b in zip(one.dims, other.dims, strict=False):
        if a != b:
            break
        count += 1
    return count


PAGES, PAGE = "pages", "page"
"""Axes of a paged history: which page of the pool, and which row of the page."""


@lru_cache(maxsize=256)
def paged(pattern: Pattern) -> Pattern:
    """A history's layout in pages: ``pages`` in place of B and ``page`` in place of S."""
    names = {"B": PAGES, "S": PAGE}
    return Pattern(tuple(tuple(names.get(a, a) for a in dim) for dim in pattern.dims))


POSITIONS = ("S", PAGE, "T")
"""Axes along which a history's tokens lie: in a cache, in a page, in a call's own rows."""


def block_axis(axis: str) -> str:
    """Name of the axis that counts an axis' blocks with one scale each; no pattern can spell it."""
    return f"{axis}'"


@lru_cache(maxsize=256)
def scales_of(pattern: Pattern, axis: str) -> Pattern:
    """Layout of a quantised history's scales: one memory axis an axis, tokens innermost.

    ``[B S Hkv D]`` with scales along D has ``[B Hkv D' S]``, where D' counts the blocks of D;
    pages ``[pages page Hkv D]`` have ``[pages Hkv D' page]``.

    Raises:
        KeyError: the pattern has no such axis, or none along which tokens lie.
    """
    token = next((a for a in POSITIONS if a in pattern.axes), None)
    if token is None or axis not in pattern.axes:
        raise KeyError(axis)
    first = [a for a in ("B", PAGES) if a in pattern.axes]
    rest = [a for a in pattern.axes if a not in (*first, token, axis)]
    return Pattern(tuple((a,) for a in (*first, *rest, block_axis(axis), token)))


def union(*axes: Iterable[str]) -> tuple[str, ...]:
    """Names in order of first appearance, each once."""
    return tuple(dict.fromkeys(name for group in axes for name in group))
