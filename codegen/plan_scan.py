"""Plans of the scan family: what its kernels share, and the sequential ``step``.

``step`` runs any body, one token after another, affine or not. The chunked kernels of affine bodies
are planned in ``plan_affine``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from attncc.codegen.forms import Refusal
from attncc.codegen.passes.expand_windows import Body
from attncc.codegen.passes.read_before_write import read_before_write
from attncc.codegen.plan import Arg, DenseArg, KernelPlan, ScalarArg, Spec, TensorArg, in_chain
from attncc.codegen.scan_tiles import TileAxis, states_of, tile_body
from attncc.codegen.step_choices import STEP_TILE, choose_step
from attncc.dsl.axes import Pattern, parse, union
from attncc.dsl.graph import walk
from attncc.dsl.ir import (
    Input,
    Kind,
    Lifetime,
    Node,
    Program,
    Tensor,
)

FLAT, MOST_APART = "flat", 65535
"""The bucket of :func:`flat`, and how many sequences that axis holds."""


def flat(sequences: int) -> tuple[tuple[str, int], ...]:
    """The bucket that tells calls of more sequences than a grid's second axis holds."""
    return ((FLAT, 1),) if sequences > MOST_APART else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPlan(KernelPlan):
    """What the three kernels share.

    Attributes:
        tile: axes inside the tile; only ``blocked`` may be cut into several tiles.
        blocked: the axis that is cut into blocks, or "" for none.
        grid_axes: axes with one program per point, outermost first, inside the sequence.
        packed: sequences lie end to end along T.
        given: the initial state of these states is passed; others start at zero.
        pooled: states whose B is a pool of slots: ``{name}_slots`` are read, ``{name}_out_slots``
            written.
        token_slots: those of them with one out-slot a token.
    """

    tile: tuple[TileAxis, ...]
    blocked: str
    grid_axes: tuple[str, ...]
    packed: bool
    given: tuple[str, ...]
    pooled: tuple[str, ...] = ()
    token_slots: tuple[str, ...] = ()

    def axis(self, name: str) -> TileAxis:
        """The tile axis of that name."""
        return next(t for t in self.tile if t.axis == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(ScanPlan):
    """The sequential kernel.

    Attributes:
        body: what a token does, its windows row by row.
        single: every sequence has one token.
        apart: sequences are the grid's second axis: no division by a number of run time.
        registers: most of a thread, or 0 to leave them to the compiler.
        narrow: a token's inputs of 16 bits stay so until they are used: less of a thread's
            registers wait for the state.
        states_first: the only token's states are stored before its outputs are found.
        joint: outputs read the states before their last write, in one sum with what that needs.
        own_loads: vectors of 16 bits are loaded by each thread as it needs them.
        ahead: a token's inputs are asked for while the one before it is worked on.
    """

    body: Body
    single: bool = False
    apart: bool = False
    registers: int = 0
    narrow: bool = False
    states_first: bool = False
    joint: bool = False
    own_loads: bool = False
    ahead: bool = False

    def grid(self, sequences: int, each: int) -> tuple[int, ...]:
        """The grid of so many sequences, of so many programs each."""
        return (each, sequences) if self.apart else (each * sequences,)


# --- what both kinds ask ------------------------------------------------------------------------


def pattern_of(t: Tensor, program: Program, packed: bool) -> Pattern:
    """Memory axes of an input as passed: packed calls have no B beside T."""
    return _stripped(t.pattern, program, packed)


def _stripped(pattern: Pattern, program: Program, packed: bool) -> Pattern:
    return pattern.without("B") if packed and program.scan in pattern.axes else pattern


def input_args(roots: Iterable[Node], program: Program, spec: Spec) -> Iterator[Arg]:
    """The inputs an expression loads and the host numbers it takes, in signature order."""
    used = {n.name for n in walk(*roots) if isinstance(n, Input)}
    for t in program.tensors:
        if t.name not in used or t.lifetime in (Lifetime.STATE, Lifetime.WINDOW):
            continue
        if t.scalar:
            yield ScalarArg(f"{t.name}_value", "i32" if t.kind is Kind.INT else "fp32")
        else:
            yield _tensor(t.name, pattern_of(t, program, spec.packed), spec, t.name)


def _tensor(
    name: str, pattern: Pattern, spec: Spec, key: str, *, written: bool = False
) -> TensorArg:
    return TensorArg(name, pattern, spec.dtype(key), written, name in spec.aligned)


def initial_name(state: str) -> str:
    """Parameter name of a given initial state; ``spec.aligned`` may hold it too."""
    return f"{state}_initial"


def final_name(state: str) -> str:
    """Parameter name of a final state."""
    return f"{state}_final"


def slot_args(program: Program, spec: Spec) -> Iterator[Arg]:
    """Which slot of its pool each sequence reads, and which it (or each token) writes."""
    for t in states_of(program):
        if t.name not in spec.pools:
            continue
        yield flat_arg(f"{t.name}_slots", "i32")
        if t.name in spec.token_slots:
            yield TensorArg(f"{t.name}_out_slots", parse("B Z"), "i32", False, False)
            yield ScalarArg(f"{t.name}_out_width", "i32")
        else:
            yield flat_arg(f"{t.name}_out_slots", "i32")


def states_in(program: Program, names: frozenset[str]) -> tuple[str, ...]:
    """The states that are among the names, in declaration order."""
    return tuple(n for n in program.state_names if n in names)


def state_args(program: Program, spec: Spec) -> Iterator[TensorArg]:
    """Given initial states, then all final ones."""
    for t in states_of(program):
        if t.name in spec.given_states:
            name = initial_name(t.name)
            yield _tensor(name, t.pattern, spec, name if name in dict(spec.dtypes) else t.name)
    for t in states_of(program):
        yield _tensor(final_name(t.name), t.pattern, spec, t.name, written=True)


def dense_states(program: Program, spec: Spec) -> Iterator[TensorArg]:
    """:func:`state_args`, with the inner strides of states in one piece, as far as these are known.

    A step has few instructions beside its addresses: a product of 64 bits for each row of a state
    is a fifth of them, and 10 to 20 registers. A window has a row less than its axis says.
    """
    states = [t.name for t in states_of(program) if t.lifetime is Lifetime.STATE]
    dense = {f(n) for n in states for f in (initial_name, final_name)} & spec.dense
    static = dict(spec.static)
    for arg in state_args(program, spec):
        inner: list[int] = []
        size = 1
        for dim, outer in pairwise(reversed(arg.pattern.dims[1:])):
            if not {*dim, *outer} <= static.keys():
                break  # an index that varies times a number could pass 2^31, times a stride it may
            size *= prod(static[a] for a in dim)
            inner.insert(0, size)
        if arg.name not in dense or not inner:
            yield arg
            continue
        held = arg.name, arg.pattern, arg.dtype, arg.written, arg.aligned
        yield DenseArg(*held, tuple(inner))


def output_args(program: Program, spec: Spec) -> Iterator[TensorArg]:
    """Tensors the outputs are written to."""
    for o in program.outputs:
        pattern = _stripped(o.pattern, program, spec.packed)
        yield _tensor(o.name, pattern, spec, o.name, written=True)


def flat_arg(name: str, dtype: str, *, written: bool = False) -> TensorArg:
    """A buffer of our own, indexed by hand."""
    return TensorArg(name, parse("Z"), dtype, written, aligned=not dtype.startswith("i"))


def size_args(
    args: Iterable[Arg], tile: Iterable[TileAxis], grid: Iterable[str], spec: Spec
) -> Iterator[ScalarArg]:
    """Sizes given at run time that index arithmetic needs."""
    fixed = {*dict(spec.static), *(t.axis for t in tile), "B", "T"}
    groups = (dim[1:] for a in args if isinstance(a, TensorArg) for dim in a.pattern.dims)
    for axis in union(grid, *groups):
        if axis not in fixed and axis not in ("Z",):
            yield ScalarArg(f"n_{axis}", "i32")


def _narrow_outputs(program: Program, spec: Spec) -> bool:
    """Whether no output holds more than 16 bits: sums in another order are no less right then."""
    return all(spec.dtype(o.name) in ("bf16", "fp16") for o in program.outputs)


# --- the sequential kernel ----------------------------------------------------------------------


def plan_step(program: Program, spec: Spec) -> StepPlan | Refusal:
    """The sequential kernel of a scan.

    Args:
        program: a scan.
        spec: dtypes and static sizes; ``initial_name`` of a state in ``aligned`` says so of the
            given one; the bucket ``tokens`` is there if each sequence has exactly one, and ``flat``
            if there are more sequences than a grid's second axis holds.

    Returns:
        The plan, or why a program's tile cannot hold the body.
    """
    if program.scan is None or not program.state_names:
        return Refusal("not a scan with a state", program.loc)
    tiled = tile_body(program, spec)
    if isinstance(tiled, Refusal):
        return tiled
    body, blocked, grid, narrow = tiled.body, tiled.blocked, tiled.grid, tiled.narrow
    if narrow > STEP_TILE:
        sizes = " x ".join(f"{t.axis} {t.block}" for t in tiled.tile if t.axis != blocked)
        return Refusal(f"a tile of {sizes} does not fit a program's registers", program.loc)
    choice = choose_step(program, tiled, spec)
    tile = tiled.cut(choice.columns) if blocked else tiled.tile
    args: list[Arg] = [*input_args(body.roots, program, spec)]
    args += dense_states(program, spec)
    args += slot_args(program, spec)
    args += output_args(program, spec)
    args += [flat_arg("cu_seqlens", "i32")] if spec.packed else [ScalarArg("tokens", "i32")]
    args += size_args(args, tile, grid, spec)
    single = dict(spec.buckets).get("tokens") == 1 and not spec.packed
    joint = choice.joint and single and _narrow_outputs(program, spec)
    body = read_before_write(body) if joint else body
    plan = StepPlan(
        op=program.name, phase="step", template="triton/scan_step.py.jinja", program=program,
        args=tuple(args), static=spec.static, num_warps=choice.num_warps,
        registers=choice.registers, narrow=choice.narrow, states_first=choice.states_first,
        joint=joint, own_loads=choice.own_loads and single,
        chosen=choice.chosen, num_stages=1,
        precision="ieee", tile=tile, blocked=blocked, grid_axes=grid, body=body,
        packed=spec.packed, given=states_in(program, spec.given_states),
        pooled=states_in(program, spec.pools), token_slots=states_in(program, spec.token_slots),
        single=single, apart=single and FLAT not in dict(spec.buckets),
    )  # fmt: skip
    return in_chain(plan, spec)
