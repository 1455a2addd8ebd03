"""Plans of the warp-specialised state pass in CuTe-DSL: that of Gluon, in another language.

Who does what, and what a chunk brings, are the same. The numbers of a chunk's rows are one bulk
copy here, and copies leave room between blocks of rows; so every number of rows a token has one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from attncc.codegen.affine_choices import BLOCK, ROWS
from attncc.codegen.affine_memory import BYTES
from attncc.codegen.affine_plans import ChunkedPlans, Part, SplitPlans, StatePlan
from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Spec
from attncc.codegen.plan_gluon_state import (
    COLUMNS,
    MOST_STAGES,
    Operands,
    WarpStateChoice,
    WarpStatePlan,
    consumers_of,
    operands_of,
    own_vectors,
    shown_const,
)
from attncc.codegen.plan_table import RULE
from attncc.codegen.target import shared_limit

ROWS_A_TOKEN = tuple(range(1, BLOCK + 1))
"""Rows of a token that a block can hold."""
MAP_BYTES = 128
"""A tensor map."""
RESERVE = 2 << 10
"""Barriers, and alignment of the first place to 1024 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CuteStatePlan(WarpStatePlan):
    """A state pass by a loading warp and one or two multiplying warpgroups.

    Attributes:
        columns_read: ``places``, rounded up to what a product may be wide.
        zeroed: no copy fills some of a chunk's rows or columns, which have to be zeros.
    """

    columns_read: int
    zeroed: bool


def cute_plans(
    whole: ChunkedPlans, spec: Spec, choice: WarpStateChoice | None = None, chosen: str = RULE
) -> ChunkedPlans | Refusal:
    """The plans with state passes in CuTe-DSL.

    Args:
        whole: the Triton plans with tiles of 64 columns, states kept transposed.
        spec: of the call.
        choice: what may be chosen freely.
        chosen: who chose it.

    Returns:
        The plans, or why the state pass has no such form.
    """
    found = operands_of(whole.state, spec, ROWS_A_TOKEN)
    if isinstance(found, Refusal):
        return found
    form = whole.state.form
    if name := shown_const(whole.state):
        [out], program = whole.state.program.outputs, whole.state.program
        return Refusal(f"output {out.name} loads {name} along {whole.state.blocked}", program.loc)
    if whole.state.each:
        reason = f"decays along {form.active[0]} are inside the operands"
        return Refusal(reason, whole.state.program.loc)
    made = []
    for plan in (whole.state, whole.split.summary, whole.split.local):
        one = _cute_plan(plan, spec, found, choice or WarpStateChoice(), chosen)
        if isinstance(one, Refusal):
            return one
        made.append(one)
    state, summary, local = made
    held: dict[str, Any] = {f.name: getattr(whole, f.name) for f in fields(whole)}
    split = SplitPlans(summary, whole.split.start, local)
    return ChunkedPlans(**held | {"state": state, "split": split})


def _cute_plan(
    plan: StatePlan, spec: Spec, held: Operands, choice: WarpStateChoice, chosen: str
) -> CuteStatePlan | Refusal:
    consumers = choice.consumers or consumers_of(plan, spec)
    if plan.column_blocks % consumers:
        consumers = 1
    values: dict[str, Any] = {f.name: getattr(plan, f.name) for f in fields(plan)}
    values |= {
        "template": "cutedsl/affine_state.py.jinja", "chosen": chosen, "num_warps": 4,
        "transposed": True, "a": held.a, "b": held.b, "const": held.const,
        "vectors": held.vectors if plan.part is not Part.SUMMARY else (), "places": plan.tokens,
        "columns_read": -(-plan.tokens // 8) * 8, "consumers": consumers, "reader": False,
        "zeroed": plan.block_tokens * len(plan.form.rows) < BLOCK,
        "consumer_registers": 232, "producer_registers": 40, "chained": False,
    }  # fmt: skip
    one = CuteStatePlan(**values | {"num_stages": 1})
    room = shared_limit(spec.target) - RESERVE - beside_bytes(one)
    fits = room // sum(place_bytes(one).values())
    if fits < max(1, choice.stages or 0):
        many = f"{choice.stages} chunks do" if choice.stages else "a chunk does"
        return Refusal(f"{many} not fit in shared memory", plan.program.loc)
    return CuteStatePlan(**values | {"num_stages": choice.stages or min(MOST_STAGES, fits)})


def place_bytes(plan: CuteStatePlan) -> dict[str, int]:
    """What a chunk takes in shared memory: bytes of a place of each ring, by what it holds.

    All but the last one, the rows' numbers, are multiples of 1024.
    """
    height, size = plan.axis(plan.form.active[0]).block, BYTES[plan.storage]
    shown = plan.part is not Part.SUMMARY
    found = dict.fromkeys(sorted({plan.a, plan.b} - {""}), ROWS * height * size)
    for name in own_vectors(plan):
        found[f"read {name}"] = plan.columns_read * height * size
    if plan.const:
        found["const"] = plan.consumers * ROWS * COLUMNS * size
    if plan.solve:
        found["inverse"] = ROWS * ROWS * size
    for read in plan.form.reads if shown else ():
        found[f"mix {read.name}"] = plan.columns_read * ROWS * size
    if plan.line_stride:
        found["lines"] = -(-plan.line_stride * 4 // MAP_BYTES) * MAP_BYTES
    return found


def beside_bytes(plan: CuteStatePlan) -> int:
    """Outputs on their way, and room for tensor maps: one of the loading warp's, one each."""
    warps = plan.consumers * plan.num_warps
    return plan.consumers * plan.columns_read * COLUMNS * BYTES[plan.storage] + (
        MAP_BYTES * (1 + warps)
    )
