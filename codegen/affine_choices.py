"""What the chunk kernels may choose freely, and how they choose it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attncc.codegen.affine_checks import decays_each, has_scale, shared_gain
from attncc.codegen.forms import AffineForm
from attncc.codegen.plan import Spec
from attncc.codegen.scan_tiles import power
from attncc.codegen.target import SHARED as LIMITS
from attncc.codegen.target import shared_limit
from attncc.dsl.graph import axes_of, walk
from attncc.dsl.ir import Input, Node

ROWS = 64
"""Rows of a chunk's system: tokens of a chunk times rows per token, padded."""
BLOCK = 16
"""Rows of a block of a system; a token's rows lie in one block."""
TOKENS = 32
"""Places for the tokens of a chunk whose rows, several a token, follow each other."""
SHARED = LIMITS
"""Shared memory a program may have, by target, in bytes."""
SHARED_RESERVE = 20 << 10
"""Measured beside the buffers of the stages: operands that change their layout."""
MULTIPROCESSORS = 132
"""What a grid should fill; only the width of a block depends on it."""
BLACKWELL = ("sm_100", "sm_103")
"""Targets with tensor memory."""
START_COLUMNS = 16
"""Columns of a state that a program composes: the fewest of a product."""
START_STAGES = 3
"""Segments in flight, of which all but one have their summaries in shared memory."""
START_WARPS = 8
"""Of a program whose A fills the registers of so many."""
START_SLICE = 32
"""Columns of A in one product of three-part fp32 operands."""
MOST_SHARED = 4
"""Most systems that one program of ``prepare`` or ``mix`` works through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What may be chosen freely; None leaves it to the plan.

    Attributes:
        width: columns of a state tile.
        transposed: the state is kept as ``[columns, active]``: it and all that is made from it
            stand left in the products, where operands may come from registers.
        stages: chunks in flight in ``state``.
        warps: of a ``state`` program.
        inverse_precision: of the fp32 products inside the inverse (``ieee`` for fp32 operands,
            else ``tf32x3``). ``tf32`` is enough only where
            every coefficient is known to lie within 1 (``shared/kernels.md``: 1.3e-2 otherwise).
        system_warps: of a ``prepare`` or ``mix`` program.
    """

    width: int | None = None
    transposed: bool | None = None
    stages: int | None = None
    warps: int | None = None
    inverse_precision: str | None = None
    system_warps: int | None = None


def storage_of(form: AffineForm, spec: Spec) -> str:
    """Element type of the operands: that of the inputs with the active axis."""
    held = dict(spec.dtypes)
    found = {
        held[n.name]
        for n in walk(*vectors_of(form))
        if isinstance(n, Input) and set(form.active) & set(n.axes) and n.name in held
    }
    return found.pop() if len(found) == 1 else "fp32"


def row_vectors(form: AffineForm) -> tuple[Node, ...]:
    """The vectors of the rows along the active axis."""
    return (*(r.a for r in form.rows), *(r.b for r in form.rows if r.b is not None))


def vectors_of(form: AffineForm) -> tuple[Node, ...]:
    """All vectors along the active axis."""
    return (*row_vectors(form), *(r.vector for r in form.reads))


def lines_of(form: AffineForm, solve: bool) -> tuple[str, ...]:
    """The fp32 vectors that ``state`` is left of each chunk."""
    lines = ["gain"] if solve and shared_gain(form) is None else []
    lines += ["scale"] if solve and has_scale(form) else []
    if form.decays and not decays_each(form):
        lines += ["suffix", *(f"prefix_{r.name}" for r in form.reads)]
    return tuple(lines)


def state_block(size: int, height: int, storage: str, spec: Spec) -> int:
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


def stages_of(form: AffineForm, height: int, width: int, storage: str, target: str) -> int:
    """Chunks in flight: as many as the shared memory of the target holds, up to 3.

    Up to 2 of wide tiles: measured, where programs are many a third costs more than it hides.
    """
    vectors = set(row_vectors(form))
    operands = min(len(vectors), 2) + len(form.reads)
    squares = len(form.reads) + any(r.b is not None for r in form.rows)
    numbers = ROWS * (height * operands + ROWS * squares + width)
    size = numbers * (4 if storage == "fp32" else 2)
    held = shared_limit(target) - SHARED_RESERVE
    return max(1, min(3 if width < 64 else 2, held // size))


def precisions_of(storage: str, target: str) -> tuple[str, str]:
    """How fp32 numbers multiply: on tensor cores in ``state``, and in small blocks elsewhere.

    Tensor cores cut off as they accumulate, and three tf32 products lose a bit of each operand: six
    bf16 ones do not. The blocks of 16 rows, whose errors the inverse multiplies, are plain fp32.
    For data-centre Blackwell Triton compiles six bf16 products to nothing but a trap.
    """
    if storage != "fp32":
        return "tf32x3", "tf32x3"
    return "tf32x3" if target in BLACKWELL else "bf16x6", "ieee"


def start_precision(storage: str, target: str) -> str:
    """How summaries multiply, which are fp32 numbers.

    They were made from operands of 16 bits: two such parts of each number are enough for them, in
    half the instructions that three tf32 products of parts take.
    """
    if storage == "fp32":
        return "ieee"
    return precisions_of(storage, target)[0] if target in BLACKWELL else "bf16x3"


@dataclass(frozen=True, slots=True)
class Composing:
    """How the summaries of segments are composed.

    Attributes:
        columns: of the state, of one program.
        slice: columns of A in one product: all, where the next segment's A is on its way meanwhile,
            or what three-part operands leave registers for.
        stages: segments in flight.
        warps: of a program.
    """

    columns: int
    slice: int
    stages: int
    warps: int


def composing_of(storage: str, height: int, width: int, size: int, target: str) -> Composing:
    """The tile of ``start``.

    A state's columns depend on no other ones, so that few of them a program are many programs. Each
    reads the A of every segment, whose way is long beside its product.

    Args:
        storage: element type of the operands elsewhere; fp32 ones multiply as fp32 here too.
        height: of the active axis.
        width: columns of a tile of the buffers.
        size: columns in all; those of the last tile that are none are written too.
        target: ``sm_90`` and the like.
    """
    numbers = 4 * height * (height + START_COLUMNS)
    stages = min(START_STAGES, 1 + (shared_limit(target) - SHARED_RESERVE) // numbers)
    if storage == "fp32" or stages < 2 or size % width or width < START_COLUMNS:
        return Composing(width, min(START_SLICE, height), 1, warps_of(height, storage))
    return Composing(START_COLUMNS, height, stages, START_WARPS if height > 64 else 4)


def warps_of(height: int, storage: str) -> int:
    """Warps of a program that carries states: fp32 operands in parts need the registers of 8."""
    return 8 if storage == "fp32" and height >= 128 else 4


def system_warps_of(operands: int, height: int, storage: str, least: int) -> int:
    """Warps of a program that holds ``operands`` row vectors of a chunk.

    256 registers' worth of them a warp: measured best at 16 bits, although two of 128 fill one. The
    plain fp32 products hold theirs as rows and as columns.

    Args:
        operands: row vectors.
        height: of the active axis.
        storage: element type of the vectors.
        least: of 16 bits, see :func:`least_warps`.
    """
    registers = operands * ROWS * height * (4 if storage == "fp32" else 2) // 128
    if storage == "fp32":
        return min(8, power(registers // 64))
    return max(least, min(4, power(registers // 256)))


def least_warps(solves: bool, height: int, spec: Spec) -> int:
    """Warps of a program with one system and operands of 16 bits; with fewer it spills.

    Args:
        solves: it is ``prepare``'s, else ``mix``'s.
        height: of the active axis.
        spec: of the call.
    """
    if not solves and height <= 64:
        return 1
    return 4 if spec.target in BLACKWELL else 2


def shared_of(vectors: Iterable[Node], systems: tuple[str, ...], spec: Spec) -> tuple[str, int]:
    """The axis that a program of ``prepare`` or ``mix`` works along, and how far.

    Nowhere on data-centre Blackwell: products that are kept for all systems spill, and none of it
    was measured there.
    """
    if not systems or spec.target in BLACKWELL:
        return "", 1
    axis = systems[-1]
    if axis not in dict(spec.static) or any(axis in axes_of(v) for v in vectors):
        return "", 1
    size = spec.size(axis)
    count = max(n for n in range(1, MOST_SHARED + 1) if size % n == 0)
    return (axis, count) if count > 1 else ("", 1)
