"""Plans of the chunked affine form, as values: ``plan_affine`` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from attncc.codegen.forms import AffineForm, Read
from attncc.codegen.plan import KernelPlan
from attncc.codegen.plan_chunks import ChunkTablePlan
from attncc.codegen.plan_scan import ScanPlan
from attncc.dsl.ir import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan(ScanPlan):
    """A kernel of the chunked form.

    Rows and tokens of a chunk stand in ``ROWS`` places, four blocks of ``BLOCK``: each block has
    the rows of ``block_tokens`` whole tokens, then unused places. In Gluon, a chunk of several rows
    a token is one block, and its tokens stand in ``TOKENS`` places.

    Attributes:
        form: the flat table.
        storage: element type of the operands of matrix products.
        block_tokens: tokens of a block.
        tokens: tokens of a chunk (C).
        system_axes: axes with one triangular system per point, outermost first.
        solve: some row reads the state, so there is a system to solve.
        lines: the fp32 vectors that ``state`` is left, ROWS numbers each.
        line_stride: numbers per chunk and system in that buffer.
        each: decays differ along the active axis, so they are inside the operands: ``late_a`` and
            ``early_*``, which ``prepare`` and ``mix`` leave to ``state``.
    """

    form: AffineForm
    storage: str
    block_tokens: int
    tokens: int
    system_axes: tuple[str, ...]
    solve: bool
    lines: tuple[str, ...]
    line_stride: int
    each: bool

    @property
    def gathered(self) -> bool:
        """Whether a chunk is one block: its rows follow each other, and unused places come last."""
        return self.tokens == self.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemPlan(ChunkPlan):
    """A kernel whose programs work on one chunk each, or on a few.

    Attributes:
        shared_axis: a program works through several points of this axis, along which the row
            vectors do not differ; "" for one system a program.
        shared: how many of them.
    """

    shared_axis: str
    shared: int

    @property
    def chunks(self) -> int:
        """Chunks, of systems that share their vectors, that a program works on."""
        return 1

    def programs(self, systems: int) -> int:
        """Programs for so many systems."""
        return -(-systems // (self.shared * self.chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparePlan(SystemPlan):
    """Solves the systems of all chunks.

    Attributes:
        inverse_precision: see :class:`Choice`.
    """

    inverse_precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MixPlan(SystemPlan):
    """What each row adds to the read-outs of its chunk.

    Attributes:
        squares: its matrices are left; else the products of decays alone, where the state pass
            makes the matrices itself (:mod:`attncc.codegen.plan_gluon_mixing`).
    """

    squares: bool = True


class Part(Enum):
    """What a kernel that carries states does of a sequence."""

    WHOLE = "whole"
    SUMMARY = "summary"
    LOCAL = "local"
    LEAD = "lead"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan(ChunkPlan):
    """Carries the state over the chunks of a sequence, or of a segment of it.

    Attributes:
        transposed: see :class:`Choice`.
        part: ``SUMMARY`` finds the (A, B) of ``S' = A S + B`` of each segment: columns of B, then
            those of A, which start as the identity and have no constants. ``LOCAL`` runs each
            segment from the state it starts with. ``LEAD`` carries the state over what is ahead of
            all segments.
        column_blocks: blocks of columns that a system's programs carry.
    """

    transposed: bool
    part: Part
    column_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavingPlan(StatePlan):
    """A state pass that leaves what each chunk starts with, and what its rows add.

    Attributes:
        wide: numbers from one row of either to the next: the columns of a state.
    """

    wide: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossPlan(SystemPlan):
    """Products or outputs of all chunks, where outputs read the state across.

    Attributes:
        reads: what is read of the state, along ``blocked``.
        outputs: output expressions over them.
        wide: see :class:`LeavingPlan`.
        high: rows of the state that the state pass leaves; a program has a block of them.
        leaf: tokens of a block, whose rows are one variable.
    """

    reads: tuple[Read, ...]
    outputs: tuple[Node, ...]
    wide: int
    high: int
    leaf: int

    @property
    def columns(self) -> int:
        """Programs of a chunk and system."""
        return self.high // self.axis(self.form.active[0]).block

    def programs(self, systems: int) -> int:
        """Programs for so many systems."""
        return systems * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan(ChunkPlan):
    """Composes the summaries in order: the state that each segment starts with.

    Attributes:
        column_blocks: as in the summaries' plan.
        width: columns of a tile of the buffers; a program has as many of them, or fewer.
        slice: columns of A in one product.
    """

    column_blocks: int
    width: int
    slice: int


@dataclass(frozen=True, slots=True)
class SplitPlans:
    """What takes the place of ``state`` where sequences are cut into segments, in order.

    ``lead`` carries the state over the first part of a sequence meanwhile, for which nothing has to
    be summed up; None where the dialect has no such kernel.
    """

    summary: StatePlan
    start: StartPlan
    local: StatePlan
    lead: StatePlan | None = None


@dataclass(frozen=True, slots=True)
class TogetherPlans:
    """What takes the place of ``prepare`` and ``state`` where they run beside each other.

    The first sets a flag for each of its programs, the second waits for them chunk by chunk.
    """

    systems: SystemPlan
    state: StatePlan


@dataclass(frozen=True, slots=True)
class ChunkedPlans:
    """The kernels of the chunked form in launch order; None where there is nothing to do.

    ``split`` stands for ``state`` where there are few sequences and systems, but long ones. A
    kernel in the place of ``prepare`` may do the work of ``mix`` too, which is None then. ``table``
    says where the chunks of packed sequences lie. ``together`` is None where kernels can only
    follow each other. ``across`` finds outputs for which the state pass, a ``LeavingPlan``
    then, is not cut.
    """

    prepare: SystemPlan | None
    mix: SystemPlan | None
    state: StatePlan
    split: SplitPlans
    table: ChunkTablePlan | None = None
    together: TogetherPlans | None = None
    across: tuple[AcrossPlan, ...] = ()

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        """The plans in launch order."""
        each = (self.table, self.prepare, self.mix, self.state, *self.across)
        return tuple(p for p in each if p is not None)
