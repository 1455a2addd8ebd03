"""Text about a square whose columns lie in the lanes: what is spread down or across it, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attncc.codegen.emit.gluon import gluon_text

Texts = tuple[str, ...]
TOKENS = {"row_token": "row_inner", "token": "token_inner"}
_TOKEN = re.compile(r"\b(?:row_)?token\b(?=(?: - 1\))?\[)")
"""Tokens are compared within a chunk only: their places in it are numbers of the code."""
_WORD = re.compile(r"\b[a-z]\w*")


@dataclass(frozen=True, slots=True)
class Spread:
    """How numbers are spread over a matrix whose columns lie in the lanes.

    Attributes:
        sides: of either way: its mark, what its indices end in, and the function for the rest.
        over: the products of decays over intervals.
    """

    sides: tuple[tuple[str, str, str], ...]
    over: str


OF_ROWS = Spread((("[:, None]", "_i", "down"), ("[None, :]", "_j", "across")), "over_intervals")
OF_READS = Spread(
    (("[:, None]", "_t", "down_reads"), ("[None, :]", "_r", "across_reads")), "over_reads"
)
INDICES = frozenset({
    "m", "c", "row_token", "row_inner", "row_valid", "row_update", "token", "token_inner",
    "token_valid",
})  # fmt: skip


_MARKS = {"[:, None]": "[:, :, None]", "[None, :]": "[:, None, :]"}


def of_chunks(text: str) -> str:
    """The same text about squares of several chunks, which the first axis counts."""
    for one, several in _MARKS.items():
        text = text.replace(one, several)
    return text


def indexed(text: str, suffix: str) -> str:
    """Text whose indices are those down, or across, a square."""
    return _WORD.sub(lambda w: w[0] + suffix if w[0] in INDICES else w[0], text)


def square_text(text: str, kind: Spread = OF_ROWS) -> str:
    """Text about a square: what is spread down or across it gets that layout."""
    text = _TOKEN.sub(lambda w: TOKENS[w[0]], text)
    for mark, suffix, function in kind.sides:
        text = _spread(text, mark, suffix, function)
    return gluon_text(text.replace(f"{OF_ROWS.over}(", f"{kind.over}("), "")


def square_lines(lines: Texts, kind: Spread = OF_ROWS) -> Texts:
    """Lines of which some are about a square."""
    return tuple(
        square_text(line, kind) if "None" in line else gluon_text(line, "") for line in lines
    )


def _spread(text: str, mark: str, suffix: str, function: str) -> str:
    done, rest = "", text
    while mark in rest:
        before, _, rest = rest.partition(mark)
        start = _atom(before)
        atom = before[start:]
        plain = set(_WORD.findall(atom)) <= INDICES
        atom = indexed(atom, suffix) if plain else f"{function}({atom})"
        done += before[:start] + atom + mark
    return done + rest


def _atom(text: str) -> int:
    """Where the operand begins that a text ends in: a name, a call or a pair of brackets."""
    at_char = len(text)
    if text.endswith(")"):
        depth = 0
        while at_char:
            at_char -= 1
            depth += {")": 1, "(": -1}.get(text[at_char], 0)
            if depth == 0:
                break
    while at_char and (text[at_char - 1].isalnum() or text[at_char - 1] in "_."):
        at_char -= 1
    return at_char
