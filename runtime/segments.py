"""Into how many segments sequences are cut, where few programs would carry their states.

And what the segments of a call leave each other.
"""

from __future__ import annotations

import torch

from attncc.codegen.affine_choices import MULTIPROCESSORS
from attncc.codegen.plan_affine import ChunkedPlans
from attncc.codegen.plan_gluon_state import columns_a_program
from attncc.codegen.plan_scan import ScanPlan
from attncc.runtime.call import Call
from attncc.runtime.recorder import workspace

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
    blocks = local.axis(local.blocked).blocks // columns_a_program(local)
    programs = sequences * systems * blocks
    room = MULTIPROCESSORS // max(programs, 1)
    segments = min(room, tokens // (local.tokens * LEAST_CHUNKS))
    return segments if segments >= (LEAST_SEGMENTS if local.solve else LEAST_PLAIN) else 1


def systems_of(call: Call, plan: ScanPlan) -> int:
    """Points of a sequence's grid axes: systems, and columns on axes of their own."""
    n = 1
    for axis in plan.grid_axes:
        n *= call.sizes[axis]
    return n


def segment_buffers(
    call: Call, plans: ChunkedPlans, segments: int
) -> dict[str, torch.Tensor | float]:
    """What the segments of a call leave each other."""
    summary, local = plans.split.summary, plans.split.local
    each = call.sizes["B"] * segments
    columns = local.axis(local.blocked)
    tile = columns.block * local.axis(local.form.active[0]).block
    systems = systems_of(call, local)
    wanted = {
        "summaries": each * systems * summary.column_blocks * tile,
        "starts": each * systems * columns.blocks * tile,
        "kept": each * systems * local.axis(local.form.active[0]).block,
    }
    made = {n: workspace(size, torch.float32, call.device) for n, size in wanted.items()}
    return made | {"segments": segments}
