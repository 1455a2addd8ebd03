"""Plans of affine states in chunks whose outputs read them across.

The state pass leaves, of every chunk, the state that it starts with and the rows that it adds, as
the products take them. With these no chunk needs another: errors of one do not reach the next. One
kernel multiplies the read vectors with both, and in a last one every column of the outputs is a
thread that goes through the tokens of a chunk. Along the axis that rows are written decays may
differ, so no product of matrices holds what is left; but a column needs no other, and the rows of
the tokens before it, each under the decays since, stay in the registers of its thread.
"""

from __future__ import annotations

from dataclasses import fields, replace

from attncc.codegen.affine_args import place_args
from attncc.codegen.affine_choices import BLOCK, ROWS, Choice
from attncc.codegen.affine_plans import (
    AcrossPlan,
    ChunkedPlans,
    LeavingPlan,
    StatePlan,
    SystemPlan,
)
from attncc.codegen.forms import AcrossForm, Refusal
from attncc.codegen.plan import Arg, Dialect, Spec
from attncc.codegen.plan_affine import plan_chunked
from attncc.codegen.plan_gluon_keys import keys_plans
from attncc.codegen.plan_scan import flat_arg, input_args, output_args, size_args
from attncc.codegen.scan_tiles import TileAxis, tile_axes, unprintable
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Contract, Node, Program, Reduce

BY_RULE = True
"""Whether calls take these kernels; else such scans are stepped."""
MOST = 128
"""Elements of the state along either axis: a program holds both whole."""
STARTS, ADDED = "chunk_starts", "chunk_rows"
"""What the state pass leaves of a chunk: the state before it, and what its rows add."""
SCORES, BASES = "chunk_scores", "chunk_bases"
"""Products that are left of a chunk: read vectors with rows, and with the state before it."""
THREADS = 32
"""Columns of a warp of the last kernel."""


def plan_across(
    program: Program, across: AcrossForm, spec: Spec, choice: Choice | None = None
) -> ChunkedPlans | Refusal:
    """The kernels of a scan whose outputs read its state across, or why it is stepped.

    Args:
        program: the scan.
        across: its form.
        spec: dtypes and static sizes.
        choice: what the kernels up to the state pass take instead of their own choice.
    """
    reason = _problem(program, across, spec)
    if reason is not None:
        return reason
    plans = plan_chunked(across.core, across.form, spec, choice)
    if isinstance(plans, Refusal):
        return plans
    tile = tile_axes([across.form.active[0], across.over], spec, 16)
    if isinstance(tile, Refusal):
        return tile
    if plans.state.storage == "fp32" or max(t.block for t in tile) > MOST:
        sizes = " x ".join(str(t.size) for t in tile)
        return Refusal(f"a state of {sizes} with operands of {plans.state.storage}", program.loc)
    if spec.dialect is None and not isinstance(keys := keys_plans(plans, spec), Refusal):
        plans = replace(plans, prepare=keys[0], mix=keys[1])
    last = _last(program, across, spec, plans, tile)
    bases = _bases(program, across, spec, last, tile[0])
    return replace(plans, state=_leaving(plans.state, last.wide), across=(bases, last))


def _problem(program: Program, across: AcrossForm, spec: Spec) -> Refusal | None:
    """What the last kernel does not cover."""
    form, axes = across.form, program.tensor(across.form.state).pattern.axes
    if spec.dialect not in (None, Dialect.TRITON):
        return Refusal("states that outputs read across are Triton's", program.loc)
    if spec.token_slots:
        return Refusal("a state after every token, which a chunk does not have", program.loc)
    if len(form.rows) != 1 or form.rows[0].write_slot != len(form.decays):
        return Refusal("a token with other than one update, behind its decay", program.loc)
    if [a for a in axes if a in form.passive and a != "B"] != [across.over]:
        return Refusal("passive axes beside the one that outputs sum over", program.loc)
    roots = [*across.outputs, *(r.vector for r in across.reads)]
    for node in walk(*across.outputs):
        over = set(node.over) if isinstance(node, (Contract, Reduce)) else set()
        extra = (over | set(axes_of(node))) - {*form.system, *form.active, "B"}
        if extra:
            return Refusal(f"an output has the axis {' '.join(sorted(extra))}", node.loc)
    for node in walk(*(r.vector for r in across.reads)):
        if isinstance(node, (Contract, Reduce)) and set(node.over) - {across.over}:
            return Refusal("a sum inside a read vector", node.loc)
    return unprintable(roots, program)


def _leaving(state: StatePlan, wide: int) -> LeavingPlan:
    """The state pass that leaves what the last kernel takes."""
    more = (flat_arg(n, state.storage, written=True) for n in (STARTS, ADDED))
    held = {f.name: getattr(state, f.name) for f in fields(StatePlan)}
    return LeavingPlan(**held | {"transposed": False, "wide": wide, "args": (*state.args, *more)})


def _last(
    program: Program, across: AcrossForm, spec: Spec, plans: ChunkedPlans,
    tile: tuple[TileAxis, ...],
) -> AcrossPlan:  # fmt: skip
    """What goes through the tokens of chunks."""
    form, given, (key, value) = across.form, plans.prepare or plans.mix, tile
    assert given is not None
    roots = [*form.decays, form.rows[0].a, *across.outputs]
    whole = _sums(key.axis, *roots)
    part = replace(key, block=key.block if whole else min(THREADS, key.block))
    args: list[Arg] = [*input_args(roots, program, spec), *output_args(program, spec)]
    args += [flat_arg(n, "fp32") for n in (SCORES, BASES)]
    args += place_args("chunks", packed=spec.packed)
    held = {f.name: getattr(given, f.name) for f in fields(SystemPlan)}
    return AcrossPlan(**held | {
        "phase": "across", "template": "triton/affine_columns.py.jinja", "program": program,
        "chained": False, "num_warps": max(1, part.block // THREADS), "num_stages": 1,
        "tile": (part, value), "blocked": across.over, "shared_axis": "", "shared": 1,
        "args": (*args, *size_args(args, tile, given.grid_axes, spec)),
        "reads": across.reads, "outputs": across.outputs, "wide": value.block,
        "high": key.block, "leaf": BLOCK,
    })  # fmt: skip


def _bases(
    program: Program, across: AcrossForm, spec: Spec, last: AcrossPlan, key: TileAxis
) -> AcrossPlan:
    """What multiplies the read vectors of chunks."""
    vectors = input_args([r.vector for r in across.reads], program, spec)
    left = [flat_arg(n, last.storage) for n in (STARTS, ADDED)]
    made = [flat_arg(n, "fp32", written=True) for n in (SCORES, BASES)]
    args: list[Arg] = [*vectors, *left, *made, *place_args("chunks", packed=spec.packed)]
    tile = (key, last.axis(across.over))
    return replace(
        last, phase="across_bases", template="triton/affine_bases.py.jinja", num_warps=4,
        tile=tile, args=(*args, *size_args(args, tile, last.grid_axes, spec)),
    )  # fmt: skip


def _sums(axis: str, *nodes: Node) -> bool:
    """Whether a value inside some expressions is a sum over an axis."""
    return any(isinstance(n, (Contract, Reduce)) and axis in n.over for n in walk(*nodes))


def left_of(plans: ChunkedPlans) -> dict[str, tuple[int, str]]:
    """Numbers that kernels leave of a chunk and system, and their type, by buffer."""
    if not plans.across:
        return {}
    last, storage = plans.across[-1], plans.state.storage
    high, reads = last.high, len(last.reads)
    return {
        STARTS: (high * last.wide, storage), ADDED: (ROWS * last.wide, storage),
        SCORES: (reads * ROWS * ROWS, "fp32"), BASES: (reads * ROWS * high, "fp32"),
    }  # fmt: skip
