"""Plans of warp-specialised softmax prefill in CuTe-DSL: those of Gluon, in another language.

Rings, barriers, registers and who does what are the same; only the template differs, and that the
loading warp has a warpgroup of its own, whose registers the multiplying ones take.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Spec
from attncc.codegen.plan_gluon import WarpChoice, WarpPlan, warp_plan
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.plan_table import RULE
from attncc.codegen.warp_forms import PLAIN
from attncc.dsl.graph import walk


@dataclass(frozen=True, slots=True, kw_only=True)
class CutePlan(WarpPlan):
    """A tile of two warpgroups' rows, as a CuTe-DSL kernel of three warpgroups."""


def cute_plan(
    whole: TiledPlan, spec: Spec, choice: WarpChoice | None = None, chosen: str = RULE
) -> CutePlan | Refusal:
    """The CuTe-DSL form of a tile.

    Args:
        whole: the plan of the Triton tile.
        spec: of the call.
        choice: what may be chosen freely.
        chosen: who chose it.

    Returns:
        The plan, or why the tile has no such form.
    """
    found = warp_plan(whole, spec, choice, chosen)
    if isinstance(found, Refusal):
        return found
    dots = {d.node for d in found.fold.dots}
    if found.fold.where is not None and dots & set(walk(found.fold.where)):
        return Refusal("the mask reads the score", found.fold.node.loc)
    held: dict[str, Any] = {f.name: getattr(found, f.name) for f in fields(found)}
    held |= {"template": "cutedsl/softmax_prefill.py.jinja", "chained": False}
    return CutePlan(**held | {f.name: getattr(PLAIN, f.name) for f in fields(PLAIN)})
