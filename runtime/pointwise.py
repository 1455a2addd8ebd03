"""Runs ops that carry nothing and fold no history, in one kernel over their rows.

Nothing here reads device memory, so a warmed-up call can be captured.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attncc.codegen.pipeline import pointwise_source
from attncc.codegen.plan import Spec
from attncc.codegen.plan_pointwise import MOST_ROWS, PointwisePlan
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program
from attncc.runtime.call import Call
from attncc.runtime.kernels import Kernel, load

MOST = 2**31 - MOST_ROWS
"""Rows (a last tile goes past them), and programs, that are counted in 32 bits; offsets have 64."""
_FOUND: dict[object, tuple[Program, Kernel]] = {}


def run(call: Call, spec: Spec) -> None:
    """Run a call whose program needs nothing but rows.

    Args:
        call: a bound call.
        spec: what the call fixes.

    Raises:
        RefusedError: no kernel covers it, or there are more rows than are counted; nothing was
            written.
    """
    spec = replace(spec, buckets=())  # no choice depends on a length
    key = (id(call.program), spec)  # the program stays in the table
    if key not in _FOUND:
        _FOUND[key] = (call.program, load(pointwise_source(call.program, spec)).ensure(spec.target))
    _launch(call, _FOUND[key][1])


def _launch(call: Call, kernel: Kernel) -> None:
    plan = kernel.plan
    assert isinstance(plan, PointwisePlan)
    rows = 1
    for axis in plan.row_axes:
        rows *= call.sizes[axis]
    programs = -(-rows // plan.rows) * plan.blocks
    if max(rows, programs) > MOST:
        raise RefusedError(
            "too many rows", op=plan.op, expected=f"at most {MOST} rows and programs",
            found=f"{rows} rows, {programs} programs",
        )  # fmt: skip
    values: dict[str, torch.Tensor | float] = {**call.tensors, **call.outputs}
    values |= {f"{n}_value": v for n, v in call.scalars.items()}
    values |= {f"n_{a}": n for a, n in call.sizes.items()}
    values["rows_given"] = rows
    wanted = {a.name: values[a.name] for a in plan.args}
    kernel.launch((programs,), wanted)
