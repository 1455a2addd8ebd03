"""Prints the pieces of the warp-specialised state pass, from the printers of the Triton kernel.

The loading warp needs tensor maps: each holds one sequence of one system, so rows behind its end
arrive as zeros and outputs behind it are dropped. The multiplying warpgroups need the state before
the first token, the factors of each row, the outputs, and where the last state goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from attncc.codegen.affine_checks import shared_gain
from attncc.codegen.emit.affine import line_positions, summary_of, taken
from attncc.codegen.emit.gluon import IMPORTS, SIGMOID, TYPES, gluon_lines, gluon_text
from attncc.codegen.emit.gluon_loads import Loads, loads_of
from attncc.codegen.emit.gluon_places import placed_of
from attncc.codegen.emit.gluon_rings import Ring, out_map, rings_of
from attncc.codegen.emit.rows import ROW, TOKEN, Places, at, printer_of
from attncc.codegen.emit.scan import load_initial, store_final
from attncc.codegen.emit.segments import kept_at, start_at, tile_size
from attncc.codegen.emit.triton import Printer, Var
from attncc.codegen.plan_affine import ROWS, Part
from attncc.codegen.plan_gluon_mixing import DECAY, MIXED
from attncc.codegen.plan_gluon_state import COLUMNS, WarpStatePlan, out_type, shown_const
from attncc.dsl.graph import walk
from attncc.dsl.ir import Input, Lifetime

Texts = tuple[str, ...]
STATE_DIMS = ("STATE_COLUMNS", "STATE_ROWS")
PLACES = "PLACES"
TURNED = ".permute((1, 0))"
TILES = ("state_handed", "rows_handed")
HANDED = ("state_ready", "state_taken", "rows_ready", "rows_taken")
"""What a warpgroup and the one that makes its outputs share: memory, and its barriers."""
MIXING = ("mixed_ring", "mixed_full", "mixed_free")
"""What that one and the mixing warpgroup share."""


@dataclass(frozen=True, slots=True)
class WarpRead:
    """One read-out of ``gluon/affine_state.py.jinja``.

    Attributes:
        name: its name.
        vector: the ring with its vector.
        mix: the ring with what the chunk's rows add to it; "" where a warpgroup makes it.
        prefix: the ring with the decays since the chunk's start; "" where nothing decays.
        waits: products that may still be on their way when its first part is used.
        waits_last: the same when it is complete.
    """

    name: str
    vector: str
    mix: str
    prefix: str
    waits: int
    waits_last: int


@dataclass(frozen=True, slots=True)
class WarpStateCode:
    """Printed pieces of the warp-specialised state pass.

    Attributes:
        summary: what the header says of the table.
        imports: the language.
        helpers: functions that Gluon lacks.
        dtype: element type of the operands.
        out_dtype: of the output.
        given: the parameters' names, in lines.
        index: which columns of which system a program carries over which chunks.
        placed: the names that ``index`` makes, in lines.
        rings: what is loaded of a chunk, and by which maps.
        ring_names: of the shared memory that partitions get, in lines.
        loads: what each loading warp brings; making a map takes long, so warps share that.
        height: size of the active axis.
        columns: columns of one warpgroup.
        rows: rows of a chunk.
        key: name of the active axis.
        value: name of the passive axis.
        a: the ring with the rows' vectors as they are written.
        b: the ring with those as they read the state.
        const: the ring with the rows' constants; "" for none.
        decayed: something decays.
        row_prefix: the ring with the decays up to the rows' read, or all that it is multiplied by.
        row_scale: the ring with the factor of a row's constants; "" for none.
        scale_last: the factor is applied to the read too.
        row_coef: a number that all rows' reads are multiplied by.
        suffix: the ring with the decays to the chunk's end; "" where nothing decays.
        total_first: where the first chunk's total decay lies.
        total_second: where the second one's does.
        total_next: where the next chunk's does; the last one's behind it.
        total_later: where that of the chunk after the next does; the last one's behind it.
        read_codes: the read-outs.
        reads: products with them that a multiplying warpgroup has on their way.
        place_dim: the dimension of a chunk's tokens.
        shows_const: the output needs the rows' constants, as ``shown``.
        load: lines that make the state before the first token.
        out_lines: lines that the output needs.
        out: the output's value, ``[v, places]``.
        out_map: where it goes; None in a summary.
        of_rows: how a place with the rows' vectors becomes a matrix; "" where it is one.
        of_const: the same of the rows' constants.
        of_reads: the same of the read-outs' vectors.
        of_out: the same of an output on its way.
        tails: the last chunk has maps of its own.
        turned: how an inverse becomes the right operand of a product.
        turned_mix: how what rows add to a read-out becomes one.
        leaves_early: an output is stored beside the next chunk's first products, which needs fewer
            registers; else beside the last ones, which take nothing else to wait for.
        crowded: of three warpgroups a thread has few registers: factors come behind the products.
        first_place: lines that say where a chunk's tokens lie.
        finish: lines behind the loop.
        handed: the barriers between a warpgroup and the one that makes its outputs.
        mixed: places of what the mixing warpgroup makes.
        decay: the ring with each token's decay, for that; "" where nothing decays.
        lane_places: tokens that a lane multiplies decays of, in turn.
        users: warpgroups that use a chunk's places.
        counts_decay: the product of all decays is kept beside the state.
        worker_warps: warps of the further partitions.
        worker_registers: registers a thread of each of them.
    """

    summary: Texts
    imports: Texts
    helpers: Texts
    dtype: str
    out_dtype: str
    given: Texts
    index: Texts
    placed: Texts
    rings: tuple[Ring, ...]
    ring_names: Texts
    loads: tuple[Loads, ...]
    height: int
    columns: int
    rows: int
    key: str
    value: str
    a: str
    b: str
    const: str
    decayed: bool
    row_prefix: str
    row_scale: str
    scale_last: bool
    row_coef: str
    suffix: str
    total_first: str
    total_second: str
    total_next: str
    total_later: str
    read_codes: tuple[WarpRead, ...]
    reads: int
    place_dim: str
    shows_const: bool
    load: Texts
    out_lines: Texts
    out: str
    out_map: Ring | None
    of_rows: str
    of_const: str
    of_reads: str
    of_out: str
    tails: bool
    turned: str
    turned_mix: str
    leaves_early: bool
    crowded: bool
    first_place: Texts
    finish: Texts
    handed: Texts
    mixed: int
    decay: str
    lane_places: int
    users: int
    counts_decay: bool
    worker_warps: str
    worker_registers: str


def warp_state_code(plan: WarpStatePlan) -> WarpStateCode:
    """Print the warp-specialised state pass.

    Raises:
        RefusedError: an expression has no text in Gluon.
    """
    form, shown = plan.form, plan.part is not Part.SUMMARY
    printer, where = printer_of(plan), placed_of(plan)
    rings = rings_of(plan)
    names = {r.role: r.name for r in rings} | {role: r.name for r in rings for role in r.also}
    load = _initial(plan, printer)
    out_lines, out = _output(plan, printer) if shown else ((), "")
    finish = _finish(plan, printer)
    coef, prefix = shared_gain(form) or (1.0, "")
    _, total_at = line_positions(plan)
    decayed = bool(form.decays)
    total = f"lines_ptr + (first_system + {{}} * systems) * {plan.line_stride} + {total_at}"
    others = plan.consumers - 1 + plan.reader + plan.mixing
    held = [f"{r.name}_ring" for r in rings] + (["out_tiles"] if shown else [])
    goes = out_map(plan) if shown else None
    held += [*TILES, *HANDED] if plan.reader else []
    held += MIXING if plan.mixing else []
    printed = "\n".join((*out_lines, *load, *finish))
    return WarpStateCode(
        summary=summary_of(plan), imports=IMPORTS,
        helpers=SIGMOID if "sigmoid(" in printed else (), dtype=TYPES[plan.storage],
        out_dtype=TYPES[out_type(plan)],
        given=_wrapped([p.name for p in plan.parameters]), index=where.lines,
        placed=_wrapped(where.names), rings=rings, ring_names=_wrapped([*held, "full", "free"]),
        loads=loads_of(plan, rings),
        height=plan.axis(form.active[0]).block, columns=COLUMNS, rows=ROWS, key=form.active[0],
        value=plan.blocked, a=names["a"], b=names.get("b", ""), const=names.get("const", ""),
        decayed=decayed, row_prefix=names.get(f"row_prefix_{prefix}" if prefix else "gain", ""),
        row_scale=names.get("scale", ""), scale_last="gain" not in plan.lines,
        row_coef=repr(coef), suffix=names.get("suffix", ""),
        total_first=total.format("begin"), total_second=total.format("(begin + 1)"),
        total_next=total.format("gl.minimum(step + 1, end - 1)"),
        total_later=total.format("gl.minimum(step + 2, end - 1)"),
        read_codes=_reads(plan, names) if shown else (),
        reads=len(form.reads) * (shown and not plan.reader),
        place_dim=_places(plan).dim, shows_const=shown and bool(shown_const(plan)),
        load=load, out_lines=out_lines, out=out, out_map=goes,
        of_rows=_as_matrix(rings[0]), of_reads=_of_reads(plan, rings),
        of_out=_as_matrix(goes),
        of_const=_as_matrix(next((r for r in rings if r.role == "const"), None)),
        tails=any(r is not None and r.tail_base for r in (*rings, goes)),
        turned="" if plan.columnwise else TURNED,
        turned_mix="" if plan.columnwise and not plan.gathered else TURNED,
        leaves_early=shown and plan.consumers > 1 and not plan.reader,
        crowded=plan.consumers > 2, first_place=_first_place(plan), finish=finish,
        handed=HANDED, mixed=MIXED, decay=names.get(DECAY, ""),
        lane_places=plan.places // 2,
        users=plan.consumers + plan.reader + plan.mixing,
        counts_decay=plan.part is Part.SUMMARY and decayed and not plan.solve,
        worker_warps=", ".join(others * [str(plan.num_warps)] + plan.loaders * ["1"]),
        worker_registers=", ".join(map(str, _registers(plan))),
    )  # fmt: skip


def _registers(plan: WarpStatePlan) -> list[int]:
    """Of the threads of each partition but the first."""
    others = plan.consumers - 1 + plan.reader + plan.mixing
    return others * [plan.consumer_registers] + plan.loaders * [plan.producer_registers]


def _reads(plan: WarpStatePlan, names: dict[str, str]) -> tuple[WarpRead, ...]:
    found, last = [], len(plan.form.reads) - 1
    for i, read in enumerate(plan.form.reads):
        prefix = names.get(f"prefix_{read.name}", "")
        held = names[f"vector_{read.name}"], names.get(f"mix_{read.name}", "")
        found.append(WarpRead(read.name, *held, prefix, last - i + plan.solve, last - i))
    return tuple(found)


def _of_reads(plan: WarpStatePlan, rings: tuple[Ring, ...]) -> str:
    """How a place with a read-out's vectors becomes a matrix; all of them lie alike."""
    first = f"vector_{plan.form.reads[0].name}" if plan.each and plan.form.reads else ""
    return _as_matrix(next((r for r in rings if first in (r.role, *r.also)), None))


def _as_matrix(ring: Ring | None) -> str:
    """How a place becomes a matrix where chunks are an axis of its map."""
    return f".reshape([{ring.view}])" if ring is not None and ring.box.count(",") > 1 else ""


def _wrapped(names: list[str] | Texts) -> Texts:
    return tuple(wrap(", ".join(names) + ",", 88))


def _in_state(lines: Texts) -> Texts:
    """Lines about the state; a thread writes only what it has read, so no barrier is needed."""
    kept = (line for line in lines if not line.strip().startswith("tl.debug_barrier()"))
    return gluon_lines(list(kept), STATE_DIMS[1])


def _initial(plan: WarpStatePlan, printer: Printer) -> Texts:
    """The state that a warpgroup starts with, ``[v, k]``."""
    k, v = plan.form.active[0], plan.axis(plan.blocked)
    if plan.part is Part.LOCAL:
        return (*_place(plan), f"state = gl.load({start_at(plan)} + place)")
    zeros = f"state = gl.zeros([{COLUMNS}, {plan.axis(k).block}], gl.float32, layout=STATE)"
    if plan.part is Part.SUMMARY and plan.column_blocks > v.blocks:
        identity = f"at_{k}[None, :] == (at_{v.axis} - {v.blocks * COLUMNS})[:, None]"
        return (zeros, f"state = gl.where({identity}, 1.0, state)")
    if plan.part is Part.SUMMARY or plan.form.state not in plan.given:
        return (zeros,)
    value = load_initial(printer, plan, plan.form.state)
    lines = _in_state(taken(printer))
    return (*lines, f"state = {value.text}")


def _place(plan: WarpStatePlan) -> Texts:
    """Where an element lies within a tile of a summary or a start."""
    columns = f"gl.arange(0, {COLUMNS}, layout=STATE_ROWS)"
    return (f"place = at_{plan.form.active[0]}[None, :] * {COLUMNS} + {columns}[:, None]",)


def _places(plan: WarpStatePlan) -> Places:
    return ROW if len(plan.form.rows) == 1 else TOKEN


def _first_place(plan: WarpStatePlan) -> Texts:
    """Where the tokens of chunk ``step`` lie; without places left over."""
    places = _places(plan)
    return (
        f"{places.token} = step * {plan.tokens} + {places.dim}",
        f"{places.inner} = {places.dim}",
        f"{places.valid} = {places.token} < length",
        f"chunk_row = first_row + step * {plan.tokens}",
    )


def _output(plan: WarpStatePlan, printer: Printer) -> tuple[Texts, str]:
    """The output over the read-outs that the skeleton holds in variables."""
    places, names = _places(plan), {r.name for r in plan.form.reads}
    scope = at(plan, printer, places)
    order, const = scope.printer.order((places.dim, "v")), shown_const(plan)
    for node in walk(*plan.form.outputs):
        if isinstance(node, Input) and node.lifetime is Lifetime.WORKSPACE and node.name in names:
            scope.printer.known[node] = Var(node.name, order)
        elif isinstance(node, Input) and node.name == const:
            scope.printer.known[node] = Var("shown", order)
    value = scope.value(plan.form.outputs[0])
    text = scope.printer.lift(value, scope.printer.order((places.dim, "v")))
    return gluon_lines(taken(printer), PLACES), gluon_text(text, PLACES)


def _finish(plan: WarpStatePlan, printer: Printer) -> Texts:
    """Store the state after the last token, or what a summary has found."""
    if plan.part is Part.SUMMARY:
        at_tile = f"(unit * {plan.column_blocks} + block) * {tile_size(plan)}"
        lines = (*_place(plan), f"gl.store(summaries_ptr + {at_tile} + place, state)")
        if plan.form.decays and not plan.solve:
            key = f"at_{plan.form.active[0]}"
            kept = kept_at(plan).replace(key, f"{key}[None, :]")  # as it is multiplied
            if plan.totals:
                kept = f"{kept} + gl.full([1, 1], 0, gl.int32, layout=STATE)"
            lines = (*lines, f"gl.store({kept}, kept, mask=block == 0)")
        return lines
    if plan.part is Part.LEAD:
        return (*_place(plan), f"gl.store({start_at(plan)} + place, state)")
    store_final(printer, plan, plan.form.state, Var("state", printer.order(("k", "v"))))
    lines = _in_state(taken(printer))
    if plan.part is Part.LOCAL:
        return ("if segment == segments - 1:", *(f"    {line}" for line in lines))
    return lines
