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
from attncc.runtime.kernels import Kernel, load, make_ready

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
    launch(call, ready(call, spec))


def ready(call: Call, spec: Spec) -> Kernel:
    """The kernel of a call, ready to be launched.

    Raises:
        RefusedError: as :func:`run`.
    """
    spec = replace(spec, buckets=())  # no choice depends on a length
    key = (id(call.program), spec)  # the program stays in the table
    if key not in _FOUND:
        _FOUND[key] = (call.program, load(pointwise_source(call.program, spec)).ensure(spec.target))
    kernel = _FOUND[key][1]
    _counted(call, kernel)
    make_ready((kernel,), call.device, spec.target)
    return kernel


def _counted(call: Call, kernel: Kernel) -> tuple[int, int]:
    """Rows and programs of a call."""
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
    return rows, programs


def launch(call: Call, kernel: Kernel) -> None:
    """Launch the kernel of a call (:func:`ready`)."""
    rows, programs = _counted(call, kernel)
    values: dict[str, torch.Tensor | float] = {**call.tensors, **call.outputs}
    values |= {f"{n}_value": v for n, v in call.scalars.items()}
    values |= {f"n_{a}": n for a, n in call.sizes.items()}
    values["rows_given"] = rows
    wanted = {a.name: values[a.name] for a in kernel.plan.args}
    kernel.launch((programs,), wanted)
