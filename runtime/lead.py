"""The first part of a sequence beside the summaries of its segments.

What the first part starts with is known, so nothing of it has to be summed up: one state pass gives
its outputs at once, on multiprocessors that the summaries leave, and the state that the first
segment behind it starts with. It has about as many chunks as that pass has time for meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from attncc.codegen.affine_choices import MULTIPROCESSORS
from attncc.codegen.affine_plans import ChunkedPlans, Part
from attncc.codegen.plan_gluon_state import WarpStatePlan, columns_a_program
from attncc.runtime import selfcheck
from attncc.runtime.slices import Ahead

if TYPE_CHECKING:
    from attncc.runtime.kernels import Kernel

WHOLE = 1024
"""Parts of a sequence that what is ahead is counted in."""
SUMMED = {1: 0.9, 2: 1.45, 3: 2.6}
"""A chunk's time in a summary in us, by the warpgroups of a program (one: an estimate)."""
PASSED = {1: 1.3, 2: 2.5}
"""The same of a pass with outputs."""
MOST_WAVES = 2
"""Of summaries beside what is ahead."""
LEAST_CHUNKS = 16
"""Of what is ahead: fewer do not pay for another stream."""


def ahead_of(plans: ChunkedPlans, sequences: int, systems: int, segments: int, tokens: int) -> int:
    """How much of each sequence is ahead of its segments, in 1024ths; 0 for nothing.

    The part of x chunks ahead takes as long as the summaries of segments, which have
    (n - x) / segments chunks each, on what that part leaves of the device.

    Args:
        plans: of the call's kernels.
        sequences: their number.
        systems: of a sequence.
        segments: behind the part that is ahead.
        tokens: of a sequence, on average.
    """
    lead, summary = plans.split.lead, plans.split.summary
    if not isinstance(lead, WarpStatePlan) or segments < 2 or not lead.solve:
        return 0
    assert isinstance(summary, WarpStatePlan)
    if _tried(lead):  # a trial of these kernels is a small call
        return WHOLE // 2
    own = sequences * systems * _programs(lead)
    summing = sequences * systems * _programs(summary) * (segments - 1)
    waves = -(-summing // max(MULTIPROCESSORS - own, 1))
    each = waves * SUMMED[summary.consumers] / PASSED[lead.consumers] / segments
    share = each / (1 + each)
    if waves > MOST_WAVES or share * tokens < LEAST_CHUNKS * lead.tokens:
        return 0
    return int(share * WHOLE)


def _programs(plan: WarpStatePlan) -> int:
    return plan.column_blocks // columns_a_program(plan)


def _tried(lead: WarpStatePlan) -> bool:
    tried = selfcheck.checked()
    parts = (Part.LEAD, Part.SUMMARY)
    return isinstance(tried, WarpStatePlan) and tried.part in parts and tried.op == lead.op


def run(device: torch.device, kernels: Sequence[Kernel], launch: Callable[[Kernel], None]) -> None:
    """Launch the kernels of a cut call, what is ahead beside the summaries.

    Args:
        device: of the call.
        kernels: what comes before, what is ahead, then summaries, starts and segments.
        launch: launches one of them over the call.
    """
    *before, leading, summing, starting, last = kernels
    for kernel in before:
        launch(kernel)
    beside = Ahead(device)
    try:
        with beside.after():
            launch(leading)
        launch(summing)
    finally:  # what was launched still uses what is freed behind this
        beside.join()
    launch(starting)
    launch(last)
