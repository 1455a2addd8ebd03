"""Which loops over tokens leave sums of their outputs to a kernel of rows.

A loop takes as long as one token's way through it times the tokens. Where only outputs sum over an
axis of the state, its parts are states of their own: programs have less to do for a token, and
more multiprocessors work. What they leave are partial sums in fp32, one a part, which are added in
order.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.affine_choices import MULTIPROCESSORS
from attncc.codegen.forms import Refusal
from attncc.codegen.passes.split_rows import SplitRows
from attncc.codegen.passes.split_sums import cuttable, split_sums
from attncc.codegen.plan import Spec
from attncc.codegen.plan_pointwise import plan_pointwise
from attncc.codegen.plan_scan import plan_step
from attncc.codegen.rows_apart import core_spec, rows_spec
from attncc.dsl.ir import Program

PARTS = 8
"""Most parts of a state: partial sums take as many times the memory of a read-out in fp32."""
LEAST_PLACES = 8
"""Places of a part along the axis."""


def loop_apart(program: Program, spec: Spec) -> SplitRows | None:
    """The loop and the rows of a call that runs as both, or None for one that does not.

    Args:
        program: a scan that has no chunks.
        spec: of the call, complete; the bucket ``systems`` says how many states there are.
    """
    static, systems = dict(spec.static), dict(spec.buckets).get("systems", MULTIPROCESSORS)
    if spec.token_slots or PARTS < 2:
        return None
    for axis in cuttable(program):
        size, parts = static.get(axis, 1), PARTS
        while parts > 1 and (size % parts or size // parts < LEAST_PLACES):
            parts //= 2
        while parts > 1 and systems * parts > 2 * MULTIPROCESSORS:
            parts //= 2
        found = split_sums(program, axis, size, parts) if parts > 1 else None
        if isinstance(found, SplitRows):
            found = replace(found, spread=(found.sizes[0][0],))
            return found if _planned(found, spec) else None
    return None


def _planned(parts: SplitRows, spec: Spec) -> bool:
    """Whether there are kernels of both."""
    assert parts.rows is not None
    core = plan_step(parts.core, core_spec(parts, spec))
    return not isinstance(core, Refusal) and not isinstance(
        plan_pointwise(parts.rows, rows_spec(parts, spec)), Refusal
    )
