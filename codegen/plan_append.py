"""The plan of appending: new rows of every history copied behind what its cache already holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from attncc.codegen.plan import Arg, KernelPlan, ScalarArg, Spec, TensorArg
from attncc.codegen.quantised import Scaled
from attncc.codegen.softmax_checks import TOKENS, tensor_pattern
from attncc.codegen.tiles import padded
from attncc.dsl.axes import PAGE, Pattern, parse
from attncc.dsl.graph import walk
from attncc.dsl.ir import AtQuery, Lifetime, Program, Tensor

if TYPE_CHECKING:
    from attncc.codegen.plan_softmax import TiledPlan

WIDEST = 1024
"""Most elements of a row that a kernel appends beside its other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendPlan(KernelPlan):
    """New rows of every history copied behind what a cache already holds.

    Attributes:
        histories: names of the caches.
        packed: new rows lie end to end along T.
        over: the history axis.
        block: elements of a row copied by one program instance.
        page: rows of a page, 0 where the caches do not lie in pages.
        quantised: caches that are stored as e4m3 beside scales.
    """

    histories: tuple[str, ...]
    packed: bool
    over: str
    block: int
    page: int
    quantised: tuple[Scaled, ...] = ()


def plan_append(program: Program, over: str, spec: Spec) -> AppendPlan:
    """The kernel that appends to every cache of a program.

    Args:
        program: the traced declaration.
        over: its history axis.
        spec: dtypes, static sizes and layouts of the call.
    """
    caches = [t for t in program.tensors if t.lifetime is Lifetime.CACHE]
    names = {t.name for t in caches}
    quantised = tuple(s for s in spec.quantised if s.name in names)
    args: list[Arg] = []
    for t in caches:
        args.append(new_rows_arg(program, spec, over, t))
        held = tensor_pattern(program, spec, t)
        args.append(TensorArg(t.name, held, spec.dtype(t.name), True, t.name in spec.aligned))
    args += [TensorArg(s.scales, s.pattern, s.dtype, True, s.aligned) for s in quantised]
    args.append(vector("lengths"))
    args += [block_table()] if spec.pages else []
    if spec.packed:
        args += [vector("cu_seqlens"), ScalarArg("sequences", "i32"), ScalarArg("steps", "i32")]
    else:
        args.append(ScalarArg("T", "i32"))
    args += [ScalarArg("S", "i32"), ScalarArg("chunks", "i32")]  # S: rows a cache has room for
    loose = {a for t in caches for a in t.pattern.axes} - {"B", over}
    args += [ScalarArg(f"n_{a}", "i32") for a in sorted(loose - dict(spec.static).keys())]
    return AppendPlan(
        op=program.name, phase="append", template="triton/append.py.jinja", program=program,
        args=tuple(args), static=spec.static, num_warps=4, num_stages=1, precision="ieee",
        histories=tuple(t.name for t in caches), packed=spec.packed, over=over,
        block=max(1024, *(padded(s.block) for s in quantised), 0), page=page_size(spec),
        quantised=quantised,
    )  # fmt: skip


def new_rows_arg(program: Program, spec: Spec, over: str, t: Tensor) -> TensorArg:
    """Parameter for the new rows of a history: T in place of its axis."""
    new = Pattern(tuple(tuple(TOKENS if a == over else a for a in d) for d in t.pattern))
    new = new.without("B") if spec.packed else new
    name = f"new_{t.name}"
    given = dict(spec.dtypes).get(name, spec.dtype(t.name))
    return TensorArg(name, new, given, False, name in spec.aligned)


def append_inside(
    program: Program, spec: Spec, whole: TiledPlan | None, parts: tuple[TiledPlan, ...]
) -> tuple[TiledPlan, ...]:
    """The passes of a decode step, which write its new rows themselves where they can.

    Few programs share the keys there, and a kernel that appends first would be a twentieth of the
    call. Where each program has all keys of its point, there are several waves of programs that
    would begin with it, and it is dearer than a kernel (1.5 % of 0.25 ms).

    Args:
        program: the traced declaration.
        spec: of the call.
        whole: the kernel without ranges of keys.
        parts: those of the passes.
    """
    names = _appended_inside(program, spec, whole, parts)
    return tuple(_appending(part, program, spec, names) for part in parts) if names else parts


def _appended_inside(
    program: Program, spec: Spec, whole: TiledPlan | None, parts: tuple[TiledPlan, ...]
) -> tuple[str, ...]:
    """The caches whose new rows the kernel that reads them writes itself; all of them, or none.

    In a decode step of one kernel each program writes the part of the new rows that it reads: what
    lies at its point of the grid. Rows that are quantised have scales beside them, and a value at
    the query's position is read by programs that do not read its row otherwise: both are left to a
    kernel of its own.
    """
    if whole is None or whole.phase != "decode" or len(parts) != 1 or not whole.lengths:
        return ()
    if parts[0].fused is None or whole.template != parts[0].template or whole.backward:
        return ()
    if spec.quantised or any(isinstance(n, AtQuery) for n in walk(*program.roots)):
        return ()
    caches = [t for t in program.tensors if t.lifetime is Lifetime.CACHE]
    static, read = dict(spec.static), {a.name for a in parts[0].args}
    for t in caches:
        inner = [a for a in t.pattern.axes if a not in ("B", whole.fold.over, *whole.grid_axes)]
        if f"new_{t.name}" not in dict(spec.dtypes) or t.name not in read:
            return ()
        if not {*inner} <= static.keys() or prod(static[a] for a in inner) > WIDEST:
            return ()
    return tuple(t.name for t in caches)


def _appending(plan: TiledPlan, program: Program, spec: Spec, names: tuple[str, ...]) -> TiledPlan:
    """The same kernel, which writes the new rows of caches itself before it reads them.

    Where no ``cu_seqlens`` deals out the tiles, the last program of a sequence to merge also adds
    its tokens to its length, once nobody reads that any more: a launch less (``growth`` is how many
    are added, 0 where the caller does it).
    """
    over, grows = plan.fold.over, plan.fused is not None and not plan.packed
    written = (*names, "lengths") if grows else names
    args: list[Arg] = [
        replace(a, written=True) if isinstance(a, TensorArg) and a.name in written else a
        for a in plan.args
    ]
    args += [new_rows_arg(program, spec, over, program.tensor(name)) for name in names]
    args += [] if plan.dealt else [ScalarArg("room", "i32")]
    args += [ScalarArg("growth", "i32")] if grows else []
    return replace(plan, args=tuple(args), appends=names, grows=grows)


def vector(name: str) -> TensorArg:
    """A dense int32 vector."""
    return TensorArg(name, parse("i"), "i32", False, False)


def block_table() -> TensorArg:
    """int32 ``[B, most pages]``: which page holds the i-th rows of a sequence."""
    return TensorArg("block_table", parse("B i"), "i32", False, False)


def page_size(spec: Spec) -> int:
    """Rows of a page, 0 where no history lies in pages."""
    return spec.size(PAGE) if spec.pages else 0
