"""Plans of the warp-specialised state pass (Gluon), made from those of the Triton kernels.

One warp copies what a chunk needs through tensor maps into rings in shared memory; one or two
warpgroups of 64 columns each carry the state over the chunks, in registers. The flat table, the
buffers between the kernels and the arithmetic are those of ``affine_state``; only who does what
differs. What the skeleton does not cover stays with Triton, for a reason that is said.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from attncc.codegen.affine_checks import MOST_ROWS, decays_each
from attncc.codegen.affine_choices import MULTIPROCESSORS, ROWS, TOKENS
from attncc.codegen.affine_memory import BYTES
from attncc.codegen.affine_plans import ChunkedPlans, Part, SplitPlans, StatePlan
from attncc.codegen.forms import Refusal
from attncc.codegen.plan import Dialect, Spec
from attncc.codegen.plan_gluon_mixing import MIXED, REGISTERS
from attncc.codegen.plan_gluon_operands import (
    COLUMNS,
    ROWS_A_TOKEN,
    Operands,
    operands_of,
    shown_const,
)
from attncc.codegen.plan_table import RULE
from attncc.codegen.target import shared_limit

__all__ = [
    "COLUMNS", "MOST_STAGES", "Operands", "WarpStateChoice", "WarpStatePlan", "chunk_bytes",
    "columns_a_program", "consumers_of", "one_total", "operands_of", "own_vectors", "shown_const",
    "stages_that_fit", "warp_plans",
]  # fmt: skip

MOST_STAGES = 4
"""Chunks in flight that the rule takes at most."""
RESERVE = 4 << 10
"""Barriers, and alignment of tiles to 1024 bytes."""


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
        reader: beside one, another makes the outputs, off the way from chunk to chunk.
        mixing: beside that, another makes what a chunk's rows add to its read-out.
        totals: a chunk's total decay, where it is one number, comes with the copies.
        awaited: systems that a program of the kernel before works on, where this one runs beside it
            and waits for each; 0 where it runs behind it.
        resident: there may be fewer programs than work, and each goes from one sequence's system to
            the next (:mod:`attncc.codegen.plan_gluon_resident`).
        halves: squares come by halves of rows, without what is above the diagonal's halves.
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
    mixing: bool = False
    totals: bool = False
    awaited: int = 0
    resident: bool = False
    halves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WarpStateChoice:
    """What may be chosen freely; None leaves it to the rule.

    Attributes:
        stages: chunks in flight.
        consumers: warpgroups of 64 columns in one program.
        summary_consumers: the same where segments are summed up, which have twice the columns.
        reader: where that is one, another makes its outputs.
        mixing: beside that, one more makes what rows add to a read-out, where it can: else a kernel
            of its own leaves it (:mod:`attncc.codegen.plan_gluon_mixing`).
        totals: total decays come with the copies of a chunk, else by loads ahead of it.
        loaders: warps that load; each makes the tensor maps of its share of the rings.
        columnwise: the kernel of ``systems`` leaves squares column by column, where it can. Fewer
            instructions, but slower in every whole call that was timed: no entry has it.
        leaf: rows of the blocks that it solves by substitution, where squares lie by columns; 16
            was not timed.
        blockwise: one warp solves a chunk's systems in blocks, where it can; squares then lie row
            by row (:mod:`attncc.codegen.plan_gluon_systems`).
        chained: kernels may be launched while the one ahead of them still runs. Slower in most
            calls that were timed: no entry has it.
        systems: one Gluon kernel stands for ``prepare`` and ``mix``, where it can.
        system_registers: of its threads where tokens have several rows: with 168 six programs share
            a multiprocessor, else four or five.
        resident: programs of a state pass whose warpgroups make their own outputs stay, and go from
            one sequence's system to the next.
        halves: squares of 64 rows lie by halves; the kernel that leaves them says so.
        dialect: of a call that names none.
    """

    stages: int | None = None
    consumers: int | None = None
    summary_consumers: int | None = None
    reader: bool = False
    mixing: bool = False
    totals: bool = False
    loaders: int = 1
    columnwise: bool = False
    leaf: int | None = None
    blockwise: bool = False
    chained: bool = False
    systems: bool = True
    system_registers: int | None = None
    resident: bool = False
    halves: bool = False
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
    found = operands_of(whole.state, spec, counts, wide=True)
    if isinstance(found, Refusal):
        return found
    choice = choice or WarpStateChoice()
    made = []
    assert whole.split.lead is not None
    for plan in (whole.state, whole.split.summary, whole.split.local, whole.split.lead):
        one = _warp_plan(plan, spec, found, choice, chosen)
        if isinstance(one, Refusal):
            return one
        made.append(one)
    state, summary, local, lead = made
    return replace(whole, state=state, split=SplitPlans(summary, whole.split.start, local, lead))


def columns_a_program(plan: StatePlan) -> int:
    """Blocks of columns that one program carries."""
    return plan.consumers if isinstance(plan, WarpStatePlan) else 1


def readable(plan: StatePlan) -> bool:
    """Whether a reading warpgroup's kernel can be assembled.

    Triton 3.6 carries an assembler that crashes on one with a decay for each of 64 elements, and on
    one over whole sequences with 64 elements that do not decay and a state to start from.
    """
    if plan.axis(plan.form.active[0]).block >= 128:
        return True
    whole = plan.part in (Part.WHOLE, Part.LEAD) and bool(plan.given)
    return not decays_each(plan.form) and (bool(plan.form.decays) or not whole)


def one_total(plan: StatePlan) -> bool:
    """Whether a chunk's total decay is a number."""
    return bool(plan.form.decays) and not plan.each


def _warp_plan(
    plan: StatePlan, spec: Spec, held: Operands, choice: WarpStateChoice, chosen: str
) -> WarpStatePlan | Refusal:
    reads = plan.part is not Part.SUMMARY
    leads = plan.part is Part.LEAD  # on a stream beside that of the kernels before and behind
    consumers = _consumers(plan, spec, choice)
    reader = choice.reader and reads and consumers == 1 and readable(plan)
    registers = _registers(consumers, reader=reader)
    found: dict[str, Any] = {f.name: getattr(plan, f.name) for f in fields(plan)}
    made = WarpStatePlan(
        **found | {"template": "gluon/affine_state.py.jinja", "chosen": chosen, "num_warps": 4,
           "transposed": True, "chained": choice.chained and spec.chained and not leads},
        a=held.a, b=held.b, const=held.const, vectors=held.vectors if reads else (),
        places=TOKENS if plan.gathered else ROWS // len(plan.form.rows), consumers=consumers,
        loaders=choice.loaders, columnwise=choice.columnwise, halves=choice.halves, reader=reader,
        mixing=choice.mixing and reader, totals=choice.totals and one_total(plan),
        consumer_registers=registers[0], producer_registers=registers[1],
    )  # fmt: skip
    if made.mixing:
        made = replace(made, consumer_registers=REGISTERS, producer_registers=56)
    if shown_const(plan) and reads and not reader:
        return Refusal("an output over the rows' constants needs a reader", plan.program.loc)
    fits = stages_that_fit(made, spec.target)
    if fits < max(1, choice.stages or 0):
        many = f"{choice.stages} chunks do" if choice.stages else "a chunk does"
        return Refusal(f"{many} not fit in shared memory", plan.program.loc)
    stages = choice.stages or min(MOST_STAGES, fits)
    return replace(made, num_stages=stages)


def _consumers(plan: StatePlan, spec: Spec, choice: WarpStateChoice) -> int:
    """Warpgroups of a program: as many as are chosen, where they share the columns."""
    chosen = choice.consumers
    if plan.part is Part.SUMMARY:
        chosen = choice.summary_consumers or chosen
    consumers = chosen or consumers_of(plan, spec)
    return 1 if plan.column_blocks % consumers else consumers


def _registers(consumers: int, *, reader: bool) -> tuple[int, int]:
    """Of the threads of warpgroups beside the first, and of those that load."""
    if reader:
        return 208, 56
    return (232, 40) if consumers < 3 else (160, 32)


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
    squares = len(plan.form.reads) * shown * (not plan.mixing)
    numbers += ROWS * ROWS * plan.solve + plan.places * ROWS * squares
    total = height * plan.each + ROWS * plan.totals
    return numbers * BYTES[plan.storage] + 4 * (ROWS * len(plan.lines) + total)


def own_vectors(plan: WarpStatePlan) -> tuple[str, ...]:
    """The inputs of read-outs that are not loaded as rows' vectors anyway, each once."""
    rows = {plan.a, plan.b} if len(plan.form.rows) == 1 else set()
    return tuple(dict.fromkeys(v for v in plan.vectors if v not in rows))


def stages_that_fit(plan: WarpStatePlan, target: str) -> int:
    """Chunks in flight that shared memory holds."""
    handed = (plan.axis(plan.form.active[0]).block + ROWS) * plan.reader
    handed += MIXED * plan.places * plan.mixing  # ROWS are as many as COLUMNS
    held = handed * COLUMNS * BYTES[plan.storage]
    held += plan.places * plan.consumers * COLUMNS * BYTES[out_type(plan)]
    return (shared_limit(target) - RESERVE - held) // chunk_bytes(plan)


def out_type(plan: WarpStatePlan) -> str:
    """Element type of the output."""
    [out] = plan.program.outputs
    return plan.tensor(out.name).dtype if plan.part is not Part.SUMMARY else plan.storage
