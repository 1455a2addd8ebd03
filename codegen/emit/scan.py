"""Pieces of text that the kernels of the scan family share: grid, places, stores of results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan import ScalarArg, TensorArg
from attncc.codegen.plan_scan import ScanPlan, final_name, initial_name
from attncc.codegen.scan_tiles import TileAxis

ELEMENT = {"fp32": "tl.float32", "bf16": "tl.bfloat16", "fp16": "tl.float16"}
"""Triton's name of an element type."""


def sizes_of(plan: ScanPlan) -> dict[str, str]:
    """Text of each axis' size: a literal where it is compiled in."""
    found = {a: str(n) for a, n in plan.static}
    found |= {t.axis: str(t.size) for t in plan.tile}
    for arg in plan.args:
        if isinstance(arg, ScalarArg) and arg.name.startswith("n_"):
            found.setdefault(arg.name[2:], arg.name)
    return found


def scalars_of(plan: ScanPlan) -> dict[str, str]:
    """Text of host numbers by input name."""
    names = {a.name for a in plan.args if isinstance(a, ScalarArg)}
    return {t.name: f"{t.name}_value" for t in plan.program.tensors if f"{t.name}_value" in names}


def tensors_of(plan: ScanPlan) -> dict[str, TensorArg]:
    """Tensor parameters by name."""
    return {a.name: a for a in plan.args if isinstance(a, TensorArg)}


def split_program_id(parts: Iterable[tuple[str, str]], rest: str) -> list[str]:
    """Lines that take indices off the program id, the fastest first; what is left is ``rest``."""
    lines = ["at = tl.program_id(0)"]
    for name, size in parts:
        if size == "1":
            lines.append(f"{name} = 0")
            continue
        lines += [f"{name} = at % {size}", f"at = at // {size}"]
    return [*lines, f"{rest} = at"]


def tile_place(t: TileAxis, dim: str) -> Place:
    """Where an axis of the tile is found: ``at_<axis>``."""
    index = Var(f"at_{t.axis}", (dim,))
    return Place(index, Var(f"at_{t.axis} < {t.size}", (dim,)) if t.partial else None)


def tile_lines(plan: ScanPlan) -> list[str]:
    """Lines that make the indices along each axis of the tile."""
    lines = []
    for t in plan.tile:
        text = f"tl.arange(0, {t.block})"
        if t.axis == plan.blocked and t.blocks > 1:
            text = f"block * {t.block} + {text}"
        lines.append(f"at_{t.axis} = {text}")
    return lines


def grid_places(plan: ScanPlan) -> dict[str, Place]:
    """Places of the axes that have one program per point."""
    found = {a: Place(Var(f"at_{a}")) for a in plan.grid_axes}
    return {**found, "B": Place(Var("sequence"))}


def slot_lines(plan: ScanPlan) -> list[str]:
    """Lines that find the sequence's slots in its pools; below 0 is no slot. 64-bit from here."""
    lines = []
    for name in plan.pooled:
        lines.append(f"{name}_slot = tl.load({name}_slots_ptr + sequence).to(tl.int64)")
        if name not in plan.token_slots:
            text = f"tl.load({name}_out_slots_ptr + sequence)"
            lines.append(f"{name}_out_slot = {text}.to(tl.int64)")
    return lines


def _slot(name: str) -> Place:
    return Place(Var(name), Var(f"{name} >= 0"))


def load_initial(printer: Printer, plan: ScanPlan, name: str) -> Var:
    """A given state before the first token: a row of its tensor, or a slot (none: zeros)."""
    arg = printer.tensors[initial_name(name)]
    if name not in plan.pooled:
        return printer.load(arg)
    value = printer.child(B=_slot(f"{name}_slot")).load(arg)
    printer.lines.append("tl.debug_barrier()  # the slot may be written once every thread has read")
    return value


def store_final(printer: Printer, plan: ScanPlan, name: str, value: Var) -> None:
    """Store a state after the last token; one with a slot a token is stored by then."""
    arg = printer.tensors[final_name(name)]
    if name not in plan.pooled:
        printer.store(arg, value)
    elif name not in plan.token_slots:
        printer.child(B=_slot(f"{name}_out_slot")).store(arg, value)


def store_token(printer: Printer, plan: ScanPlan, name: str, value: Var) -> None:
    """Store a state after token ``t`` in the token's own slot, if it has one."""
    if name not in plan.token_slots:
        return
    at = f"{name}_out_slots_ptr + sequence * {name}_out_slots_s0 + t"
    inside = f"mask=t < {name}_out_width, other=-1"
    printer.lines.append(f"{name}_out_slot = tl.load({at}, {inside}).to(tl.int64)")
    printer.child(B=_slot(f"{name}_out_slot")).store(printer.tensors[final_name(name)], value)


def grid_parts(plan: ScanPlan, axes: Iterable[str]) -> list[tuple[str, str]]:
    """Index names and sizes of grid axes given outermost first, for :func:`split_program_id`."""
    sizes = sizes_of(plan)
    return [(f"at_{a}", sizes[a]) for a in reversed(tuple(axes))]


def store_results(
    printer: Printer, plan: ScanPlan, values: Mapping[str, Var], also: list[Var] | None = None
) -> None:
    """Store the outputs; where several programs hold the same value, only the first one stores."""
    for out in plan.program.outputs:
        arg = printer.tensors[out.name]
        lacking = [a for a in plan.grid_axes if a not in out.pattern.axes]
        guards = [Var(f"at_{a} == 0") for a in lacking]
        if plan.blocked and plan.blocked not in out.pattern.axes:
            guards += [Var("block == 0")] if plan.axis(plan.blocked).blocks > 1 else []
        printer.tell(out.value)
        printer.store(arg, values[out.name], [*(also or []), *guards])
