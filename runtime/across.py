"""What chunks leave of a state that outputs read across (:mod:`attncc.codegen.plan_across`)."""

from __future__ import annotations

from math import prod

import torch

from attncc.codegen.affine_choices import ROWS
from attncc.codegen.affine_plans import ChunkedPlans
from attncc.codegen.forms import Analysis
from attncc.codegen.plan_across import left_of
from attncc.codegen.scan_tiles import power
from attncc.runtime.call import Call
from attncc.runtime.recorder import workspace

MOST_BYTES = 4 << 30
"""Most memory of what chunks leave; longer prompts are stepped."""
_BITS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def has_room(call: Call, analysis: Analysis) -> bool:
    """Whether what a call's chunks leave takes no more memory than it may.

    Args:
        call: a bound call of a scan.
        analysis: its program's forms.
    """
    if analysis.across is None:
        return True
    axes = call.program.tensor(analysis.across.form.state).pattern.axes
    active = analysis.across.form.active[0]
    high, wide = (power(call.sizes[a], 16) for a in (active, analysis.across.over))
    tokens, sequences = call.sizes["T"], call.sizes["B"]
    chunks = tokens // ROWS + sequences if call.packed else sequences * -(-tokens // ROWS)
    systems = chunks * prod(call.sizes[a] for a in axes[:-2] if a != "B")
    reads = len(analysis.across.reads)
    each = 2 * (high + ROWS) * wide + 4 * reads * ROWS * (ROWS + high)
    return systems * each <= MOST_BYTES


def buffers(plans: ChunkedPlans, systems: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Room for what the chunks of a call leave; every place that is read is written before."""
    found = left_of(plans)
    return {
        n: workspace(systems * each, _BITS[dtype], device) for n, (each, dtype) in found.items()
    }
