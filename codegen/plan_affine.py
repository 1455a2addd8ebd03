"""Plans of the chunked affine form: the kernels ``prepare``, ``mix`` and ``state``.

They run affine bodies whose decays are one number per system. ``prepare`` solves each chunk's
triangular system and ``mix`` weighs what its rows add to the read-outs, all chunks at once;
``state`` carries the state from chunk to chunk with a few matrix products each. ``plan_step`` is
the sequential kernel for everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attncc.codegen.affine_checks import Split, chunk_refusal, split_row
from attncc.codegen.affine_choices import (
    BLOCK,
    ROWS,
    Choice,
    lines_of,
    row_vectors,
    shared_of,
    stages_of,
    state_block,
    storage_of,
    system_warps_of,
)
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.plan import Arg, ScalarArg, Spec, TensorArg
from attncc.codegen.plan_scan import (
    ScanPlan,
    StepPlan,
    TileAxis,
    flat_arg,
    input_args,
    output_args,
    plan_step,
    size_args,
    slot_args,
    state_args,
    states_in,
    tile_axes,
)
from attncc.dsl.ir import Node, Program

__all__ = [
    "BLOCK", "ROWS", "Choice", "ChunkPlan", "ChunkedPlans", "MixPlan", "PreparePlan", "Split",
    "StatePlan", "StepPlan", "SystemPlan", "plan_chunked", "plan_step", "split_row",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan(ScanPlan):
    """A kernel of the chunked form.

    Rows and tokens of a chunk stand in ``ROWS`` places, four blocks of ``BLOCK``: each block has
    the rows of ``block_tokens`` whole tokens, then unused places.

    Attributes:
        form: the flat table.
        storage: element type of the operands of matrix products.
        block_tokens: tokens of a block.
        tokens: tokens of a chunk (C).
        system_axes: axes with one triangular system per point, outermost first.
        solve: some row reads the state, so there is a system to solve.
        lines: the fp32 vectors that ``state`` is left, ROWS numbers each.
        line_stride: numbers per chunk and system in that buffer.
    """

    form: AffineForm
    storage: str
    block_tokens: int
    tokens: int
    system_axes: tuple[str, ...]
    solve: bool
    lines: tuple[str, ...]
    line_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemPlan(ChunkPlan):
    """A kernel whose programs work on one chunk each.

    Attributes:
        shared_axis: a program works through several points of this axis, along which the row
            vectors do not differ; "" for one system a program.
        shared: how many of them.
    """

    shared_axis: str
    shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparePlan(SystemPlan):
    """Solves the systems of all chunks.

    Attributes:
        inverse_precision: see :class:`Choice`.
    """

    inverse_precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MixPlan(SystemPlan):
    """What each row adds to the read-outs of its chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan(ChunkPlan):
    """Carries the state over the chunks of a sequence.

    Attributes:
        transposed: see :class:`Choice`.
    """

    transposed: bool


@dataclass(frozen=True, slots=True)
class ChunkedPlans:
    """The kernels of the chunked form in launch order; None where there is nothing to do."""

    prepare: PreparePlan | None
    mix: MixPlan | None
    state: StatePlan

    @property
    def kernels(self) -> tuple[ChunkPlan, ...]:
        """The plans in launch order."""
        return tuple(p for p in (self.prepare, self.mix, self.state) if p is not None)


# --- plans --------------------------------------------------------------------------------------


def plan_chunked(
    program: Program, form: AffineForm, spec: Spec, choice: Choice | None = None
) -> ChunkedPlans | Refusal:
    """The kernels of an affine scan in chunks.

    Args:
        program: the scan.
        form: its flat table.
        spec: dtypes and static sizes; the bucket ``systems`` (sequences times systems) steers the
            width of a state tile.
        choice: what to take instead of the plan's own choice.

    Returns:
        The plans, or the line that keeps the body sequential.
    """
    if spec.token_slots:
        return Refusal("a state after every token, which a chunk does not have", program.loc)
    refused = chunk_refusal(program, form)
    if refused is not None:
        return refused
    axes = program.tensor(form.state).pattern.axes
    blocked = [a for a in axes if a in form.passive and a != "B"][-1:]
    if not blocked:
        return Refusal("no passive axis is left beside the batch", program.loc)
    tile = tile_axes([form.active[0], blocked[0]], spec, 16)
    if isinstance(tile, Refusal):
        return Refusal(tile.reason, program.loc)
    key, value = tile
    if key.block > 256:
        return Refusal(f"axis {key.axis} of {key.size} does not fit a tile (256)", program.loc)
    builder = _Builder(program, form, spec, choice or Choice(), key, value)
    solve, reads = builder.solve, bool(form.reads)
    return ChunkedPlans(
        builder.prepare() if solve else None,
        builder.mix() if reads or (form.decays and not solve) else None,
        builder.state(),
    )


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes the plans of one call."""

    program: Program
    form: AffineForm
    spec: Spec
    choice: Choice
    key: TileAxis
    value: TileAxis

    @property
    def solve(self) -> bool:
        return any(r.b is not None for r in self.form.rows)

    @property
    def systems(self) -> tuple[str, ...]:
        axes = self.program.tensor(self.form.state).pattern.axes
        return tuple(a for a in axes if a in self.form.system and a != "B")

    def _common(self) -> dict[str, Any]:
        form, program, spec = self.form, self.program, self.spec
        lines = lines_of(form, self.solve)
        block_tokens = BLOCK // len(form.rows)
        return {
            "op": program.name, "program": program, "static": spec.static, "packed": spec.packed,
            "form": form, "storage": storage_of(form, spec), "solve": self.solve,
            "block_tokens": block_tokens, "tokens": ROWS // BLOCK * block_tokens,
            "system_axes": self.systems, "lines": lines, "precision": "tf32x3",
            "line_stride": ROWS * len(lines) + (16 if form.decays else 0),
        }  # fmt: skip

    def _system(self, vectors: tuple[Node, ...], roots: list[Node | None]) -> dict[str, Any]:
        axis, count = shared_of(vectors, self.systems, self.spec)
        common = self._common()
        warps = system_warps_of(len(set(vectors)), self.key.block, common["storage"])
        return {
            **common, "num_warps": self.choice.system_warps or warps, "num_stages": 1,
            "tile": (self.key,), "blocked": "", "grid_axes": self.systems, "given": (),
            "shared_axis": axis, "shared": count,
        }  # fmt: skip

    def prepare(self) -> PreparePlan:
        form = self.form
        roots: list[Node | None] = [*form.decays]
        for row in form.rows:
            roots += [row.a, row.b, row.coef]
        buffers = [*self._squares(written=True, reads=False), *self._line_buffer(written=True)]
        return PreparePlan(
            phase="prepare", template="triton/affine_prepare.py.jinja",
            args=self._system_args(roots, buffers),
            inverse_precision=self.choice.inverse_precision,
            **self._system(row_vectors(form), roots),
        )  # fmt: skip

    def mix(self) -> MixPlan:
        form = self.form
        roots: list[Node | None] = [*form.decays, *(r.a for r in form.rows)]
        roots += [r.vector for r in form.reads]
        vectors = (*(r.a for r in form.rows), *(r.vector for r in form.reads))
        squares = self._squares(written=True, inverse=False)
        lines = self._line_buffer(written=True) if form.decays else []
        return MixPlan(
            phase="mix", template="triton/affine_mix.py.jinja",
            args=self._system_args(roots, [*squares, *lines]), **self._system(vectors, roots),
        )  # fmt: skip

    def state(self) -> StatePlan:
        form, spec, common = self.form, self.spec, self._common()
        storage, height = common["storage"], self.key.block
        width = self.choice.width or state_block(self.value.size, height, storage, spec)
        value = TileAxis(self.value.axis, self.value.size, min(width, self.value.block))
        stages = self.choice.stages or stages_of(form, height, value.block, storage, spec.target)
        axes = self.program.tensor(form.state).pattern.axes
        columns = tuple(a for a in axes if a in form.passive and a not in ("B", value.axis))
        grid = (*self.systems, *columns)
        return StatePlan(
            phase="state", template="triton/affine_state.py.jinja",
            num_warps=self.choice.warps or 4, num_stages=stages, tile=(self.key, value),
            blocked=value.axis, args=self._carry_args((self.key, value), grid), grid_axes=grid,
            given=states_in(self.program, spec.given_states),
            pooled=states_in(self.program, spec.pools),
            transposed=self._transposed(value.block), **common,
        )  # fmt: skip

    def _transposed(self, width: int) -> bool:
        """Whether the state stands left in products: where they fill the tensor cores' 64 rows."""
        if self.choice.transposed is not None:
            return bool(self.choice.transposed)
        return width >= 64 and storage_of(self.form, self.spec) != "fp32"

    # -- parameters

    def _squares(
        self, *, written: bool, inverse: bool = True, reads: bool = True
    ) -> Iterator[TensorArg]:
        storage = storage_of(self.form, self.spec)
        if inverse and self.solve:
            yield flat_arg("inverse", storage, written=written)
        for read in self.form.reads if reads else ():
            yield flat_arg(f"mix_{read.name}", storage, written=written)

    def _line_buffer(self, *, written: bool) -> list[TensorArg]:
        has = bool(lines_of(self.form, self.solve))
        return [flat_arg("lines", "fp32", written=written)] if has else []

    def _places(self, table: str) -> list[Arg]:
        if self.spec.packed:
            return [flat_arg("cu_seqlens", "i32"), flat_arg(table, "i32")]
        return [ScalarArg("tokens_given", "i32"), ScalarArg("chunks_each", "i32")]

    def _system_args(self, roots: list[Node | None], buffers: list[TensorArg]) -> tuple[Arg, ...]:
        nodes = [n for n in roots if n is not None]
        args: list[Arg] = [*input_args(nodes, self.program, self.spec), *buffers]
        args += self._places("chunks")
        return (*args, *size_args(args, (self.key,), self.systems, self.spec))

    def _carry_args(self, tile: tuple[TileAxis, ...], grid: tuple[str, ...]) -> tuple[Arg, ...]:
        form, program, spec = self.form, self.program, self.spec
        roots: list[Node | None] = [*(r.vector for r in form.reads), *form.outputs]
        for row in form.rows:
            roots += [row.a, row.b, split_row(row, form.passive).const]
        args: list[Arg] = [*input_args([n for n in roots if n is not None], program, spec)]
        args += [*state_args(program, spec), *slot_args(program, spec)]
        args += [*self._squares(written=False), *self._line_buffer(written=False)]
        args += output_args(program, spec)
        args += self._places("first_chunks")
        return (*args, *size_args(args, tile, grid, spec))
