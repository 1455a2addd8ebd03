"""Triton text of the table of chunks of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.plan_chunks import ChunkTablePlan


@dataclass(frozen=True, slots=True)
class ChunkTableCode:
    """Printed pieces of ``chunk_table.py.jinja``."""

    rounding: int


def chunk_table_code(plan: ChunkTablePlan) -> ChunkTableCode:
    """Print what the kernel adds to lengths so that chunks begun count as whole ones."""
    return ChunkTableCode(rounding=plan.tokens - 1)
