"""Which operands are copied to shared memory ahead of their use, and tiles where some are not.

A Hopper or Blackwell matrix product reads shared memory through descriptors. Where Triton copies
tiles asynchronously into a ring of buffers, they are made anew in every step of the loop. An
operand that passes through registers (addresses that are not aligned, values that are computed,
the parts of a tf32x3 product) has one buffer, so its descriptors do not change, and the assembler
takes them out of the loop. ptxas 12.8 does that wrongly at times: the base of the sum is a register
that holds something else, and the product reads a place of shared memory that nobody wrote. Tiles
of 32 rows are multiplied by ``mma.sync``, which has no descriptors.
"""

from __future__ import annotations

from dataclasses import replace

from attncc.codegen.forms import SoftmaxFold
from attncc.codegen.plan import Spec
from attncc.codegen.plan_parts import score_tiles
from attncc.codegen.plan_passes import Columns, Pass
from attncc.codegen.softmax_checks import inner_sums, tensor_pattern
from attncc.codegen.tiles import Tiles
from attncc.dsl.graph import axes_of
from attncc.dsl.ir import Input, Node, Program

ROWS = 32
"""Most rows of a product without descriptors: a wgmma takes 64, a tcgen05 64 or 128."""

AHEAD_REGISTERS = 160
"""Most registers of a thread for the sum, two tiles of scores and the weights of a block before."""


def copied_ahead(
    program: Program, fold: SoftmaxFold, columns: tuple[Columns, ...], operand: tuple[str, ...],
    spec: Spec,
) -> bool:  # fmt: skip
    """Whether every operand of a pass' loop can be copied to shared memory asynchronously.

    Args:
        program: the declaration.
        fold: the pass' first fold.
        columns: the value side of its folds.
        operand: element type of each dot's operands.
        spec: of the call.
    """
    summed = {a for n in inner_sums(fold) for a in n.over}
    for dot, dtype in zip(fold.dots, operand, strict=True):
        again = summed & {a for n in dot.query for a in axes_of(n)}  # loaded for every block
        sides = (dot.key, dot.query) if again else (dot.key,)
        if not all(_copied(program, side, dot.over, dtype, spec) for side in sides):
            return False
    own = (c for c in columns if c.shared < 0)
    return all(_copied(program, c.fold.value, c.fold.value_axes, c.type, spec) for c in own)


def _copied(
    program: Program, nodes: tuple[Node, ...], axes: tuple[str, ...], dtype: str, spec: Spec
) -> bool:
    """A plain input, as it is stored, whose rows are read at least four bytes at a time."""
    if len(nodes) != 1 or not isinstance(nodes[0], Input) or dtype == "fp32":
        return False
    name = nodes[0].name
    if name not in spec.aligned or spec.dtype(name) != dtype:
        return False
    inner = tensor_pattern(program, spec, program.tensor(name)).dims[-1][-1]
    return inner == axes[-1] and spec.size(inner) % 2 == 0


def runs_ahead(own: Pass, tiles: Tiles, spec: Spec, *, copied: bool) -> bool:
    """Whether a block's scores are multiplied before the values of the block before it.

    A wgmma runs beside other instructions of its warps until somebody asks for its result. In the
    usual order the scores are asked for at once, and by then the weighted sum is done as well: it
    had no company. One block ahead, a block's weights are found while the values of the block
    before it are multiplied. Its weights have to be kept for that, in fp32 (Triton sends loop-
    carried 16-bit operands through shared memory), and its values are read a block later.

    Args:
        own: the pass.
        tiles: of the plan.
        spec: of the call.
        copied: every operand is copied to shared memory asynchronously.
    """
    fold, page = own.lead, dict(spec.static).get("page", 0) if spec.pages else 0
    if not (copied and tiles.ahead and spec.target.startswith("sm_90")):
        return False
    if own.plain or tiles.still_turned or tiles.block_m < 64 or len(own.columns) > 1:
        return False
    if own.columns[0].shared >= 0 or score_tiles(fold) > 2:
        return False
    if page and page % tiles.block_n:
        return False
    tile = own.columns[0].block + 3 * tiles.block_n  # scores twice, weights
    return tiles.block_m * tile <= AHEAD_REGISTERS * 32 * tiles.num_warps


def without_descriptors(tiles: Tiles, width: int, element: int) -> Tiles:
    """Tiles that ``mma.sync`` multiplies and that need few registers for loads.

    Args:
        tiles: what would be taken otherwise.
        width: the longest contraction, or the columns of the value.
        element: bytes of an operand's element.
    """
    if tiles.block_m <= 16:
        return tiles
    if width > 256 or (element == 4 and width > 128):
        return replace(tiles, block_m=16, block_n=min(tiles.block_n, 32), num_warps=8, num_stages=2)
    return Tiles(ROWS, min(tiles.block_n, 32), 8 if width > 128 else 4, 2)
