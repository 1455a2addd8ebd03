"""Plans of ``systems``: the kernels ``prepare`` and ``mix`` in one, in Gluon.

A lane owns a column of a chunk's square, so a product over an interval of decays and a row of the
substitution are chains of one thread, without an exchange between lanes. Both kernels' squares are
weighed by the same decays, which are multiplied up once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from attncc.codegen.affine_checks import decays_each
from attncc.codegen.affine_choices import ROWS, TOKENS
from attncc.codegen.affine_plans import ChunkedPlans, ChunkPlan, SystemPlan
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.plan import Arg, ScalarArg, Spec
from attncc.dsl.graph import walk
from attncc.dsl.ir import Contract, Reduce

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
CHUNKS = 2
"""Where a warp works on a chunk by itself, so many share a program and fetch its code together.

More wait longer for each other, and one fetches all by itself; where systems share vectors and
where a warp has one alone.
"""
BLOCK = 16
"""Rows of a block on the diagonal, where one warp solves a system block by block."""
INVERSE = "inverse"
"""The square of a chunk's inverse."""
BY_HALVES = ROWS + ROWS // 2
"""Numbers of a row of a square by halves: one of the lower half, and half of one of the upper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemsPlan(SystemPlan):
    """Solves and weighs the systems of all chunks.

    Attributes:
        announced: each program sets a flag once its results are there, for a kernel beside it.
        columnwise: squares are left column by column, as they lie in the lanes.
        leaf: rows of the blocks that are solved by substitution; those of columnwise ones only may
            be a quarter of a chunk's, else a half.
        blockwise: one warp works on a chunk; squares lie as tensor cores leave them, and those of
            64 rows are left by halves (:func:`square_size`).
    """

    columnwise: bool
    leaf: int
    blockwise: bool
    announced: bool = False

    @property
    def chunks(self) -> int:
        """See the base: a warp each, or one by all warps."""
        return self.num_warps if self.blockwise else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdedSystemsPlan(SystemsPlan):
    """The same with fewer registers a thread, so that more programs share a multiprocessor.

    For rows that follow each other; beside the vectors of one row a token, memory is what lacks.
    One warp alone was slower with fewer registers than it takes.

    Attributes:
        registers: 32-bit registers of a thread; what does not fit is put away in memory.
    """

    registers: int


def square_size(plan: ChunkPlan, name: str, *, halves: bool) -> int:
    """Numbers of a chunk's square in memory.

    One by halves has rows of 96: a row of its lower half, and one of its upper half, which is zero
    from its middle on. So a copy of 64 numbers that starts there ends behind the map, with zeros.
    What rows add to fewer tokens lies without a gap then.

    Args:
        plan: of the kernel that leaves squares, or of one that takes them.
        name: ``inverse``, or ``mix_`` and the read-out's name.
        halves: squares of 64 rows lie by halves.
    """
    if not halves:
        return ROWS * ROWS
    return TOKENS * ROWS if plan.gathered and name != INVERSE else BY_HALVES * ROWS // 2


def systems_plan(
    plans: ChunkedPlans,
    spec: Spec,
    *,
    columnwise: bool = False,
    leaf: int | None = None,
    gathered: bool = False,
    blockwise: bool = False,
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
        blockwise: one warp a chunk, where rows are written and read behind their token's decay.
        registers: of a thread of two warps, for rows that follow each other; None for as many as
            there are.
    """
    prepare, mix = plans.prepare, plans.mix
    reason = _problem(plans, spec)
    if reason is not None or prepare is None or mix is None:
        return Refusal(reason or "there is nothing to solve, or nothing to weigh")
    shared = min((prepare, mix), key=lambda p: p.shared)
    args: dict[str, Arg] = {a.name: a for a in (*prepare.args, *mix.args)}
    rows = len(shared.form.rows)
    follow = gathered and rows > 1
    blocks = blockwise and (rows == 1 or gathered) and _behind_decays(shared)
    turned = columnwise and not blocks and (rows == 1 or gathered)
    held: dict[str, Any] = {f.name: getattr(shared, f.name) for f in fields(SystemPlan)}
    held |= {
        "phase": "systems", "template": "gluon/affine_systems.py.jinja", "num_warps": WARPS,
        "args": tuple(args.values()), "columnwise": turned, "blockwise": blocks,
        "leaf": leaf if turned and leaf else HALF,
    }  # fmt: skip
    if blocks:
        template = "gluon/affine_systems_blocks.py.jinja"
        held |= {
            "template": template, "leaf": BLOCK, "num_warps": CHUNKS,
            "args": (*held["args"], ScalarArg("solved", "i32")),
        }  # fmt: skip
    if follow:
        held |= {"tokens": ROWS // rows, "block_tokens": ROWS // rows}
    if registers is not None and follow and not blocks:
        return CrowdedSystemsPlan(**held, registers=registers)
    return SystemsPlan(**held)


def _behind_decays(plan: SystemPlan) -> bool:
    """Whether every row is written and read behind its token's decay, and read-outs are."""
    form = plan.form
    slots = [r.write_slot for r in form.rows] + [r.read_slot for r in form.rows if r.b]
    return not form.decays or all([*slots, *(r.slot for r in form.reads)])


def _sums(form: AffineForm) -> bool:
    """Whether a decay, or a number that rows are multiplied by, is a sum along some axis."""
    parts = [*form.decays, *(n for r in form.rows for n in (r.coef, r.const) if n is not None)]
    return any(isinstance(n, (Contract, Reduce)) for n in walk(*parts))


def _problem(plans: ChunkedPlans, spec: Spec) -> str | None:
    state = plans.state
    key, form = state.axis(state.form.active[0]), state.form
    checks = (
        (spec.target not in TARGETS, f"it is written for {', '.join(TARGETS)}"),
        (state.storage not in STORED, f"operands of {state.storage}"),
        (decays_each(form), f"decays along {form.active[0]} are inside the operands"),
        (key.size not in HEIGHTS, f"{key.axis} of {key.size}"),
        (len(form.reads) > MOST_READS, f"{len(form.reads)} read-outs"),
        (_sums(form), "a row's numbers are sums, which no lane has by itself"),
    )
    return next((reason for failed, reason in checks if failed), None)
