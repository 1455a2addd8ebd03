"""Plans of ``systems``: the kernels ``prepare`` and ``mix`` in one, in Gluon.

A lane owns a column of a chunk's square, so a product over an interval of decays and a row of the
substitution are chains of one thread, without an exchange between lanes. Both kernels' squares are
weighed by the same decays, which are multiplied up once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from attncc.codegen.affine_checks import decays_each
from attncc.codegen.affine_choices import ROWS
from attncc.codegen.affine_plans import ChunkedPlans, SystemPlan
from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Arg, Spec

TARGETS = ("sm_90",)
HEIGHTS = (64, 128)
"""Sizes of the active axis whose vectors, and states, fit in registers beside a chunk's rows."""
MOST_READS = 2
STORED = ("bf16", "fp16")
"""Element types of operands."""
HALF = 32
"""Rows of a half of a chunk's square."""
WARPS = 2
"""A lane for each of 64 columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemsPlan(SystemPlan):
    """Solves and weighs the systems of all chunks.

    Attributes:
        columnwise: squares are left column by column, as they lie in the lanes.
        leaf: rows of the blocks that are solved by substitution; those of columnwise ones only may
            be a quarter of a chunk's, else a half.
    """

    columnwise: bool
    leaf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdedSystemsPlan(SystemsPlan):
    """The same with fewer registers a thread, so that more programs share a multiprocessor.

    For rows that follow each other; beside the vectors of one row a token, memory is what lacks.

    Attributes:
        registers: 32-bit registers of a thread; what does not fit is put away in memory.
    """

    registers: int


def systems_plan(
    plans: ChunkedPlans,
    spec: Spec,
    *,
    columnwise: bool = False,
    leaf: int | None = None,
    gathered: bool = False,
    registers: int | None = None,
) -> SystemsPlan | Refusal:
    """The kernel that stands for ``prepare`` and ``mix``, or why there is none.

    Args:
        plans: the Triton plans.
        spec: of the call.
        leaf: rows that are solved by substitution; None for a half.
        columnwise: leave squares column by column; of tokens with several rows, which have to
            follow each other, the inverse alone.
        gathered: rows of a chunk follow each other, where tokens have several.
        registers: of a thread, for rows that follow each other; None for as many as there are.
    """
    prepare, mix = plans.prepare, plans.mix
    reason = _problem(plans, spec)
    if reason is not None or prepare is None or mix is None:
        return Refusal(reason or "there is nothing to solve, or nothing to weigh")
    shared = min((prepare, mix), key=lambda p: p.shared)
    args: dict[str, Arg] = {a.name: a for a in (*prepare.args, *mix.args)}
    rows = len(shared.form.rows)
    turned = columnwise and (rows == 1 or gathered)
    held: dict[str, Any] = {f.name: getattr(shared, f.name) for f in fields(SystemPlan)}
    held |= {
        "phase": "systems", "template": "gluon/affine_systems.py.jinja", "num_warps": WARPS,
        "args": tuple(args.values()), "columnwise": turned,
        "leaf": leaf if turned and leaf else HALF,
    }  # fmt: skip
    if gathered and rows > 1:
        held |= {"tokens": ROWS // rows, "block_tokens": ROWS // rows}
        if registers is not None:
            return CrowdedSystemsPlan(**held, registers=registers)
    return SystemsPlan(**held)


def _problem(plans: ChunkedPlans, spec: Spec) -> str | None:
    state = plans.state
    key, form = state.axis(state.form.active[0]), state.form
    checks = (
        (spec.target not in TARGETS, f"it is written for {', '.join(TARGETS)}"),
        (state.storage not in STORED, f"operands of {state.storage}"),
        (decays_each(form), f"decays along {form.active[0]} are inside the operands"),
        (key.size not in HEIGHTS, f"{key.axis} of {key.size}"),
        (len(form.reads) > MOST_READS, f"{len(form.reads)} read-outs"),
    )
    return next((reason for failed, reason in checks if failed), None)
