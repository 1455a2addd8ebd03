"""Breaks long lines of generated code, so that they can be read beside each other.

Only where Python takes a line's end for nothing: inside brackets, at commas, else before operators.
What a file says stays what it said, token by token.
"""

from __future__ import annotations

from collections.abc import Iterator

WIDTH = 100
"""Columns of a line of code."""
_OPEN, _CLOSE = "([{", ")]}"
_OPERATORS = (" & ", " | ", " + ")
_TRIPLE = '"""'


def break_lines(text: str) -> str:
    """The same file with its long lines of code broken; texts and comments stay as they are.

    Args:
        text: Python source. A text of several lines is a docstring.
    """
    if all(len(line) <= WIDTH for line in text.splitlines()):
        return text
    found: list[str] = []
    depth, inside = 0, False
    for line in text.splitlines():
        quoted = inside or _TRIPLE in line
        inside ^= line.count(_TRIPLE) % 2 == 1
        if quoted or line.lstrip().startswith("#"):
            found.append(line)
            continue
        found += _broken(line, open_=depth > 0)
        depth += sum(_step(line, at) for at in _code(line))
    return "\n".join(found) + "\n" * text.endswith("\n")


def _broken(line: str, *, open_: bool) -> Iterator[str]:
    """A line of code in pieces; ``open_``: a bracket before it is still open."""
    if len(line) <= WIDTH:
        yield line
        return
    indent = line[: len(line) - len(line.lstrip())]
    code, comment = _comment(line)
    if comment:
        yield indent + comment
        yield from _broken(code, open_=open_)
        return
    pieces = _pieces(code[len(indent) :]) if open_ else []
    if len(pieces) > 1:
        for piece in pieces:
            yield from _broken(indent + piece, open_=True)
        return
    begin, end = _widest(code)
    pieces = _pieces(code[begin:end])
    if end <= begin or (len(pieces) == 1 and len(code) - (end - begin) > WIDTH):
        yield code
        return
    yield code[:begin]
    for piece in pieces:
        yield from _broken(f"{indent}    {piece}", open_=True)
    yield from _broken(indent + code[end:], open_=open_)


def _pieces(code: str) -> list[str]:
    """What stands between commas outside brackets; with one piece only, between operators."""
    for marks in ((", ",), _OPERATORS):
        found, start, depth = [], 0, 0
        for at in _code(code):
            depth += _step(code, at)
            if depth == 0 and code[at : at + len(marks[0])] in marks:
                cut = at + (marks == (", ",))  # a comma ends its piece, an operator begins one
                found.append(code[start:cut].strip())
                start = cut
        if found:
            return [*found, code[start:].strip()]
    return [code.strip()]


def _widest(code: str) -> tuple[int, int]:
    """Inside of the outermost bracket that holds most; an empty range where there is none."""
    best, start, depth = (0, 0), 0, 0
    for at in _code(code):
        step = _step(code, at)
        if step > 0 and depth == 0:
            start = at + 1
        depth += step
        if step < 0 and depth == 0 and at - start > best[1] - best[0]:
            best = (start, at)
    return best


def _comment(line: str) -> tuple[str, str]:
    """Code and comment of a line."""
    at = next((at for at in _code(line) if line[at] == "#"), len(line))
    return line[:at].rstrip(), line[at:]


def _step(text: str, at: int) -> int:
    """How the depth of brackets changes at a place."""
    return (text[at] in _OPEN) - (text[at] in _CLOSE)


def _code(text: str) -> Iterator[int]:
    """Places outside quoted texts, up to the first mark of a comment."""
    quote = ""
    for at, mark in enumerate(text):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        else:
            yield at
            if mark == "#":
                return
