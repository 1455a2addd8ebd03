"""Triton text of element-wise scans over many tokens."""

from __future__ import annotations

from dataclasses import dataclass

from attncc.codegen.affine_plans import Part
from attncc.codegen.emit.scan import (
    grid_parts,
    load_initial,
    sizes_of,
    slot_lines,
    split_program_id,
    tile_lines,
)
from attncc.codegen.emit.step import printed, printer_of
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.plan_running import RunningPlan
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Node

A, B = "through", "added"
"""Variables of a segment's (a, b)."""


@dataclass(frozen=True, slots=True)
class RunningCode:
    """Printed pieces of ``scan_running.py.jinja``."""

    summary: tuple[str, ...]
    index: tuple[str, ...]
    load: tuple[str, ...]
    body: tuple[str, ...]
    finish: tuple[str, ...]


def emit(plan: RunningPlan) -> RunningCode:
    """Print a plan's expressions."""
    printer = printer_of(plan, exact=plan.exact)
    if plan.part is Part.SUMMARY:
        return _summary(plan, printer)
    code = printed(plan, printer)
    load, finish = code.load, code.finish
    if plan.part is Part.LOCAL:
        load = (*load, *_composed(plan))
        finish = ("if segment == segments - 1:", *(f"    {line}" for line in finish))
    return RunningCode(said_of(plan), tuple(index_of(plan)), load, code.body, finish)


def said_of(plan: RunningPlan) -> tuple[str, ...]:
    """What the header says of a program."""
    block = plan.axis(plan.blocked)
    what = {
        Part.WHOLE: "Whole sequences.",
        Part.SUMMARY: "The (a, b) of s' = a s + b of each segment.",
        Part.LOCAL: "Each segment, from the state before it.",
    }[plan.part]
    axes = "".join(f", {a}" for a in plan.grid_axes)
    cut = "" if plan.part is Part.WHOLE else ", segment"
    each = f"One program per sequence{cut}{axes} and block of {block.block} {plan.blocked}."
    return (what, each)


def index_of(plan: RunningPlan) -> list[str]:
    """Which columns of which sequence a program works on, and which tokens."""
    parts = grid_parts(plan, plan.grid_axes)
    if (blocks := plan.axis(plan.blocked).blocks) > 1:
        parts.insert(0, ("block", str(blocks)))
    if plan.part is not Part.WHOLE:
        parts.append(("segment", "segments"))
    lines = [*split_program_id(parts, "sequence"), *tile_lines(plan)]
    if plan.packed:
        lines.append("first = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)")
        lines.append("length = (tl.load(cu_seqlens_ptr + sequence + 1) - first).to(tl.int32)")
    else:
        lines += ["first = tl.full((), 0, tl.int64)", "length = tokens"]
    return [*lines, *_slots(plan), *_tokens(plan)]


def _slots(plan: RunningPlan) -> list[str]:
    """Slots of pools: a summary reads them, the last segment writes."""
    lines = slot_lines(plan)
    unused = {Part.WHOLE: "", Part.SUMMARY: "_out_slots_ptr", Part.LOCAL: "_slots_ptr"}[plan.part]
    names = [f"{n}{unused}" for n in plan.pooled] if unused else []
    return [line for line in lines if not any(f"({name} " in line for name in names)]


def _tokens(plan: RunningPlan) -> list[str]:
    """The tokens of a program; segments are whole groups, and the first ones have them all."""
    if plan.part is Part.WHOLE:
        return ["begin = 0", "end = length"]
    return [
        f"each = tl.cdiv(tl.cdiv(length, segments), {plan.group}) * {plan.group}",
        "begin = tl.minimum(segment * each, length)",
        "end = tl.minimum(begin + each, length)",
    ]


def _points(plan: RunningPlan) -> str:
    """Programs of one segment of a sequence."""
    sizes = sizes_of(plan)
    counts = [sizes[a] for a in plan.grid_axes]
    return " * ".join([str(plan.axis(plan.blocked).blocks), *counts])


def _composed(plan: RunningPlan) -> tuple[str, ...]:
    """Lines that make the state before a segment from the summaries of those before it, in order.

    Of the first segment the summary is the state before it and the one after it. A state of 0
    stays what is added, also where a product of decays has passed fp32's largest number.
    """
    width = plan.axis(plan.blocked).block
    name = f"{plan.form.state}_now"
    at = f"summaries_ptr + (unit - segment * points + {{}}) * {2 * width} + tl.arange(0, {width})"
    first = at.format("0")
    return (
        f"points = {_points(plan)}",
        "unit = tl.program_id(0).to(tl.int64)",
        f"{name} = tl.load({first} + tl.where(segment > 0, {width}, 0))",
        "for before in range(1, tl.minimum(segment, tl.cdiv(length, tl.maximum(each, 1)))):",
        f"    {A} = tl.load({at.format('before * points')})",
        f"    {B} = tl.load({at.format('before * points')} + {width})",
        f"    {name} = tl.where({name} == 0.0, {B}, {A} * {name} + {B})",
    )


def _summary(plan: RunningPlan, printer: Printer) -> RunningCode:
    form, dims = plan.form, (plan.blocked,)
    width = plan.axis(plan.blocked).block
    zeros = f"tl.zeros([{width}], tl.float32)"
    start = load_initial(printer, plan, form.state).text if form.state in plan.given else zeros
    printer.lines += [
        f"start = {start}",
        f"{B} = tl.where(segment == 0, start, 0.0)",
        f"{A} = tl.full([{width}], 1.0, tl.float32)",
        "end = tl.where(segment == segments - 1, begin, end)  # nobody asks for the last one",
    ]
    scan = plan.program.scan
    for node in walk(*(n for n in (form.decay, form.add) if n is not None)):
        if not isinstance(node, Input) or node.name not in printer.tensors:
            continue
        if scan not in printer.tensors[node.name].pattern.axes:
            printer.emit(node)
    load = tuple(printer.lines)
    printer.lines.clear()
    body = _advanced(printer, form.decay, form.add, dims)
    at = f"summaries_ptr + tl.program_id(0).to(tl.int64) * {2 * width} + tl.arange(0, {width})"
    finish = (
        f"tl.store({at}, tl.where(segment == 0, start, {A}))",
        f"tl.store({at} + {width}, {B})",
    )
    return RunningCode(said_of(plan), tuple(index_of(plan)), load, body, finish)


def _advanced(
    printer: Printer, decay: Node | None, add: Node | None, dims: tuple[str, ...]
) -> tuple[str, ...]:
    """Lines that take a token into (a, b)."""
    by = Var("") if decay is None else printer.emit(decay)
    more = Var("") if add is None else printer.emit(add)
    lines = list(printer.lines)
    printer.lines.clear()
    factor, term = (printer.lift(v, dims) for v in (by, more))
    lines += [f"{name} = {name} * ({factor})" for name in (A, B) if factor]
    lines += [f"{B} = {B} + ({term})"] if term else []
    return tuple(lines)
