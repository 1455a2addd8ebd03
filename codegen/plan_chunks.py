"""The plan of the kernel that says where the chunks of packed sequences lie."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.plan import KernelPlan, ScalarArg
from attncc.codegen.plan_scan import flat_arg
from attncc.dsl.ir import Program

PLACES = 64
"""Places of the table that a program fills."""
SEQUENCES = 128
"""Sequences that it looks at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTablePlan(KernelPlan):
    """Cuts packed sequences into chunks: the sequence and the first token of each, in order.

    Attributes:
        tokens: of a chunk.
        places: of the table, of one program.
        block: sequences that a program looks at together.
    """

    tokens: int
    places: int
    block: int


def plan_chunk_table(program: Program, tokens: int) -> ChunkTablePlan:
    """The kernel that fills ``chunks`` and ``first_chunks`` from ``cu_seqlens``.

    Args:
        program: the declaration as traced.
        tokens: of a chunk.
    """
    return ChunkTablePlan(
        op=program.name, phase="chunks", template="triton/chunk_table.py.jinja", program=program,
        args=(
            flat_arg("cu_seqlens", "i32"), flat_arg("chunks", "i32", written=True),
            flat_arg("first_chunks", "i32", written=True), ScalarArg("n_B", "i32"),
            ScalarArg("capacity", "i32"),
        ),
        static=(), num_warps=4, num_stages=1, precision="ieee", tokens=tokens, places=PLACES,
        block=SEQUENCES,
    )  # fmt: skip
