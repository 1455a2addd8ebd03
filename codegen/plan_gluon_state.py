"""Plans of the warp-specialised state pass (Gluon), made from those of the Triton kernels.

One warp copies what a chunk needs through tensor maps into rings in shared memory; one or two
warpgroups of 64 columns each carry the state over the chunks, in registers. The flat table, the
buffers between the kernels and the arithmetic are those of ``affine_state``; only who does what
differs. What the skeleton does not cover stays with Triton, for a reason that is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from attncc.codegen.affine_checks import MOST_ROWS, decays_each, split_row
from attncc.codegen.affine_choices import BLOCK, MULTIPROCESSORS, ROWS, TOKENS
from attncc.codegen.affine_memory import BYTES
from attncc.codegen.affine_plans import ChunkedPlans, Part, SplitPlans, StatePlan
from attncc.codegen.affine_rows import row_groups, unpicked
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.plan import Dialect, Spec, TensorArg
from attncc.codegen.plan_gluon_systems import (
    HEIGHTS,
    MOST_READS,
    STORED,
    TARGETS,
)
from attncc.codegen.plan_table import RULE
from attncc.codegen.target import shared_limit
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime, Lit, Map, Node, Select, Size

COLUMNS = 64
"""Columns of one warpgroup: the rows of one instruction, as the state is kept as [v, k]."""
ROWS_A_TOKEN = (1, 2)
"""Rows of a token that fill blocks, and leave each chunk's tokens 128 bytes of fp32 numbers: the
places of a ring are multiples of that, or a copy faults. Rows that follow each other may be any
number of a token.
"""
MOST_STAGES = 4
"""Chunks in flight that the rule takes at most."""
RESERVE = 4 << 10
"""Barriers, and alignment of tiles to 1024 bytes."""
ELEMENT_WISE = (Map, Input, Lit, Size, Select)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpStatePlan(StatePlan):
    """A state pass by specialised warps.

    ``num_warps`` counts the warps of one warpgroup, ``num_stages`` the chunks in flight.

    Attributes:
        a: name of the input with the rows' vectors as they are written.
        b: of those as they read the state; "" where no row does.
        const: of the rows' constants; "" where they have none.
        vectors: of the vector of each read-out.
        places: tokens of a chunk, as columns of the read-outs.
        consumers: warpgroups that multiply.
        loaders: warps that load.
        columnwise: squares lie column by column in memory.
        reader: one more makes the outputs of a single one, off the way from chunk to chunk.
        consumer_registers: 32-bit registers of the threads of those beside the first.
        producer_registers: of the threads of the warp that loads.
    """

    a: str
    b: str
    const: str
    vectors: tuple[str, ...]
    places: int
    consumers: int
    consumer_registers: int
    producer_registers: int
    loaders: int = 1
    columnwise: bool = False
    reader: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpStateChoice:
    """What may be chosen freely; None leaves it to the rule.

    Attributes:
        stages: chunks in flight.
        consumers: warpgroups of 64 columns in one program.
        summary_consumers: the same where segments are summed up, which have twice the columns.
        reader: where that is one, another makes its outputs.
        loaders: warps that load; each makes the tensor maps of its share of the rings.
        columnwise: the kernel of ``systems`` leaves squares column by column, where it can. Fewer
            instructions, but slower in every whole call that was timed: no entry has it.
        leaf: rows of the blocks that it solves by substitution, where squares lie by columns; 16
            was not timed.
        chained: kernels may be launched while the one ahead of them still runs. Slower in most
            calls that were timed: no entry has it.
        systems: one Gluon kernel stands for ``prepare`` and ``mix``, where it can.
        system_registers: of its threads where tokens have several rows: with 168 six programs share
            a multiprocessor, else four or five.
        dialect: of a call that names none.
    """

    stages: int | None = None
    consumers: int | None = None
    summary_consumers: int | None = None
    reader: bool = False
    loaders: int = 1
    columnwise: bool = False
    leaf: int | None = None
    chained: bool = False
    systems: bool = True
    system_registers: int | None = None
    dialect: Dialect = Dialect.GLUON


def warp_plans(
    whole: ChunkedPlans, spec: Spec, choice: WarpStateChoice | None = None, chosen: str = RULE
) -> ChunkedPlans | Refusal:
    """The plans with warp-specialised state passes.

    Args:
        whole: the Triton plans with tiles of :data:`COLUMNS` columns, states kept transposed.
        spec: of the call; the bucket ``systems`` steers how many warpgroups a program has.
        choice: what may be chosen freely.
        chosen: who chose it.

    Returns:
        The plans, or why the state pass has no such form.
    """
    counts = range(1, MOST_ROWS + 1) if whole.state.gathered else ROWS_A_TOKEN
    found = operands_of(whole.state, spec, counts)
    if isinstance(found, Refusal):
        return found
    choice = choice or WarpStateChoice()
    made = []
    for plan in (whole.state, whole.split.summary, whole.split.local):
        one = _warp_plan(plan, spec, found, choice, chosen)
        if isinstance(one, Refusal):
            return one
        made.append(one)
    state, summary, local = made
    return replace(whole, state=state, split=SplitPlans(summary, whole.split.start, local))


def columns_a_program(plan: StatePlan) -> int:
    """Blocks of columns that one program carries."""
    return plan.consumers if isinstance(plan, WarpStatePlan) else 1


@dataclass(frozen=True, slots=True)
class Operands:
    """Names of inputs, as in the plan."""

    a: str
    b: str
    const: str
    vectors: tuple[str, ...]


def _readable(plan: StatePlan) -> bool:
    """Whether a reading warpgroup's kernel can be assembled.

    Triton 3.6 carries an assembler that crashes on one with a decay for each of 64 elements.
    """
    return not decays_each(plan.form) or plan.axis(plan.form.active[0]).block >= 128


def _warp_plan(
    plan: StatePlan, spec: Spec, held: Operands, choice: WarpStateChoice, chosen: str
) -> WarpStatePlan | Refusal:
    reads = plan.part is not Part.SUMMARY
    chosen_here = choice.consumers if reads else choice.summary_consumers or choice.consumers
    consumers = chosen_here or consumers_of(plan, spec)
    if plan.column_blocks % consumers:
        consumers = 1
    reader = choice.reader and reads and consumers == 1 and _readable(plan)
    found: dict[str, Any] = {f.name: getattr(plan, f.name) for f in fields(plan)}
    made = WarpStatePlan(
        **found | {"template": "gluon/affine_state.py.jinja", "chosen": chosen, "num_warps": 4,
           "transposed": True, "chained": choice.chained and spec.chained},
        a=held.a, b=held.b, const=held.const, vectors=held.vectors if reads else (),
        places=TOKENS if plan.gathered else ROWS // len(plan.form.rows), consumers=consumers,
        loaders=choice.loaders, columnwise=choice.columnwise, reader=reader,
        consumer_registers=208 if reader else 232, producer_registers=56 if reader else 40,
    )  # fmt: skip
    fits = stages_that_fit(made, spec.target)
    if fits < max(1, choice.stages or 0):
        many = f"{choice.stages} chunks do" if choice.stages else "a chunk does"
        return Refusal(f"{many} not fit in shared memory", plan.program.loc)
    stages = choice.stages or min(MOST_STAGES, fits)
    return replace(made, num_stages=stages)


def consumers_of(plan: StatePlan, spec: Spec) -> int:
    """Two warpgroups share what they load; one alone has tensor cores for itself.

    Programs of one warpgroup where that fills the device no more than once.
    """
    systems = dict(spec.buckets).get("systems", MULTIPROCESSORS)
    whole = plan.part is Part.WHOLE
    many = systems * plan.column_blocks > MULTIPROCESSORS
    return 2 if whole and many and plan.column_blocks % 2 == 0 else 1


def chunk_bytes(plan: WarpStatePlan) -> int:
    """Bytes that the copies of one chunk bring, from above."""
    height, shown = plan.axis(plan.form.active[0]).block, plan.part is not Part.SUMMARY
    vectors = ROWS * len({plan.a, plan.b} - {""}) + plan.places * len(own_vectors(plan))
    numbers = vectors * height + ROWS * COLUMNS * plan.consumers * bool(plan.const)
    numbers += ROWS * ROWS * plan.solve + plan.places * ROWS * len(plan.form.reads) * shown
    return numbers * BYTES[plan.storage] + 4 * (ROWS * len(plan.lines) + height * plan.each)


def own_vectors(plan: WarpStatePlan) -> tuple[str, ...]:
    """The inputs of read-outs that are not loaded as rows' vectors anyway, each once."""
    rows = {plan.a, plan.b} if len(plan.form.rows) == 1 else set()
    return tuple(dict.fromkeys(v for v in plan.vectors if v not in rows))


def stages_that_fit(plan: WarpStatePlan, target: str) -> int:
    """Chunks in flight that shared memory holds."""
    handed = (plan.axis(plan.form.active[0]).block + ROWS) * plan.reader
    held = (plan.places * plan.consumers + handed) * COLUMNS * BYTES[plan.storage]
    return (shared_limit(target) - RESERVE - held) // chunk_bytes(plan)


# --- what the skeleton does not cover ------------------------------------------------------------


def operands_of(
    plan: StatePlan, spec: Spec, counts: Sequence[int] = ROWS_A_TOKEN
) -> Operands | Refusal:
    """The inputs that copies bring, or the first reason why there are none.

    Args:
        plan: the Triton plan.
        spec: of the call.
        counts: numbers of rows a token that the dialect's copies can bring.
    """
    form, loc = plan.form, plan.program.loc
    reason = next(_problems(plan, spec, counts), None)
    if reason is not None:
        return Refusal(reason, loc)
    [active], rows = form.active, len(form.rows)
    wanted: list[tuple[str, list[Node | None], str, int]] = []
    if not plan.each:
        wanted.append(("a", [r.a for r in form.rows], active, rows))
    if plan.solve and not plan.each:
        wanted.append(("b", [r.b for r in form.rows], active, rows))
    consts = [split_row(r, form.passive).const for r in form.rows]
    if any(c is not None for c in consts):
        wanted.append(("const", consts, plan.blocked, rows))
    reads = () if plan.each else form.reads
    wanted += [(read.name, [read.vector], active, 1) for read in reads]
    names = _inside(plan) if plan.each else {}
    for role, nodes, axis, each in wanted:
        name = _loaded(nodes)
        reason = _map_problem(plan, name, axis, each)
        if name is None or reason is not None:
            return Refusal(reason or _computed(role), loc)
        names[role] = name
    vectors = tuple(names[read.name] for read in form.reads)
    return Operands(names["a"], names.get("b", ""), names.get("const", ""), vectors)


def _inside(plan: StatePlan) -> dict[str, str]:
    """The operands that the kernel before has left with decays along the active axis inside."""
    names = {"a": "late_a"} | ({"b": "early_b"} if plan.solve else {})
    return names | {read.name: f"early_{read.name}" for read in plan.form.reads}


def _computed(role: str) -> str:
    return f"operand {role} is computed, so that no tensor map can load it"


def _problems(plan: StatePlan, spec: Spec, counts: Sequence[int]) -> Iterator[str]:
    form, key, value = plan.form, plan.axis(plan.form.active[0]), plan.axis(plan.blocked)
    rows = len(form.rows)
    if spec.target not in TARGETS:
        yield f"it is written for {', '.join(TARGETS)}, not {spec.target}"
    if plan.storage not in STORED:
        yield f"operands of {plan.storage}, not of 16 bits"
    if rows not in counts:
        yield f"{rows} rows a token do not fill blocks of {BLOCK} that a copy can bring"
    if key.size not in HEIGHTS:
        yield f"{key.axis} of {key.size} is not {' or '.join(map(str, HEIGHTS))}"
    if value.size % COLUMNS:
        yield f"{value.axis} of {value.size} is no multiple of {COLUMNS}"
    if len(form.reads) > MOST_READS:
        yield f"{len(form.reads)} read-outs"
    yield from _output_problems(plan, form)


def _output_problems(plan: StatePlan, form: AffineForm) -> Iterator[str]:
    if len(form.outputs) != 1:
        yield f"{len(form.outputs)} outputs"
        return
    [out], [value] = plan.program.outputs, form.outputs
    arg = plan.tensor(out.name)
    problem = _box_problem(plan, arg, plan.blocked, 1)
    lacking = [a for a in plan.grid_axes if a not in arg.pattern.axes]
    if problem is not None or lacking:
        yield problem or f"output {out.name} has no axis {lacking[0]}"
    names = {r.name for r in form.reads}
    nodes = list(walk(value))
    if not any(isinstance(n, Input) and n.name in names for n in nodes):
        yield f"output {out.name} reads no state"
    if not all(isinstance(n, ELEMENT_WISE) for n in nodes):
        yield f"output {out.name} is not computed element by element"
    beside = (n for n in nodes if isinstance(n, Input) and n.name not in names)
    along = [n.name for n in beside if plan.blocked in n.axes]
    if along:  # the skeleton has indices of columns beside the state's rows only
        yield f"output {out.name} loads {along[0]} along {plan.blocked}"


def _loaded(nodes: list[Node | None]) -> str | None:
    """The input that the rows of an operand are, or None."""
    first, *others = row_groups(nodes)
    node = unpicked(first.node, 0)
    if others or first.shift or not isinstance(node, Input) or node.lifetime is Lifetime.STATE:
        return None
    return node.name


def _map_problem(plan: StatePlan, name: str | None, axis: str, rows: int) -> str | None:
    if name is None:
        return None
    return _box_problem(plan, plan.tensor(name), axis, rows)


def _box_problem(plan: StatePlan, arg: TensorArg, axis: str, rows: int) -> str | None:
    """Why no tensor map brings rows of tokens (``rows`` a token) and a column of ``axis``."""
    scan = plan.program.scan or "T"
    if arg.dtype != plan.storage:
        return f"{arg.name} is {arg.dtype}, not {plan.storage}"
    if not arg.aligned:
        return f"{arg.name} is not aligned to 16 bytes"
    if arg.pattern.dims[-1] != (axis,) or scan not in arg.pattern.axes:
        return f"no tensor map for {arg.name} [{arg.pattern}]"
    inner = arg.pattern.dims[arg.pattern.dim_of(scan)][1:]
    held = 1
    for a in inner:
        held *= dict(plan.static).get(a, 0)
    if held != rows or len(inner) > 1:
        return f"{arg.name} has {held} rows a token along {scan}, not {rows}"
    return None
