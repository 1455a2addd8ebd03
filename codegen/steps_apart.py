"""Which steps of one token leave sums of their outputs to a kernel of rows.

A program that needs a whole state of 64 KB leaves a multiprocessor one or two programs, which load,
compute and store in turns. Where only the outputs need more than a part of it, many programs each
have a part, and a few microseconds' kernel behind them computes the outputs in whole rows.
"""

from __future__ import annotations

from attncc.codegen.forms import Refusal
from attncc.codegen.passes.split_rows import SplitRows
from attncc.codegen.passes.split_sums import cuttable, split_sums
from attncc.codegen.plan import Spec
from attncc.codegen.plan_pointwise import plan_pointwise
from attncc.codegen.rows_apart import core_spec, rows_behind, rows_spec
from attncc.codegen.scan_tiles import TiledBody, states_of, tile_body
from attncc.codegen.step_choices import many_states
from attncc.dsl.ir import Program

SYSTEMS = 32
"""From so many states on; fewer were not measured."""
LARGE = 8192
"""Elements of a state that a program still holds whole, and of the parts of larger ones."""


def step_apart(program: Program, spec: Spec) -> SplitRows | None:
    """The scan and the rows of a step that runs as both, or None for one that does not.

    Args:
        program: a scan.
        spec: of the call, complete: the buckets ``tokens`` and ``systems`` decide.
    """
    buckets = dict(spec.buckets)
    if buckets.get("tokens") != 1 or buckets.get("systems", 0) < SYSTEMS or spec.token_slots:
        return None
    whole = _uncut(program, spec)
    if whole is None or whole.narrow <= LARGE:
        return None
    for parts in (rows_behind(program), _in_parts(program, spec, whole.narrow)):
        if isinstance(parts, SplitRows) and _smaller(parts, spec, whole.narrow):
            return parts
    return None


def _uncut(program: Program, spec: Spec) -> TiledBody | None:
    """The tile of a step, if it holds whole states."""
    tiled = tile_body(program, spec)
    if isinstance(tiled, Refusal):
        return None
    own = {a for t in states_of(program) for a in t.pattern.axes[-2:]}
    return None if tiled.blocked in own else tiled


def _in_parts(program: Program, spec: Spec, elements: int) -> SplitRows | Refusal:
    static = dict(spec.static)
    for axis in cuttable(program):
        parts = max(2, elements // (LARGE if many_states(spec) else LARGE // 2))
        if axis in static and static[axis] % parts == 0:
            return split_sums(program, axis, static[axis], parts)
    return Refusal("no axis that only outputs sum over", program.loc)


def _smaller(parts: SplitRows, spec: Spec, elements: int) -> bool:
    """Whether the scan's programs have parts of states, and the rows a kernel."""
    tiled = tile_body(parts.core, core_spec(parts, spec))
    if isinstance(tiled, Refusal) or tiled.narrow >= elements or parts.rows is None:
        return False
    return not isinstance(plan_pointwise(parts.rows, rows_spec(parts, spec)), Refusal)
