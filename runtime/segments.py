"""Into how many segments sequences are cut, where few programs would carry their states."""

from __future__ import annotations

from attncc.codegen.affine_choices import MULTIPROCESSORS
from attncc.codegen.plan_affine import ChunkedPlans

LEAST_SEGMENTS = 4
"""Fewer segments than these do not pay for the summaries (twice the columns of the state)."""
LEAST_PLAIN = 2
"""The same where no row reads the state: a summary has its columns alone, and nothing is solved."""
LEAST_CHUNKS = 8
"""Chunks of a segment."""


def segments_of(plans: ChunkedPlans, sequences: int, systems: int, tokens: int) -> int:
    """Into how many segments each sequence is cut: 1, or as many as fill the device once.

    A summary carries more columns than the state has, so a cut only pays where most
    multiprocessors would idle, and where a segment is long enough for its fixed costs.

    Args:
        plans: the plans.
        sequences: their number.
        systems: of one sequence.
        tokens: of a sequence, on average.
    """
    local = plans.split.local
    programs = sequences * systems * local.axis(local.blocked).blocks
    room = MULTIPROCESSORS // max(programs, 1)
    segments = min(room, tokens // (local.tokens * LEAST_CHUNKS))
    return segments if segments >= (LEAST_SEGMENTS if local.solve else LEAST_PLAIN) else 1
