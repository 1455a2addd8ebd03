"""Prints the pieces of the warp-specialised state pass in CuTe-DSL.

The lines are those of the Triton kernel, as for Gluon, translated to scalar code of one thread
(:mod:`attncc.codegen.emit.cutedsl`). A thread of a multiplying warpgroup holds two columns of the
state, eight apart, as rows of its products; of each the elements 8 i + 2 (lane % 4) of the active
axis, of a chunk's rows or of its tokens, and the one after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attncc.codegen.affine_checks import shared_gain
from attncc.codegen.emit.affine import line_positions, summary_of, taken
from attncc.codegen.emit.cutedsl import Scalars
from attncc.codegen.emit.cutedsl_state_maps import StateMap, StateRoom, maps_of, out_of, room_of
from attncc.codegen.emit.cutedsl_types import (
    ELEMENT_TYPES,
    NUMBERS,
    Function,
    Known,
    Step,
    Stored,
    host_type,
    listed,
    plain,
    wrapped,
)
from attncc.codegen.emit.gluon_places import placed_of
from attncc.codegen.emit.rows import ROW, TOKEN, Places, at, printer_of
from attncc.codegen.emit.scan import load_initial, store_final
from attncc.codegen.emit.segments import kept_at, tile_size
from attncc.codegen.emit.softmax_rows import Texts
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.plan_affine import ROWS, Part
from attncc.codegen.plan_cutedsl_state import MAP_BYTES, CuteStatePlan
from attncc.codegen.plan_gluon_state import COLUMNS
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime

_V, _K, _C = (frozenset({d}) for d in "vkc")


@dataclass(frozen=True, slots=True)
class CuteRead:
    """One read-out of ``cutedsl/affine_state.py.jinja``.

    Attributes:
        name: its name.
        vector: what the ring with its vector is called.
        mix: the ring with what the chunk's rows add to it.
        prefix: where the decays since the chunk's start lie among the rows' numbers; -1 for none.
        waits: products that may still be on their way when its first part is used.
        waits_last: the same when it is complete.
    """

    name: str
    vector: str
    mix: str
    prefix: int
    waits: int
    waits_last: int


@dataclass(frozen=True, slots=True)
class CuteStateCode:
    """Printed pieces of the state pass; positions are those among the rows' numbers, -1 for none.

    Attributes:
        summary: what the header says of the table.
        dtype: element type of the operands.
        element_type: the same, as tensor maps number it.
        given: the parameters' names, in lines.
        typed: the same with their types.
        index: which columns of which system a program carries over which chunks.
        placed: the names that ``index`` makes, in lines.
        maps: what is copied of a chunk.
        out_map: where the output goes; None in a summary.
        room: shared memory.
        chunk_bytes: what the copies of one chunk bring.
        line_at: where the rows' numbers of chunk ``step`` lie; "" for none.
        line_bytes: theirs.
        height: size of the active axis.
        columns: columns of one warpgroup.
        rows: rows of a chunk.
        block_tokens: tokens of a block of 16 rows; 16 where a token has one row.
        key: name of the active axis.
        value: name of the passive axis.
        a: the ring with the rows' vectors as they are written.
        b: the ring with those as they read the state; "" for none.
        const: there are constants.
        decayed: something decays.
        row_prefix: position of the decays up to the rows' read, or all it is multiplied by.
        row_scale: of the factor of a row's constants.
        gain: what row ``j``'s read is multiplied by; "" for 1.
        suffix: of the decays to the chunk's end.
        total_at: where the total decay of chunk ``nth`` lies, in global memory.
        read_codes: the read-outs.
        reads: their number.
        first: the state before the first token, an element; None for zeros.
        out: the output's value.
        paired_places: places of the output, by pairs of a thread.
        last: the stores of the state after the last token.
        stored: of an element.
        kept_store: the store of the product of all decays; None for none.
        scratch_bytes: global scratch of a program.
        warps: of a program.
        zeroed: places that no copy fills are zeros.
    """

    summary: Texts
    dtype: str
    element_type: int
    given: Texts
    typed: Texts
    index: Texts
    placed: Texts
    maps: tuple[StateMap, ...]
    out_map: StateMap | None
    room: StateRoom
    chunk_bytes: int
    line_at: str
    line_bytes: int
    height: int
    columns: int
    rows: int
    block_tokens: int
    key: str
    value: str
    a: str
    b: str
    const: bool
    decayed: bool
    row_prefix: int
    row_scale: int
    gain: str
    suffix: int
    total_at: str
    read_codes: tuple[CuteRead, ...]
    reads: int
    first: Function | None
    out: Function
    last: Function
    stored: Stored
    kept_store: Stored | None
    scratch_bytes: int
    warps: int
    zeroed: bool


def cute_state_code(plan: CuteStatePlan) -> CuteStateCode:
    """Print the state pass.

    Raises:
        RefusedError: an expression has no text in CuTe-DSL.
    """
    form, shown = plan.form, plan.part is not Part.SUMMARY
    known, index, placed = _placed(plan)
    printer = printer_of(plan)
    first = _first(plan, printer, dict(known))
    out = _output(plan, printer, dict(known)) if shown else Function((), (), (), ())
    last, stored = _last(plan, printer, dict(known))
    maps, room = maps_of(plan, known), room_of(plan)
    positions, total = line_positions(plan)
    coef, prefix = shared_gain(form) or (1.0, "")
    line = f"lines_ptr + (first_system + step * systems) * {plan.line_stride}"
    lines = Scalars(known | {"step": Known("i32"), "nth": Known("i32")}, {})
    outs = 1 if shown else 0
    return CuteStateCode(
        summary=summary_of(plan), dtype=NUMBERS[plan.storage],
        element_type=ELEMENT_TYPES[plan.storage], given=wrapped(p.name for p in plan.parameters),
        typed=wrapped(f"{p.name}: {host_type(p.type)}" for p in plan.parameters),
        index=index, placed=wrapped(placed), maps=maps,
        out_map=out_of(plan, known) if shown else None, room=room,
        chunk_bytes=sum(m.bytes for m in maps) + 4 * plan.line_stride,
        line_at=lines.address(line) if plan.line_stride else "", line_bytes=4 * plan.line_stride,
        height=plan.axis(form.active[0]).block, columns=COLUMNS, rows=ROWS,
        block_tokens=plan.block_tokens, key=form.active[0], value=plan.blocked,
        a=room.name_of(plan.a), b=room.name_of(plan.b), const=bool(plan.const),
        decayed=bool(form.decays),
        row_prefix=positions.get(f"prefix_{prefix}" if prefix else "gain", -1),
        row_scale=positions.get("scale", -1), gain=_gain(plan, coef, prefix),
        suffix=positions.get("suffix", -1),
        total_at=lines.address(f"{line.replace('step', 'nth')} + {total}") if form.decays else "",
        read_codes=_reads(plan, room, positions) if shown else (), reads=len(form.reads) * outs,
        first=first, out=out, last=last, stored=stored, kept_store=_kept(plan, known),
        scratch_bytes=MAP_BYTES * (len(maps) + plan.consumers * plan.num_warps * outs),
        warps=plan.num_warps * (plan.consumers + 1), zeroed=plan.zeroed,
    )  # fmt: skip


def _gain(plan: CuteStatePlan, coef: float, prefix: str) -> str:
    """What the read of a row is multiplied by: all of it is known before the read is."""
    if "gain" in plan.lines:
        return "factor[j]" if plan.solve else ""
    parts = [repr(coef)] if coef != 1.0 else []
    parts += ["factor[j]"] if prefix and f"prefix_{prefix}" in plan.lines else []
    parts += ["scale[j]"] if "scale" in plan.lines else []
    return " * ".join(parts) if plan.solve else ""


def _placed(plan: CuteStatePlan) -> tuple[dict[str, Known], Texts, tuple[str, ...]]:
    """What is known of a program's place, and the lines that find it."""
    where = placed_of(plan)
    known = {p.name: Known(p.type) for p in plan.parameters} | {"program": Known("i32")}
    scalars = Scalars(known, {})
    steps = scalars.steps(["at = program", *where.lines[1:]])
    return scalars.known, listed(steps, "", ""), where.names


def _reads(plan: CuteStatePlan, room: StateRoom, positions: dict[str, int]) -> tuple[CuteRead, ...]:
    found, last = [], len(plan.form.reads) - 1
    for i, (read, name) in enumerate(zip(plan.form.reads, plan.vectors, strict=True)):
        own = len(plan.form.rows) > 1 or name not in (plan.a, plan.b)
        vector = room.name_of(f"read {name}" if own else name)
        prefix = positions.get(f"prefix_{read.name}", -1)
        mix = room.name_of(f"mix {read.name}")
        found.append(CuteRead(read.name, vector, mix, prefix, last - i + plan.solve, last - i))
    return tuple(found)


# --- the state before the first token, and after the last ----------------------------------------


def _state_dims(plan: CuteStatePlan) -> dict[str, Known]:
    return {
        f"at_{plan.form.active[0]}": Known("i32", _K), f"at_{plan.blocked}": Known("i32", _V),
        "block": Known("i32"), "own_column": Known("i32", _V), "state": Known("fp32", _V | _K),
    }  # fmt: skip


def _in_tile(plan: CuteStatePlan, base: str) -> str:
    """Where an element lies in a tile of a summary or a start."""
    return f"{base} + at_{plan.form.active[0]} * {COLUMNS} + own_column"


def _without_barriers(lines: Iterable[str]) -> list[str]:
    """A thread writes only what it has read, so no barrier is needed."""
    return [line for line in lines if not line.strip().startswith("tl.debug_barrier()")]


def _first(plan: CuteStatePlan, printer: Printer, known: dict[str, Known]) -> Function | None:
    k, v = plan.form.active[0], plan.axis(plan.blocked)
    if plan.part is Part.LOCAL:
        tile = f"starts_ptr + (unit * {v.blocks} + block) * {tile_size(plan)}"
        lines = [f"x = tl.load({_in_tile(plan, tile)})"]
    elif plan.part is Part.SUMMARY and plan.column_blocks > v.blocks:
        lines = [f"x = tl.where(at_{k} == at_{v.axis} - {v.blocks * COLUMNS}, 1.0, 0.0)"]
    elif plan.part is Part.SUMMARY or plan.form.state not in plan.given:
        return None
    else:
        value = load_initial(printer, plan, plan.form.state)
        lines = [*_without_barriers(taken(printer)), f"x = {value.text}"]
    steps = Scalars(known | _state_dims(plan), {"v": "r"}).steps(lines)
    return _function(steps, {*known})


def _last(
    plan: CuteStatePlan, printer: Printer, known: dict[str, Known]
) -> tuple[Function, Stored]:
    if plan.part is Part.SUMMARY:
        tile = f"summaries_ptr + (unit * {plan.column_blocks} + block) * {tile_size(plan)}"
        lines = [f"tl.store({_in_tile(plan, tile)}, state)"]
    else:
        store_final(printer, plan, plan.form.state, Var("state", printer.order(("k", "v"))))
        lines = _without_barriers(taken(printer))
    scalars = Scalars(known | _state_dims(plan), {"v": "r"})
    steps = scalars.steps(lines)
    [store] = scalars.stores.values()
    seen = store.mask
    if plan.part is Part.LOCAL:
        seen = f"({seen}) & (segment == segments - 1)"
    used = {n for s in steps for n in s.used}
    if plan.part is Part.LOCAL:
        used |= {"segment", "segments"}
    found = _function([s for s in steps if s.name], {*known}, used)
    return found, Stored(NUMBERS[store.type], store.address, store.value, seen)


def _kept(plan: CuteStatePlan, known: dict[str, Known]) -> Stored | None:
    """Where a summary leaves an A that is a number."""
    if plan.part is not Part.SUMMARY or not plan.form.decays or plan.solve:
        return None
    scalars = Scalars(known | {"kept": Known("fp32"), "block": Known("i32")}, {})
    scalars.steps([f"tl.store({kept_at(plan)}, kept, mask=block == 0)"])
    [store] = scalars.stores.values()
    return Stored(NUMBERS[store.type], store.address, store.value, store.mask)


def _function(steps: Sequence[Step], given: set[str], used: set[str] | None = None) -> Function:
    """Statements over the elements of a tile; what varies along both, or neither, is inside."""
    used = {n for s in steps for n in s.used} if used is None else used
    rows = [s for s in steps if s.known.dims <= _V]
    outer = [s for s in steps if s.known.dims == _K]
    inner = [s for s in steps if s.known.dims > _V]
    names = sorted((used & given) - {s.name for s in steps})
    return Function(wrapped(names), listed(rows, "r", "(0, 1)"), plain(outer), plain(inner))


# --- what leaves ---------------------------------------------------------------------------------


def _output(plan: CuteStatePlan, printer: Printer, known: dict[str, Known]) -> Function:
    """The output of a token and two columns, over the read-outs."""
    places: Places = ROW if len(plan.form.rows) == 1 else TOKEN
    names = {r.name for r in plan.form.reads}
    scope = at(plan, printer, places)
    for node in walk(*plan.form.outputs):
        if isinstance(node, Input) and node.lifetime is Lifetime.WORKSPACE and node.name in names:
            scope.printer.known[node] = Var(node.name, scope.printer.order((places.dim, "v")))
    value = scope.value(plan.form.outputs[0])
    text = scope.printer.lift(value, scope.printer.order((places.dim, "v")))
    own = {"place": Known("i32", _C), "step": Known("i32")}
    own |= {name: Known("fp32", _V | _C) for name in names}
    lines = [
        f"{places.dim} = place",
        f"{places.token} = step * {plan.tokens} + place",
        f"{places.inner} = place",
        f"{places.valid} = {places.token} < length",
        f"chunk_row = first_row + step * {plan.tokens}",
        *taken(printer),
        f"x = {text}",
    ]
    scalars = Scalars(known | own, {"v": "r"})
    steps = scalars.steps(lines)
    used = {n for s in steps for n in s.used}
    made = {s.name for s in steps}
    given = sorted((used & {*known}) - made)
    return Function(
        wrapped(given), plain(s for s in steps if not s.known.dims),
        plain(s for s in steps if s.known.dims == _C),
        plain(s for s in steps if s.known.dims > _C or s.known.dims == _V),
    )  # fmt: skip
