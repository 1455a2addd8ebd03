"""Where in the user's file something was written."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).resolve().parent.parent
_COMPILER = tuple(str(_PACKAGE / part) + "/" for part in ("dsl", "codegen", "runtime"))
_LIBRARY = str(_PACKAGE / "dsl" / "library") + "/"


@dataclass(frozen=True, slots=True)
class Loc:
    """A place in a source file; line and column count from 1, 0 is unknown."""

    file: str
    line: int
    col: int = 0
    end_col: int = 0

    def text(self) -> str:
        """The source line, without its newline; empty when it cannot be read."""
        return linecache.getline(self.file, self.line).rstrip("\n")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f":{self.col}" if self.col else "")

    def short(self) -> str:
        """File name and line: what generated code may carry (no machine path)."""
        return f"{Path(self.file).name}:{self.line}"


NOWHERE = Loc("<unknown>", 0)


@lru_cache(maxsize=256)
def _is_user_file(name: str) -> bool:
    resolved = str(Path(name).resolve())
    return not resolved.startswith(_COMPILER) or resolved.startswith(_LIBRARY)


def _is_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in ("torch", "numpy") and _is_user_file(frame.f_code.co_filename)


def caller() -> Loc:
    """The innermost frame outside the compiler and torch: the user's own line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is None:
        return NOWHERE
    code = frame.f_code
    place = next(islice(code.co_positions(), frame.f_lasti // 2, None), None)
    if place is None:
        return Loc(code.co_filename, frame.f_lineno)
    first, last, start, stop = place
    if first is None or start is None:
        return Loc(code.co_filename, frame.f_lineno)
    line = linecache.getline(code.co_filename, first)
    end = _column(line, stop) if stop is not None and last == first else 0
    return Loc(code.co_filename, first, _column(line, start), end)


def _column(line: str, offset: int) -> int:
    """The column of a byte offset: Python counts UTF-8 bytes, a caret counts characters."""
    if line.isascii():
        return offset + 1
    return len(line.encode()[:offset].decode(errors="ignore")) + 1
