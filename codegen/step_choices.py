"""What decides the tile of a stepwise kernel: the table of measured plans, else a rule.

A step reads its states once and writes them once; what decides how fast is how many bytes a
multiprocessor has on their way. That is the registers of a thread, and the time a program takes
between its loads and its stores: sums over the state, each with barriers, and vectors beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncc.codegen.plan import Spec
from attncc.codegen.plan_table import Family, Wanted, decide
from attncc.codegen.scan_tiles import TiledBody, largest, power, states_of
from attncc.codegen.terms import depends_on_state
from attncc.dsl.graph import walk
from attncc.dsl.ir import Contract, Input, Lifetime, Program, Reduce, Select

MANY_STATES = 4096
"""From so many states on a step's programs take twice the columns, with as many warps.

On an H200 with 64 KB a state 2.3 % faster at 16384 and 1.5 % at 4096; at 1024, whose last programs
are a larger part of the time, 2 % slower.
"""
ALONE = 256
"""Elements of a warp where none needs another: 8 a thread.

On an H200 128 states of 4096 take 4.2 us with four warps a program of 1024 and 5.2 with one.
"""
STEP_TILE = 16384
"""Most elements of one program's tile in ``step``: 64 registers a thread at 8 warps."""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The tile of a stepwise kernel.

    Attributes:
        columns: of the axis that is cut, in one program; 1 where none is.
        num_warps: of a program.
        registers: most of a thread, or 0 to leave them to the compiler.
        narrow: inputs of 16 bits are widened where they are used.
        states_first: the only token's states are stored before its outputs are found.
        joint: outputs read states before their last write, in one sum with what that needs.
        own_loads: vectors of 16 bits are loaded by each thread as it needs them.
        chosen: who decided.
    """

    columns: int
    num_warps: int
    registers: int
    narrow: bool
    states_first: bool
    joint: bool
    own_loads: bool
    chosen: str


def choose_step(program: Program, tiled: TiledBody, spec: Spec) -> StepChoice:
    """The tile of a step.

    Args:
        program: a scan.
        tiled: its body, and the tile that may be cut.
        spec: of the call; the bucket ``systems`` is how many states there are.
    """
    chosen, fixed = decide(_wanted(program, tiled, spec), spec.target, spec.tuned)
    given: dict[str, Any] = dict(fixed)
    columns = 1
    if tiled.blocked:
        own = given.get("columns") or _columns(program, tiled, spec)
        columns = min(power(spec.size(tiled.blocked)), own)
    warps = given.get("num_warps") or _warps(tiled, spec, columns)
    registers, narrow = given.get("registers", 0), given.get("narrow", False)
    order = {n: given.get(n, False) for n in ("states_first", "joint", "own_loads")}
    return StepChoice(columns, warps, registers, narrow, **order, chosen=chosen)


def _wanted(program: Program, tiled: TiledBody, spec: Spec) -> Wanted:
    """What an entry of the table is matched with.

    ``vectors`` are the token's inputs along the state's whole axes, by rows of them; ``reads``
    the sums over a state.
    """
    nodes = tuple(walk(*tiled.body.roots))
    whole = {t.axis for t in tiled.tile if t.axis != tiled.blocked and t.size > 1}
    held = (Lifetime.STATE, Lifetime.WINDOW)
    own = [n for n in nodes if isinstance(n, Input) and n.lifetime not in held]
    vectors = {n for n in own if whole & {*n.axes}}
    rows = [n.arg for n in nodes if isinstance(n, Select) and n.arg in vectors]
    count = len(vectors) + len(rows) - len({*rows})
    reads = [n for n in nodes if isinstance(n, (Contract, Reduce)) and depends_on_state(n)]
    state = states_of(program)[0]
    sizes = [t.size for t in tiled.tile if t.axis in state.pattern.axes and t.size > 1]
    facts = {
        "state": "x".join(map(str, sizes)), "dtype": spec.dtype(state.name),
        "states": str(len(program.state_names)), "cut": str(_cut(tiled)).lower(),
        "tokens": "1" if dict(spec.buckets).get("tokens") == 1 else "more",
        "vectors": str(count), "reads": str(len(reads)),
    }  # fmt: skip
    systems = tuple((k, n) for k, n in spec.buckets if k == "systems")
    return Wanted(Family.STEP, tuple(facts.items()), systems)


def _cut(tiled: TiledBody) -> bool:
    """Whether there is an axis of several places to cut."""
    return any(t.axis == tiled.blocked and t.size > 1 for t in tiled.tile)


def _columns(program: Program, tiled: TiledBody, spec: Spec) -> int:
    """Width of a block: few columns and many programs, but whole sectors of memory."""
    inner, whole = _inner(program, tiled), tiled.narrow
    if not inner and whole >= STEP_TILE // 4:
        return 1
    want = max(32 if inner else 8, 1024 // whole) * (2 if inner and many_states(spec) else 1)
    while want > 1 and want * whole > STEP_TILE:
        want //= 2
    return want


def _inner(program: Program, tiled: TiledBody) -> bool:
    """Whether what is cut is innermost in memory."""
    return all(t.pattern.axes[-1] == tiled.blocked for t in states_of(program))


def _warps(tiled: TiledBody, spec: Spec, columns: int) -> int:
    blocks = {t.axis: t.block for t in (tiled.cut(columns) if tiled.blocked else tiled.tile)}
    elements = largest(tiled.body.roots, blocks)
    each = 2048 if many_states(spec) and elements == 8192 else 1024  # elements of a warp
    if tiled.narrow == 1:
        each = ALONE
    return min(8, power(elements // each))


def many_states(spec: Spec) -> bool:
    """Whether a call has so many states that its last programs are a small part of its time."""
    return dict(spec.buckets).get("systems", 0) >= MANY_STATES
