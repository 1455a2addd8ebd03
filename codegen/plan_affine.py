"""Plans of the chunked affine form: the kernels ``prepare``, ``mix`` and ``state``.

They run affine bodies whose decays are one number per system. ``prepare`` solves each chunk's
triangular system and ``mix`` weighs what its rows add to the read-outs, all chunks at once;
``state`` carries the state from chunk to chunk with a few matrix products each. ``plan_step`` is
the sequential kernel for everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attncc.codegen.affine_args import CUT, place_args, summary_args
from attncc.codegen.affine_checks import Split, chunk_refusal, decays_each, split_row
from attncc.codegen.affine_choices import (
    BLOCK,
    ROWS,
    Choice,
    composing_of,
    least_warps,
    lines_of,
    precisions_of,
    row_vectors,
    shared_of,
    stages_of,
    start_precision,
    state_block,
    storage_of,
    system_warps_of,
    warps_of,
)
from attncc.codegen.affine_memory import Fitted, Shape, fit, system_refusal
from attncc.codegen.affine_plans import (
    ChunkedPlans,
    ChunkPlan,
    MixPlan,
    Part,
    PreparePlan,
    SplitPlans,
    StartPlan,
    StatePlan,
    SystemPlan,
)
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.plan import Arg, Spec, TensorArg
from attncc.codegen.plan_choices import (
    GIVEN,
    affine_wanted,
    choose_affine,
    decided_state,
    decided_systems,
)
from attncc.codegen.plan_chunks import plan_chunk_table
from attncc.codegen.plan_scan import (
    StepPlan,
    flat_arg,
    input_args,
    output_args,
    plan_step,
    size_args,
    slot_args,
    state_args,
    states_in,
)
from attncc.codegen.scan_tiles import TileAxis, tile_axes
from attncc.dsl.ir import Node, Program

__all__ = [
    "BLOCK", "ROWS", "Choice", "ChunkPlan", "ChunkedPlans", "MixPlan", "Part", "PreparePlan",
    "Split", "SplitPlans", "StartPlan", "StatePlan", "StepPlan", "SystemPlan", "plan_chunked",
    "plan_step", "split_row",
]  # fmt: skip


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
    wanted = affine_wanted(form, spec, key.size, value.size)
    choice, chosen = choose_affine(spec, wanted, choice)
    builder = _Builder(program, form, spec, choice, chosen, key, value)
    if (refused := builder.refusal()) is not None:
        return refused
    solve, reads, state = builder.solve, bool(form.reads), builder.state()
    return ChunkedPlans(
        builder.prepare() if solve else None,
        builder.mix() if reads or (form.decays and not solve) else None,
        state,
        builder.split(),
        plan_chunk_table(program, state.tokens) if spec.packed else None,
    )


@dataclass(frozen=True, slots=True)
class _Builder:
    """Makes the plans of one call."""

    program: Program
    form: AffineForm
    spec: Spec
    choice: Choice
    chosen: str
    key: TileAxis
    value: TileAxis

    @property
    def solve(self) -> bool:
        return any(r.b is not None for r in self.form.rows)

    @property
    def _storage(self) -> str:
        return storage_of(self.form, self.spec)

    @property
    def each(self) -> bool:
        return decays_each(self.form)

    @property
    def systems(self) -> tuple[str, ...]:
        axes = self.program.tensor(self.form.state).pattern.axes
        return tuple(a for a in axes if a in self.form.system and a != "B")

    def _common(self) -> dict[str, Any]:
        form, program, spec = self.form, self.program, self.spec
        lines = lines_of(form, self.solve)
        block_tokens = BLOCK // len(form.rows)
        total = self.key.block if self.each else 16
        return {
            "op": program.name, "program": program, "static": spec.static, "packed": spec.packed,
            "form": form, "storage": self._storage, "solve": self.solve,
            "block_tokens": block_tokens, "tokens": ROWS // BLOCK * block_tokens,
            "system_axes": self.systems, "lines": lines,
            "precision": precisions_of(self._storage, spec.target)[0],
            "line_stride": ROWS * len(lines) + total * bool(form.decays), "each": self.each,
        }  # fmt: skip

    def _system(self, vectors: tuple[Node, ...], *, solves: bool) -> dict[str, Any]:
        axis, count = ("", 1) if self.each else shared_of(vectors, self.systems, self.spec)
        common = self._common()
        least = least_warps(solves, self.key.block, self.spec) if self.solve and count < 2 else 1
        warps = system_warps_of(len(set(vectors)), self.key.block, common["storage"], least)
        warps = (4 if self.key.block <= 64 else 8) if self.each else warps  # spills of 1 KB with 4
        return {
            **common, "num_warps": self.choice.system_warps or warps, "num_stages": 1,
            "tile": (self.key,), "blocked": "", "grid_axes": self.systems, "given": (),
            "shared_axis": axis, "shared": count,
            "chosen": decided_systems(self.choice, self.chosen),
            "precision": precisions_of(self._storage, self.spec.target)[1],
        }  # fmt: skip

    def prepare(self) -> PreparePlan:
        form = self.form
        roots: list[Node | None] = [*form.decays]
        for row in form.rows:
            roots += [row.a, row.b, row.coef]
        found = self._system(row_vectors(form), solves=True)
        buffers = [*self._squares(written=True, reads=False), *self._line_buffer(written=True)]
        buffers += self._operands(written=True, reads=False)
        return PreparePlan(
            phase="prepare", template="triton/affine_prepare.py.jinja",
            args=self._system_args(roots, buffers),
            inverse_precision=self.choice.inverse_precision or found["precision"],
            **found,
        )  # fmt: skip

    def mix(self) -> MixPlan:
        form = self.form
        roots: list[Node | None] = [*form.decays, *(r.a for r in form.rows)]
        roots += [r.vector for r in form.reads]
        vectors = (*(r.a for r in form.rows), *(r.vector for r in form.reads))
        squares = self._squares(written=True, inverse=False)
        lines = self._line_buffer(written=True) if form.decays else []
        operands = self._operands(written=True, rows=not self.solve)
        return MixPlan(
            phase="mix", template="triton/affine_mix.py.jinja",
            args=self._system_args(roots, [*squares, *lines, *operands]),
            **self._system(vectors, solves=False),
        )  # fmt: skip

    def _value(self, part: Part) -> TileAxis:
        """The columns of a tile: wide ones for segments, of which there are enough."""
        storage, height = self._storage, self.key.block
        spec = self.spec if part is Part.WHOLE else replace(self.spec, buckets=())
        choice, _ = self._decided(part)
        width = choice.width or state_block(self.value.size, height, storage, spec)
        return TileAxis(self.value.axis, self.value.size, min(width, self.value.block))

    def _fitted(self, part: Part) -> Fitted | Refusal:
        """The columns and the chunks in flight that the target has shared memory for."""
        value, (choice, chosen) = self._value(part), self._decided(part)
        key, storage, given = self.key, self._storage, chosen == GIVEN
        stages = stages_of(self.form, key.block, value.block, storage, self.spec.target)
        shape = Shape((key.axis, key.block), (value.axis, value.block), storage)
        fixed = (given and choice.width is not None, given and choice.stages is not None)
        return fit(self.program, self.form, self.spec, shape, choice.stages or stages, fixed)

    def _fits(self, part: Part) -> tuple[TileAxis, int]:
        found = self._fitted(part)
        assert isinstance(found, Fitted)  # refusal() comes first
        return TileAxis(self.value.axis, self.value.size, found.width), found.stages

    def refusal(self) -> Refusal | None:
        """Why the target has too little shared memory for these kernels."""
        program, form, spec, height = self.program, self.form, self.spec, self.key.block
        found = [system_refusal(program, form, spec, height, self._storage)]
        parts = (self._fitted(part) for part in (Part.WHOLE, Part.LOCAL))
        return next((f for f in (*found, *parts) if isinstance(f, Refusal)), None)

    def _decided(self, part: Part) -> tuple[Choice, str]:
        return decided_state(self.choice, self.chosen, whole=part is Part.WHOLE)

    def _carrying(self, value: TileAxis, part: Part) -> dict[str, Any]:
        """What the plans share that have programs along the columns."""
        (choice, chosen), warps = self._decided(part), warps_of(self.key.block, self._storage)
        axes = self.program.tensor(self.form.state).pattern.axes
        columns = tuple(a for a in axes if a in self.form.passive and a not in ("B", value.axis))
        return {
            **self._common(), "tile": (self.key, value), "blocked": value.axis,
            "grid_axes": (*self.systems, *columns), "num_warps": choice.warps or warps,
            "chosen": chosen,
        }  # fmt: skip

    def _held(self) -> dict[str, Any]:
        return {
            "given": states_in(self.program, self.spec.given_states),
            "pooled": states_in(self.program, self.spec.pools),
        }

    def _blocks(self, value: TileAxis, part: Part) -> int:
        """Blocks of columns: a summary has those of A too, unless A is a number."""
        matrix = part is Part.SUMMARY and self.solve
        return value.blocks + (-(-self.key.block // value.block) if matrix else 0)

    def state(self, part: Part = Part.WHOLE) -> StatePlan:
        value, stages = self._fits(part)
        found = self._carrying(value, part)
        choice, _ = self._decided(part)
        held = {"given": ()} if part is Part.SUMMARY else self._held()
        return StatePlan(
            phase="state" if part is Part.WHOLE else part.value,
            template="triton/affine_state.py.jinja", num_stages=stages,
            args=self._carry_args(found["tile"], found["grid_axes"], part),
            transposed=part is Part.WHOLE and bool(choice.transposed), part=part,
            column_blocks=self._blocks(value, part), **held, **found,
        )  # fmt: skip

    def split(self) -> SplitPlans:
        summary, local, lead = map(self.state, (Part.SUMMARY, Part.LOCAL, Part.LEAD))
        return SplitPlans(summary, self.start(), local, lead)

    def start(self) -> StartPlan:
        held, _ = self._fits(Part.LOCAL)
        program, spec, high = self.program, self.spec, self.key.block
        way = composing_of(self._storage, high, held.block, held.size, spec.target)
        value = replace(held, block=way.columns)
        found = self._carrying(value, Part.LOCAL) | {"num_warps": way.warps}
        found["precision"] = start_precision(self._storage, spec.target)
        args: list[Arg] = [a for a in state_args(program, spec) if not a.written]
        args += [*slot_args(program, spec), *self._summaries(written=False)]
        args += [*place_args("", packed=spec.packed)[:1], flat_arg("starts", "fp32", written=True)]
        return StartPlan(
            phase="start", template="triton/affine_start.py.jinja", num_stages=way.stages,
            width=held.block, slice=way.slice,
            args=(*args, *CUT, *size_args(args, found["tile"], found["grid_axes"], spec)),
            column_blocks=self._blocks(held, Part.SUMMARY), **self._held(), **found,
        )  # fmt: skip

    def _squares(
        self, *, written: bool, inverse: bool = True, reads: bool = True
    ) -> Iterator[TensorArg]:
        storage = self._storage
        if inverse and self.solve:
            yield flat_arg("inverse", storage, written=written)
        for read in self.form.reads if reads else ():
            yield flat_arg(f"mix_{read.name}", storage, written=written)

    def _operands(
        self, *, written: bool, rows: bool = True, reads: bool = True
    ) -> Iterator[TensorArg]:
        """Operands with decays per element of the active axis inside."""
        names = ["late_a", *(["early_b"] if self.solve else [])] if rows else []
        names += [f"early_{r.name}" for r in self.form.reads] if reads else []
        for name in names if self.each else ():
            yield flat_arg(name, self._storage, written=written)

    def _line_buffer(self, *, written: bool) -> list[TensorArg]:
        has = bool(lines_of(self.form, self.solve) or self.form.decays)
        return [flat_arg("lines", "fp32", written=written)] if has else []

    def _system_args(self, roots: list[Node | None], buffers: list[TensorArg]) -> tuple[Arg, ...]:
        nodes = [n for n in roots if n is not None]
        args: list[Arg] = [*input_args(nodes, self.program, self.spec), *buffers]
        args += place_args("chunks", packed=self.spec.packed)
        return (*args, *size_args(args, (self.key,), self.systems, self.spec))

    def _summaries(self, *, written: bool) -> Iterator[TensorArg]:
        return summary_args(self.form, solve=self.solve, written=written)

    def _carry_args(
        self, tile: tuple[TileAxis, ...], grid: tuple[str, ...], part: Part
    ) -> tuple[Arg, ...]:
        form, program, spec = self.form, self.program, self.spec
        shown = part is not Part.SUMMARY
        roots: list[Node | None] = [*form.outputs] * shown
        roots += [r.vector for r in form.reads] * (shown and not self.each)
        for row in form.rows:
            roots += [split_row(row, form.passive).const]
            roots += [] if self.each else [row.a, row.b]
        args: list[Arg] = [*input_args([n for n in roots if n is not None], program, spec)]
        if shown:
            states = state_args(program, spec)
            args += [a for a in states if part is Part.WHOLE or a.written is (part is Part.LOCAL)]
            args += slot_args(program, spec)
        args += self._squares(written=False, reads=shown)
        args += self._line_buffer(written=False)
        args += self._operands(written=False, reads=shown)
        args += output_args(program, spec) if shown else self._summaries(written=True)
        if part in (Part.LOCAL, Part.LEAD):
            args += [flat_arg("starts", "fp32", written=part is Part.LEAD)]
        args += place_args("first_chunks", packed=spec.packed)
        args += CUT if part is not Part.WHOLE else []
        return (*args, *size_args(args, tile, grid, spec))
