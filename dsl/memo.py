"""Facts about a program that are asked for on every call, found once per program object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from attncc.dsl.ir import Program

Fact = TypeVar("Fact")


def once_a_program(fact: Callable[[Program], Fact]) -> Callable[[Program], Fact]:
    """Remember a function's result by the program's identity.

    Hashing a program walks its whole signature, which costs more than a launch; a declaration
    keeps its programs, so identity is enough. The program is held, so that its identity is not
    used again.
    """
    found: dict[int, tuple[Program, Fact]] = {}

    def remembered(program: Program) -> Fact:
        entry = found.get(id(program))
        if entry is None:
            entry = found[id(program)] = (program, fact(program))
        return entry[1]

    remembered.__doc__ = fact.__doc__
    remembered.__name__ = fact.__name__
    return remembered
