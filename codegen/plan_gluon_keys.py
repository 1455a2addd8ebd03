"""Plans of ``systems`` where every element of the active axis has a decay of its own, in Gluon.

Decays are inside the operands then, and a product of matrices over a whole chunk would need their
quotients. Halves of 1, 2, 4, ... rows do not: between a row of a second half and one of the first
half before it lie the decays since the second one's start and those to the first one's end. That is
six products of matrices a chunk, on tensor cores, where :mod:`attncc.codegen.emit.solve` goes
through the rows of a block one after the other.

A read ahead of its token's decay is one behind the decay of the token before: its vector stands at
that token's rows, and what is found for it is put where it belongs (it is "turned" by a token).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from attncc.codegen.affine_checks import decays_each, read_slots
from attncc.codegen.affine_choices import BLOCK
from attncc.codegen.affine_plans import ChunkedPlans, StatePlan, SystemPlan
from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Arg, Spec
from attncc.codegen.plan_gluon_systems import HALF, HEIGHTS, STORED, TARGETS
from attncc.codegen.plan_gluon_systems import WARPS as SOLVING
from attncc.codegen.plan_scan import flat_arg

WARPS = 8
JOINED = True
"""Whether read-outs stand at rows that read nothing."""
JOINED_REGISTERS = 128
"""Of a thread of such programs of eight warps: two of them share a multiprocessor."""
MOST_READS = 1
"""A thread holds the squares of all read-outs and of the system beside two products of decays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysPlan(SystemPlan):
    """Makes and weighs the systems of all chunks, with decays along the active axis.

    Attributes:
        registers: 32-bit registers of a thread at most; 0 leaves their number to the compiler.
        joined: one product serves rows and a read-out, which stands at a row that reads nothing.
    """

    registers: int
    joined: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InversePlan(SystemPlan):
    """Inverts the systems of all chunks.

    Attributes:
        columnwise: squares are left column by column; never.
        leaf: rows of the blocks that are solved by substitution.
    """

    columnwise: bool
    leaf: int


def keys_plans(
    plans: ChunkedPlans,
    spec: Spec,
    *,
    warps: int = WARPS,
    registers: int | None = None,
    leaf: int = HALF,
    joined: bool = JOINED,
) -> tuple[KeysPlan, InversePlan | None] | Refusal:
    """The kernels that stand for ``prepare`` and ``mix``, or why there are none.

    Args:
        plans: the Triton plans.
        spec: of the call.
        warps: 4 or 8.
        registers: see :class:`KeysPlan`; None leaves them to the rule.
        leaf: see :class:`InversePlan`.
        joined: see :class:`KeysPlan`, where the rows allow it.

    Returns:
        The kernel that makes the systems, and the one that inverts them where there are any.
    """
    reason = next(_problems(plans, spec), None)
    given = [p for p in (plans.prepare, plans.mix) if p is not None]
    if reason is not None or not given:
        return Refusal(reason or "there is nothing to solve, and nothing to weigh")
    height = plans.state.axis(plans.state.form.active[0]).block
    args: dict[str, Arg] = {a.name: a for p in given for a in p.args}
    inverse, held = args.pop("inverse", None), _shared(given[0])
    if inverse is not None:
        args["lower"] = flat_arg("lower", "fp32", written=True)
    joined = joined and bool(plans.state.form.reads) and _half_reads(plans.state)
    warps = min(warps, height // 16)  # a thread has half of the rows, or all of them
    if registers is None:
        registers = JOINED_REGISTERS if joined and warps == WARPS else 0
    keys = KeysPlan(**held | {
        "template": "gluon/affine_keys.py.jinja", "phase": "systems", "num_warps": warps,
        "args": tuple(args.values()), "registers": registers, "joined": joined,
    })  # fmt: skip
    if inverse is None:
        return keys, None
    solve = InversePlan(**held | {
        "template": "gluon/affine_solve.py.jinja", "phase": "solve", "num_warps": SOLVING,
        "args": (flat_arg("lower", "fp32"), inverse), "columnwise": False, "leaf": leaf,
    })  # fmt: skip
    return keys, solve


def _half_reads(plan: StatePlan) -> bool:
    """Whether a row of each token reads the state, and another one does not."""
    return plan.solve and any(r.b is None for r in plan.form.rows)


def _shared(plan: SystemPlan) -> dict[str, Any]:
    return {f.name: getattr(plan, f.name) for f in fields(SystemPlan)}


def _problems(plans: ChunkedPlans, spec: Spec) -> Iterator[str]:
    state = plans.state
    key, form = state.axis(state.form.active[0]), state.form
    if spec.target not in TARGETS:
        yield f"it is written for {', '.join(TARGETS)}"
    if state.storage not in STORED:
        yield f"operands of {state.storage}"
    if not decays_each(form):
        yield f"decays do not differ along {form.active[0]}"
    if key.size not in HEIGHTS:
        yield f"{key.axis} of {key.size}"
    if len(form.reads) > MOST_READS:
        yield f"{len(form.reads)} read-outs"
    if BLOCK % len(form.rows):
        yield f"{len(form.rows)} rows a token do not fill blocks of {BLOCK}"
    if len(set(read_slots(form))) > 1:
        yield "rows of a token that read on either side of its decay"
