"""The plan of appending: new rows of every history copied behind what its cache already holds."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.plan import Arg, KernelPlan, ScalarArg, Spec, TensorArg
from attncc.codegen.quantised import Scaled
from attncc.codegen.softmax_checks import TOKENS, tensor_pattern
from attncc.codegen.tiles import padded
from attncc.dsl.axes import PAGE, Pattern, parse
from attncc.dsl.ir import Lifetime, Program


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
        new = Pattern(tuple(tuple(TOKENS if a == over else a for a in d) for d in t.pattern))
        new = new.without("B") if spec.packed else new
        name, dtype = f"new_{t.name}", spec.dtype(t.name)
        given = dict(spec.dtypes).get(name, dtype)
        args.append(TensorArg(name, new, given, False, name in spec.aligned))
        held = tensor_pattern(program, spec, t)
        args.append(TensorArg(t.name, held, dtype, True, t.name in spec.aligned))
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


def vector(name: str) -> TensorArg:
    """A dense int32 vector."""
    return TensorArg(name, parse("i"), "i32", False, False)


def block_table() -> TensorArg:
    """int32 ``[B, most pages]``: which page holds the i-th rows of a sequence."""
    return TensorArg("block_table", parse("B i"), "i32", False, False)


def page_size(spec: Spec) -> int:
    """Rows of a page, 0 where no history lies in pages."""
    return spec.size(PAGE) if spec.pages else 0
