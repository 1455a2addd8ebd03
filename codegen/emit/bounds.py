"""Loop bounds from the bands of a mask, as text over ``t_first``, ``t_last`` and ``S``.

A band ``ct * t + cs * s + c0 >= 0`` limits the keys s of a row from below (``cs > 0``) or above.
For a block of rows the *hull* holds every key that some row may see, the *inside* only keys that
every row sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attncc.codegen.forms import Band, MaskForm


@dataclass(frozen=True, slots=True)
class Bounds:
    """Half-open ranges of keys, as text.

    Attributes:
        lo: first key that some row may see.
        hi: one past the last.
        inner_lo: first key from which on every row sees all keys ..
        inner_hi: .. up to one before this; empty texts where no such range is known.
    """

    lo: str
    hi: str
    inner_lo: str = ""
    inner_hi: str = ""


def bounds(mask: MaskForm | None, offset: Callable[[Band], str | None]) -> Bounds:
    """Bounds of a mask.

    Args:
        mask: the clauses, or None for no mask.
        offset: text of a band's offset, or None where it is not one number for the whole tile (the
            band then bounds nothing).
    """
    if mask is None:
        return Bounds("0", "S", "0", "S")
    if not mask.clauses:
        return Bounds("0", "0")
    hulls = []
    exact = len(mask.clauses) == 1 and not mask.clauses[0].residual
    inside = ("0", "S")
    for clause in mask.clauses:
        edges = [(band, offset(band)) for band in clause.bands]
        exact = exact and all(text is not None for _, text in edges)
        known = [(band, text) for band, text in edges if text is not None]
        hulls.append(_range(known, widest=True))
        inside = _range(known, widest=False)
    lo = _fold("minimum", [lo for lo, _ in hulls])
    hi = _fold("maximum", [hi for _, hi in hulls])
    return Bounds(lo, hi, *(inside if exact else ("", "")))


def _range(edges: list[tuple[Band, str]], *, widest: bool) -> tuple[str, str]:
    """Keys that satisfy the bands for the most (or the least) favourable row of the block."""
    lows, highs = ["0"], ["S"]
    for band, offset in edges:
        row = "t_last" if (band.t > 0) == widest else "t_first"
        limit = _quotient(_sum(band.t, row, offset), abs(band.s))
        if band.s > 0:
            lows.append(f"-({limit})")
        else:
            highs.append(f"{limit} + 1")
    return _fold("maximum", lows), _fold("minimum", highs)


def _sum(factor: int, row: str, offset: str) -> str:
    terms = {0: "", 1: row, -1: f"-{row}"}.get(factor, f"{factor} * {row}")
    if not terms:
        return offset
    return terms if offset == "0" else f"{terms} + ({offset})"


def _quotient(number: str, by: int) -> str:
    """Division that rounds down, whichever way the machine's own rounds."""
    return number if by == 1 else f"(({number}) - (({number}) % {by} + {by}) % {by}) // {by}"


def _fold(name: str, texts: list[str]) -> str:
    unique = list(dict.fromkeys(texts))
    result = unique[0]
    for text in unique[1:]:
        result = f"tl.{name}({result}, {text})"
    return result
