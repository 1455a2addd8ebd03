"""Plans of the chunked affine form: the pair ``prepare`` and ``state``.

The pair runs affine bodies whose decays are one number per system: ``prepare`` solves each chunk's
triangular system, all chunks at once; ``state`` carries the state from chunk to chunk with a few
matrix products each. ``plan_step`` is the sequential kernel for everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attncc.codegen.forms import AffineForm, Refusal, Row
from attncc.codegen.plan import Arg, ScalarArg, Spec, TensorArg
from attncc.codegen.plan_scan import (
    ScanPlan,
    StepPlan,
    TileAxis,
    flat_arg,
    input_args,
    output_args,
    plan_step,
    power,
    size_args,
    slot_args,
    state_args,
    states_in,
    tile_axes,
    unprintable,
)
from attncc.codegen.terms import factors, is_number, product
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Contract, Input, Node, Program, Reduce

ROWS = 64
"""Rows of a chunk's system: tokens of a chunk times rows per token, padded."""
SHARED = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
    "sm_100": 227 << 10, "sm_103": 227 << 10, "sm_120": 99 << 10,
}  # fmt: skip
"""Shared memory a program may have, by target, in bytes."""
SHARED_RESERVE = 20 << 10
"""Measured beside the buffers of the stages: operands that change their layout."""
MULTIPROCESSORS = 132
"""What a grid should fill; only the width of a block depends on it."""

__all__ = ["ChunkedPlans", "PreparePlan", "StatePlan", "StepPlan", "plan_chunked", "plan_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan(ScanPlan):
    """A kernel of the chunked pair.

    Attributes:
        form: the flat table.
        storage: element type of the operands of matrix products.
        tokens: tokens of a chunk (C).
        token_tile: C padded to a power of two from 16.
        system_axes: grid axes with one triangular system per point, outermost first.
        solve: some row reads the state, so there is a system to solve.
        lines: the fp32 vectors that ``prepare`` leaves for ``state``, ROWS numbers each.
        line_stride: numbers per chunk and system in that buffer.
    """

    form: AffineForm
    storage: str
    tokens: int
    token_tile: int
    system_axes: tuple[str, ...]
    solve: bool
    lines: tuple[str, ...]
    line_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparePlan(ChunkPlan):
    """Solves the systems of all chunks.

    Attributes:
        inverse_precision: of the fp32 products inside the inverse. ``tf32`` is enough only where
            every coefficient is known to lie within 1 (``shared/kernels.md``: 1.3e-2 otherwise).
    """

    inverse_precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan(ChunkPlan):
    """Carries the state over the chunks of a sequence."""


@dataclass(frozen=True, slots=True)
class ChunkedPlans:
    """The two kernels of the chunked form, in launch order."""

    prepare: PreparePlan
    state: StatePlan


@dataclass(frozen=True, slots=True)
class Split:
    """A row as ``u = scale * (const + coef * read)``: what both terms share goes into the solve."""

    scale: Node | None
    const: Node | None
    coef: Node | None


def split_row(row: Row, passive: tuple[str, ...]) -> Split:
    """Take the common factors of a row's constant and coefficient out."""
    if row.b is None or row.coef is None:
        return Split(None, row.const, row.coef)
    rest = factors(row.coef)
    if row.const is None:
        shared = [f for f in rest if not is_number(f, -1)]
        kept = [f for f in rest if is_number(f, -1)]
        return Split(product(shared), None, product(kept))
    left, shared, kept = factors(row.const), [], []
    for f in rest:
        if f in left and not is_number(f, -1) and not set(axes_of(f)) & set(passive):
            left.remove(f)
            shared.append(f)
        else:
            kept.append(f)
    return Split(product(shared), product(left), product(kept))


def table_nodes(form: AffineForm) -> tuple[Node, ...]:
    """Every expression of a table."""
    found: list[Node | None] = [*form.decays, *(r.vector for r in form.reads), *form.outputs]
    for row in form.rows:
        found += [row.a, row.const, row.coef, row.b]
    return tuple(n for n in found if n is not None)


def chunk_refusal(program: Program, form: AffineForm) -> Refusal | None:
    """Why a table has no chunk form (yet)."""
    found = [*_shapes(program, form), *_vectors(form)]
    return found[0] if found else unprintable(table_nodes(form), program)


def _shapes(program: Program, form: AffineForm) -> Iterator[Refusal]:
    if len(form.active) != 1:
        yield Refusal("corrections contract more than one axis", program.loc)
    for decay in form.decays:
        if set(form.active) & set(axes_of(decay)):
            along = " ".join(form.active)
            yield Refusal(f"a decay per {along} has no chunk kernel yet", decay.loc)
    if len(form.decays) > 1:
        yield Refusal("two decays with a read between them within one token", form.decays[1].loc)
    if not 1 <= len(form.rows) <= ROWS:
        yield Refusal(f"{len(form.rows)} updates a token", program.loc)


def _vectors(form: AffineForm) -> Iterator[Refusal]:
    held = {*form.system, *form.passive, "B"}
    for read in form.reads:
        axes = set(axes_of(read.vector))
        if axes - {*form.active, *held}:
            yield Refusal("a read-out has an axis the state lacks", read.loc)
        if axes & set(form.passive):
            yield Refusal("a read vector has a passive axis", read.loc)
    for node in walk(*table_nodes(form)):
        over = set(node.over) if isinstance(node, (Contract, Reduce)) else set()
        if over - set(form.active):
            yield Refusal(f"a sum over {' '.join(sorted(over))} inside the chunk", node.loc)
    for out in form.outputs:
        extra = set(axes_of(out)) - held
        if extra:
            yield Refusal(f"an output has the axis {' '.join(sorted(extra))}", out.loc)


def _storage(form: AffineForm, spec: Spec) -> str:
    """Element type of the operands: that of the inputs with the active axis."""
    held = dict(spec.dtypes)
    vectors = [r.a for r in form.rows] + [r.b for r in form.rows if r.b is not None]
    found = {
        held[n.name]
        for n in walk(*vectors, *(r.vector for r in form.reads))
        if isinstance(n, Input) and set(form.active) & set(n.axes) and n.name in held
    }
    return found.pop() if len(found) == 1 else "fp32"


def _lines(form: AffineForm, solve: bool) -> tuple[str, ...]:
    lines = ["gain"] if solve else []
    if form.decays:
        lines += ["suffix", *(f"prefix_{r.name}" for r in form.reads)]
    return tuple(lines)


def _state_block(size: int, height: int, storage: str, spec: Spec) -> int:
    """Columns of a state tile: 64, or 32 where that leaves multiprocessors idle.

    fp32 operands are split in three: 64 columns of them spill on sm_90, and on sm_100 (Triton 3.6
    and 3.7) the tensor memory overflows, which compiles to a trap.
    """
    systems = dict(spec.buckets).get("systems", MULTIPROCESSORS)
    width = 64 if systems * -(-size // 64) >= MULTIPROCESSORS else 32
    if height > 128:
        width = 32
    if storage == "fp32":
        width = 32 if height <= 128 else 16
    return min(power(size, 16), width)


def _stages(form: AffineForm, height: int, width: int, storage: str, target: str) -> int:
    """Chunks in flight: up to 3, as many as the shared memory of the target holds."""
    vectors = {r.a for r in form.rows} | {r.b for r in form.rows if r.b is not None}
    operands = min(len(vectors), 2) + len(form.reads)
    squares = len(form.reads) + any(r.b is not None for r in form.rows)
    numbers = ROWS * (height * operands + ROWS * squares + width)
    size = numbers * (4 if storage == "fp32" else 2)
    held = SHARED.get(target, min(SHARED.values())) - SHARED_RESERVE
    return max(1, min(3, held // size))


def plan_chunked(program: Program, form: AffineForm, spec: Spec) -> ChunkedPlans | Refusal:
    """The two kernels of an affine scan in chunks.

    Args:
        program: the scan.
        form: its flat table.
        spec: dtypes and static sizes; the bucket ``systems`` (sequences times systems) steers the
            width of a state tile.

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
    width = _state_block(value.size, key.block, _storage(form, spec), spec)
    value = TileAxis(value.axis, value.size, width)
    tokens = ROWS // len(form.rows)
    solve = any(r.b is not None for r in form.rows)
    lines = _lines(form, solve)
    systems = tuple(a for a in axes if a in form.system and a != "B")
    columns = tuple(a for a in axes if a in form.passive and a not in ("B", blocked[0]))
    common: dict[str, Any] = {
        "op": program.name, "program": program, "static": spec.static, "packed": spec.packed,
        "form": form, "storage": _storage(form, spec), "tokens": tokens, "solve": solve,
        "token_tile": power(tokens, 16), "system_axes": systems, "lines": lines,
        "line_stride": ROWS * len(lines) + (16 if form.decays else 0),
        "precision": "tf32x3",
    }  # fmt: skip
    prepare = PreparePlan(
        phase="prepare", template="triton/affine_prepare.py.jinja", num_warps=4, num_stages=1,
        args=_prepare_args(program, form, spec, key, systems, lines, solve), tile=(key,),
        blocked="", grid_axes=systems, given=(), inverse_precision="tf32x3", **common,
    )  # fmt: skip
    state = StatePlan(
        phase="state", template="triton/affine_state.py.jinja", num_warps=4,
        num_stages=_stages(form, key.block, width, prepare.storage, spec.target), tile=(key, value),
        blocked=value.axis,
        args=_carry_args(program, form, spec, (key, value), (*systems, *columns), lines, solve),
        grid_axes=(*systems, *columns), **common,
        given=states_in(program, spec.given_states),
        pooled=states_in(program, spec.pools),
    )  # fmt: skip
    return ChunkedPlans(prepare, state)


def _between(
    form: AffineForm, spec: Spec, lines: tuple[str, ...], solve: bool, *, written: bool
) -> Iterator[TensorArg]:
    """Buffers that ``prepare`` fills and ``state`` reads."""
    storage = _storage(form, spec)
    if solve:
        yield flat_arg("inverse", storage, written=written)
    for read in form.reads:
        yield flat_arg(f"mix_{read.name}", storage, written=written)
    if lines:
        yield flat_arg("lines", "fp32", written=written)


def _prepare_args(
    program: Program, form: AffineForm, spec: Spec, key: TileAxis, systems: tuple[str, ...],
    lines: tuple[str, ...], solve: bool,
) -> tuple[Arg, ...]:  # fmt: skip
    roots: list[Node | None] = [*form.decays, *(r.vector for r in form.reads)]
    for row in form.rows:
        roots += [row.a, row.b, row.coef]
    args: list[Arg] = [*input_args([n for n in roots if n is not None], program, spec)]
    args += _between(form, spec, lines, solve, written=True)
    if spec.packed:
        args += [flat_arg("cu_seqlens", "i32"), flat_arg("chunks", "i32")]
    else:
        args += [ScalarArg("tokens_given", "i32"), ScalarArg("chunks_each", "i32")]
    args += size_args(args, (key,), systems, spec)
    return tuple(args)


def _carry_args(
    program: Program, form: AffineForm, spec: Spec, tile: tuple[TileAxis, ...],
    grid: tuple[str, ...], lines: tuple[str, ...], solve: bool,
) -> tuple[Arg, ...]:  # fmt: skip
    roots: list[Node | None] = [*(r.vector for r in form.reads), *form.outputs]
    for row in form.rows:
        roots += [row.a, row.b, split_row(row, form.passive).const]
    args: list[Arg] = [*input_args([n for n in roots if n is not None], program, spec)]
    args += state_args(program, spec)
    args += slot_args(program, spec)
    args += _between(form, spec, lines, solve, written=False)
    args += output_args(program, spec)
    if spec.packed:
        args += [flat_arg("cu_seqlens", "i32"), flat_arg("first_chunks", "i32")]
    else:
        args += [ScalarArg("tokens_given", "i32"), ScalarArg("chunks_each", "i32")]
    args += size_args(args, tile, grid, spec)
    return tuple(args)
