"""Shared memory of the chunk kernels, from above: plans are narrowed until it fits their target.

Triton keeps the loads of the chunks in flight in buffers, and beside them what becomes an operand
of a matrix product on the way: the state, what rows add, and operands that were computed. The
figures are bounds, held against what the compiler takes in ``tests/compile/test_memory.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attncc.codegen.affine_checks import decays_each, split_row
from attncc.codegen.affine_choices import ROWS
from attncc.codegen.affine_rows import row_groups, unpicked
from attncc.codegen.forms import AffineForm, Refusal
from attncc.codegen.plan import Spec
from attncc.codegen.target import shared_limit
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime, Lit, Node, Program

BYTES = {"fp32": 4, "i32": 4, "i64": 8, "bf16": 2, "fp16": 2}
"""Of an element; one byte for all others."""
SINGLE = 6
"""Bytes of an fp32 number as an operand: its three bf16 parts."""
SMALL = 3 << 10
"""Vectors, numbers and alignment."""
LEAST_WIDTH = 16
"""Columns of the narrowest tile."""

Load = tuple[str, tuple[int, ...], bool]
"""A tensor, the rows of a token that load it, and whether it is loaded a row or a token."""
Nodes = Sequence[Node | None]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a kernel that carries states.

    Attributes:
        key: the active axis and its block.
        value: the passive axis that is cut into blocks, and a block's width.
        storage: element type of the operands.
    """

    key: tuple[str, int]
    value: tuple[str, int]
    storage: str


@dataclass(frozen=True, slots=True)
class Loads:
    """The loads of a chunk, in bytes.

    Attributes:
        operands: those that may be operands as they are.
        others: all others.
        computed: some operand is not what was loaded.
    """

    operands: dict[Load, int]
    others: dict[Load, int]
    computed: bool


@dataclass(frozen=True, slots=True)
class Fitted:
    """What fits: the width of a tile, and chunks in flight."""

    width: int
    stages: int


def loads_of(program: Program, form: AffineForm, spec: Spec, shape: Shape) -> Loads:
    """What one chunk loads, each tensor once for rows that share an expression."""
    each = decays_each(form)
    by_row: list[Nodes] = [[r.a for r in form.rows], [r.b for r in form.rows]]
    by_token: list[Nodes] = [[r.vector] for r in form.reads]
    computed = not each and not all(_as_loaded(n, spec, shape) for n in (*by_row, *by_token))
    found = Loads({}, {}, computed)
    if not each:
        for nodes in by_row:
            found.operands.update(_inputs(nodes, program, spec, shape, rows=True))
        for nodes in by_token:
            found.operands.update(_inputs(nodes, program, spec, shape, rows=False))
    consts = [split_row(r, form.passive).const for r in form.rows]
    found.others.update(_inputs(consts, program, spec, shape, rows=True))
    found.others.update(_inputs(form.outputs, program, spec, shape, rows=False))
    solve, size = any(r.b is not None for r in form.rows), BYTES[shape.storage]
    ready = ["late_a", *(f"early_{r.name}" for r in form.reads), *["early_b"] * solve]
    for name in ready if each else ():
        found.operands[name, (), True] = ROWS * shape.key[1] * size
    for name in [*(f"mix_{r.name}" for r in form.reads), *["inverse"] * solve]:
        found.operands[name, (), True] = ROWS * ROWS * size
    return found


def _as_loaded(nodes: Nodes, spec: Spec, shape: Shape) -> bool:
    """Whether all rows of an operand are one input in the operands' type (or there are none)."""
    first, *others = row_groups(nodes)
    node = unpicked(first.node, 0)
    if others or not isinstance(node, Input):
        return not others and node == Lit(0.0)
    return dict(spec.dtypes).get(node.name) == shape.storage


def _inputs(
    nodes: Nodes, program: Program, spec: Spec, shape: Shape, *, rows: bool
) -> Iterator[tuple[Load, int]]:
    dtypes, blocks = dict(spec.dtypes), dict([shape.key, shape.value])
    held: list[tuple[Node, tuple[int, ...]]] = [(n, ()) for n in nodes if n is not None]
    if rows:
        held = [(g.node, g.rows) for g in row_groups(nodes)]
    for node, which in held:
        for n in walk(node):
            if not isinstance(n, Input) or n.name not in dtypes or n.lifetime is Lifetime.STATE:
                continue
            size = BYTES.get(dtypes[n.name], 1)
            for axis, block in blocks.items():
                size *= block if axis in n.axes else 1
            moving = program.scan in program.tensor(n.name).pattern.axes
            yield (n.name, which, rows), size * (ROWS if moving else 1)


def state_bytes(loads: Loads, shape: Shape, stages: int) -> int:
    """Shared memory of a kernel that carries states, in bytes, from above.

    Args:
        loads: of one chunk.
        shape: of the kernel.
        stages: chunks in flight.
    """
    key, width = shape.key[1], shape.value[1]
    single = shape.storage == "fp32"
    operand = SINGLE if single else BYTES[shape.storage]
    # 16-bit operands are multiplied from where they were loaded: that takes one buffer more.
    held = stages - 1 if single or stages == 1 else stages
    buffers = sum(loads.operands.values()) * held + sum(loads.others.values()) * (stages - 1)
    made = operand * (key * width + 2 * ROWS * width)  # state; what rows add, and decayed
    computed = operand * ROWS * key * loads.computed
    if stages == 1:  # loads pass through shared memory too, 16-bit ones two at a time
        computed += BYTES[shape.storage] * ROWS * key * (1 if single else 2)
    return buffers + made + computed + SMALL


def system_bytes(form: AffineForm, key: int, storage: str) -> int:
    """Shared memory of ``prepare`` and ``mix``, in bytes, from above.

    Args:
        form: the flat table.
        key: block of the active axis.
        storage: element type of the operands.
    """
    vectors = 1 + max(len(form.reads), any(r.b is not None for r in form.rows))
    return vectors * ROWS * key * BYTES[storage] + SMALL


def system_refusal(
    program: Program, form: AffineForm, spec: Spec, key: int, storage: str
) -> Refusal | None:
    """Why a target has too little shared memory for ``prepare`` or ``mix``."""
    needed, limit = system_bytes(form, key, storage), shared_limit(spec.target)
    if needed <= limit:
        return None
    return Refusal(
        f"the vectors of a chunk take up to {needed} bytes of shared memory, and a program on "
        f"{spec.target} has {limit}",
        program.loc,
    )


def fit(
    program: Program, form: AffineForm, spec: Spec, shape: Shape, stages: int,
    fixed: tuple[bool, bool] = (False, False),
) -> Fitted | Refusal:  # fmt: skip
    """Fewer chunks in flight, then narrower tiles, until the target has the shared memory.

    Args:
        program: the scan.
        form: its flat table.
        spec: of the call, with the target.
        shape: as wanted.
        stages: as wanted.
        fixed: whether the caller has fixed the width, and the stages; those stay as they are.

    Returns:
        What fits, or why nothing does.
    """
    limit = shared_limit(spec.target)
    while True:
        axis, width = shape.value
        needed = state_bytes(loads_of(program, form, spec, shape), shape, stages)
        if needed <= limit:
            return Fitted(width, stages)
        if stages > 1 and not fixed[1]:
            stages -= 1
        elif width > LEAST_WIDTH and not fixed[0]:
            shape = replace(shape, value=(axis, width // 2))
        elif any(fixed):  # the caller's own: what the compiler finds is the answer
            return Fitted(width, stages)
        else:
            key, block = shape.key
            reason = f"a tile of {key} {block} x {axis} {width} takes up to {needed} bytes of "
            reason += f"shared memory, and a program on {spec.target} has {limit}"
            return Refusal(reason, program.loc)
