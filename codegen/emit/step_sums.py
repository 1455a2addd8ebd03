"""A step's first sums in one reduction, and vectors that each thread loads as it needs them."""

from __future__ import annotations

from collections.abc import Iterable

from attncc.codegen.emit.functions import wrap
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_scan import StepPlan
from attncc.codegen.terms import depends_on_state
from attncc.dsl.graph import walk
from attncc.dsl.ir import Contract, Node, Reduce

OWN_LOADS = (
    "INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)",
    "",
    "",
    "@triton.jit",
    "def each_its_own(at):",
    '    """Numbers of 16 bits, each loaded by every thread that needs it: nobody hands one on."""',
    "    if INTERPRETED:  # without assembly",
    "        return tl.load(at)",
    "    return tl.inline_asm_elementwise(",
    '        "ld.global.b16 $0, [$1];", "=h,l", [at.to(tl.int64)], dtype=at.dtype.element_ty,',
    "        is_pure=True, pack=1,",
    "    )",
    "",
    "",
)
"""A plain load has a layout of its own, from which its numbers go through shared memory to the
threads that need them: two barriers a vector. Assembly takes whatever layout is asked for."""


def together(count: int) -> tuple[str, ...]:
    """The function that adds ``count`` pairs of numbers."""
    own, other = ([f"{side}{i}" for i in range(count)] for side in "ab")
    sums = ", ".join(f"{a} + {b}" for a, b in zip(own, other, strict=True))
    return (
        "@triton.jit",
        f"def together({', '.join((*own, *other))}):",
        f"    return {sums}",
        "",
        "",
    )


def load_own(printer: Printer, arg: TensorArg) -> Var | None:
    """Load a vector of 16-bit numbers as it is stored, each thread its own; None for what is none.

    A load that is guarded or has no tile dimension is a plain one.
    """
    off, guards = printer.offset(arg)
    if guards or not off.dims:
        return None
    text = f"each_its_own({arg.pointer} + {printer.lift(off, off.dims)})"
    return printer.name(text, off.dims, f"{arg.name}_")


def first_sums(plan: StepPlan, printer: Printer) -> list[Contract]:
    """The sums over one axis of the tile that need no other sum over the tile; in order of use."""
    tile = {t.axis for t in plan.tile}
    found: dict[tuple[str, ...], list[Contract]] = {}
    for node in walk(*plan.body.roots):
        if isinstance(node, Contract) and len(node.over) == 1 and tile >= {*node.over}:
            place = printer.places[node.over[0]]
            if place.valid is None and not _sums(node.args, tile):
                found.setdefault(node.over, []).append(node)
    groups = [g for g in found.values() if len(g) > 1 and any(map(depends_on_state, g))]
    return groups[0] if groups else []


def _sums(nodes: Iterable[Node], tile: set[str]) -> bool:
    """Whether any of these values, or what is below, is a sum over the tile."""
    below = walk(*nodes)
    return any(isinstance(n, (Contract, Reduce)) and tile & {*n.over} for n in below)


def emit_together(plan: StepPlan, printer: Printer, sums: list[Contract]) -> None:
    """Print sums as one reduction; each is known then."""
    [axis] = sums[0].over
    values = [[printer.emit(a) for a in s.args] for s in sums]
    dims = printer.order(*(v.dims for each in values for v in each))
    shape = ", ".join(str(plan.axis(d).block) for d in dims)
    texts = []
    for each in values:
        own = printer.order(*(v.dims for v in each))
        text = " * ".join(wrap(printer.lift(v, own)) for v in each)
        product = printer.name(text, own)
        lifted = printer.lift(product, dims)
        texts.append(lifted if own == dims else f"tl.broadcast_to({lifted}, [{shape}])")
    [dim] = printer.places[axis].index.dims
    left = tuple(d for d in dims if d != dim)
    names = [f"sum{i}" for i in range(len(sums))]
    printer.lines.append(
        f"{', '.join(names)} = tl.reduce(({', '.join(texts)}), {dims.index(dim)}, together)"
    )
    for node, name in zip(sums, names, strict=True):
        printer.known[node] = Var(name, left)
