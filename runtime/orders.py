"""The order of a program's contractions of several operands, for calls and for people."""

from __future__ import annotations

from collections.abc import Mapping

from attncc.codegen.association import Association
from attncc.codegen.forms import Refusal
from attncc.codegen.passes.associate import associate, bucketed, is_open
from attncc.dsl.build import Declaration
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program


def order_of(
    program: Program, sizes: Mapping[str, int], phase: str, stored: frozenset[str] = frozenset()
) -> Association:
    """The order of an open program's contractions.

    Args:
        program: the program.
        sizes: of every axis, of one sequence each.
        phase: ``prefill`` or ``decode``.
        stored: inputs that no matrix product of the runtime takes.

    Raises:
        RefusedError: there is none, with the line and the reason.
    """
    found = associate(program, sizes, phase, stored)
    if isinstance(found, Refusal):
        raise RefusedError(found.reason, op=program.name, loc=found.loc)
    return found


def order_text(
    declaration: Declaration, *, sizes: Mapping[str, int], phase: str = "prefill",
    given: frozenset[str] | None = None, **_: object,
) -> str:  # fmt: skip
    """The order at these sizes, and what others cost; empty for programs that are not open.

    Raises:
        RefusedError: as :func:`order_of`.
    """
    program = declaration.trace(given, sizes)
    if not is_open(program):
        return ""
    lines = order_of(program, sizes, phase).lines(bucketed(sizes, phase))
    return "\n".join(lines) + "\n"
