"""What each loading warp of the warp-specialised state pass brings."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.emit.gluon_rings import Ring
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_gluon_state import WarpStatePlan


@dataclass(frozen=True, slots=True)
class Loads:
    """What one loading warp of ``gluon/affine_state.py.jinja`` brings.

    Attributes:
        rings: the rings that it fills.
        bytes: what its copies of one chunk bring.
        follows: some of it is what the kernel before leaves.
    """

    rings: tuple[Ring, ...]
    bytes: int
    follows: bool


def loads_of(plan: WarpStatePlan, rings: tuple[Ring, ...]) -> tuple[Loads, ...]:
    """The rings dealt out to the loading warps."""
    dealt = (rings[i :: plan.loaders] for i in range(plan.loaders))
    each = plan.consumers
    ours = {t.name for t in plan.program.tensors}
    left = [f"{a.name}_ptr +" for a in plan.args if isinstance(a, TensorArg) and a.name not in ours]
    found = []
    for some in dealt:
        size = sum(x.bytes * (each if x.each else 1) for x in some)
        follows = any(x.base.startswith(name) for x in some for name in left)
        found.append(Loads(some, size, follows))
    return tuple(found)
