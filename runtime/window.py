"""Runs scans that carry windows only (short convolutions), all tokens at once.

Nothing here reads device memory, so a warmed-up call can be captured.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.forms import Analysis, Refusal, WindowForm
from attncc.codegen.plan import Spec
from attncc.codegen.plan_window import WindowPlan, plan_window
from attncc.codegen.printers import source
from attncc.dsl.ir import Program
from attncc.runtime.affine import common, completed, launch, points
from attncc.runtime.call import Call
from attncc.runtime.kernels import Kernel, load
from attncc.runtime.tables import tile_table

_FOUND: dict[object, tuple[Program, Kernel | None]] = {}


def run(call: Call, analysis: Analysis, spec: Spec) -> bool:
    """Run a call if its body carries windows only.

    Args:
        call: a bound call; a final window may be the given initial one itself.
        analysis: the program's forms.
        spec: what the call fixes.

    Returns:
        Whether the call was run; where it was not, nothing was written.
    """
    carries = analysis.carries
    if carries is None or not all(isinstance(f, WindowForm) for f in carries.forms):
        return False
    one = call.sizes["T"] == (call.sizes["B"] if call.packed else 1)
    full = window_spec(call, spec, one_token=one)
    key = (id(call.program), full)  # the program stays in the table
    if key not in _FOUND:
        plan = plan_window(call.program, carries, full)
        kernel = None if isinstance(plan, Refusal) else load(source(plan)).ensure(full.target)
        _FOUND[key] = (call.program, kernel)
    chosen = _FOUND[key][1]
    if chosen is not None:
        _launch(call, chosen)
    return chosen is not None


def window_spec(call: Call, spec: Spec, *, one_token: bool) -> Spec:
    """What selects the kernel of a call: one for a token a sequence, one for any numbers."""
    return replace(completed(call, spec), buckets=(("T", 1 if one_token else 2),))


def _launch(call: Call, kernel: Kernel) -> None:
    plan = kernel.plan
    assert isinstance(plan, WindowPlan)
    values = common(call, plan)
    tokens, sequences = call.sizes["T"], call.sizes["B"]
    if call.cu_seqlens is not None:
        table = tile_table(call.cu_seqlens, plan.tokens, tokens, least=1)
        values["tiles"] = table.view(-1)
        tiles = table.shape[0] if sequences else 0
    else:
        each = max(1, -(-tokens // plan.tokens))
        values |= {"tokens_given": tokens, "tiles_each": each}
        tiles = sequences * each
    launch(kernel, tiles * points(call, plan), values)
