"""Triton text of the chunked affine form: what its kernels share.

With S0 the state before a chunk, row i at token t(i), and ``w(j -> i)`` the product of the decays
between row j's write and row i's read:

    L[i, j] = coef_i (b_i . a_j) w(j -> i)   where row i sees row j, else 0
    u       = (I - L)^-1 (const + coef * prefix * (b . S0))
    read_t  = prefix_t (vector_t . S0) + sum_j (vector_t . a_j) w(j -> t) u_j
    S1      = total S0 + sum_j suffix_j a_j (x) u_j

Decays are values, and an interval's product is a cumulative product in which decays outside the
interval are 1: no differences of logarithms and no quotients, so decays of 0 (a gate of -inf) and
negative ones are exact.
"""

from __future__ import annotations

from collections.abc import Iterator

from attncc.codegen.emit.decays import BlockDecays, times
from attncc.codegen.emit.rows import ROW, Places, tokens_of
from attncc.codegen.emit.scan import grid_parts, sizes_of, split_program_id, tile_lines
from attncc.codegen.emit.triton import Printer
from attncc.codegen.plan_affine import BLOCK, ROWS, ChunkPlan, Split, SystemPlan, split_row

BLOCKS = ROWS // BLOCK


def splits(plan: ChunkPlan) -> list[Split]:
    """Every row of the table, split."""
    return [split_row(r, plan.form.passive) for r in plan.form.rows]


def chunk_index(plan: ChunkPlan) -> tuple[str, str]:
    """The index of a system among all systems of a chunk, and their number."""
    return point_index(plan, plan.system_axes)


def point_index(plan: ChunkPlan, axes: tuple[str, ...]) -> tuple[str, str]:
    """The index of a point among all points of some axes, and their number."""
    index, count = "0", "1"
    sizes = sizes_of(plan)
    for a in axes:
        index = f"at_{a}" if index == "0" else f"({index}) * {sizes[a]} + at_{a}"
        count = sizes[a] if count == "1" else f"{count} * {sizes[a]}"
    return index, count


def line_positions(plan: ChunkPlan) -> tuple[dict[str, int], int]:
    """Where each vector lies in the buffer between the kernels, and the chunk's total decay."""
    return {name: i * ROWS for i, name in enumerate(plan.lines)}, len(plan.lines) * ROWS


def system_parts(plan: SystemPlan) -> list[tuple[str, str]]:
    """Index names and sizes of the grid; the axis worked along counts in pieces."""
    parts = grid_parts(plan, plan.grid_axes)
    if not plan.shared_axis:
        return parts
    (name, size), *rest = parts
    assert name == f"at_{plan.shared_axis}"
    pieces = int(size) // plan.shared
    return rest if pieces == 1 else [("piece", str(pieces)), *rest]


def chunk_lines(plan: SystemPlan, first_row: tuple[str, ...] = ()) -> list[str]:
    """Whose ``chunk`` it is, where it begins, and how long the sequence is.

    Args:
        plan: the plan.
        first_row: what says, of sequences that are not packed, where their rows begin.
    """
    if plan.packed:
        return [
            "sequence = tl.load(chunks_ptr + 2 * chunk)",
            "if sequence < 0:  # an unused place of the table",
            "    return",
            "first_token = tl.load(chunks_ptr + 2 * chunk + 1)",
            "first_row = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)",
            "length = (tl.load(cu_seqlens_ptr + sequence + 1) - first_row).to(tl.int32)",
        ]
    return [
        "sequence = chunk // chunks_each",
        f"first_token = (chunk % chunks_each) * {plan.tokens}",
        *first_row,
        "length = tokens_given",
    ]


def system_index(plan: SystemPlan) -> list[str]:
    """Which chunk of which systems a program works on."""
    lines = split_program_id(system_parts(plan), "chunk")
    lines += chunk_lines(plan, ("first_row = tl.full((), 0, tl.int64)",))
    lines += ["chunk_row = first_row + first_token", *tile_lines(plan)]
    for places in dict.fromkeys([ROW, tokens_of(plan)]):
        lines += places.of(0).head(plan)
        for block in range(BLOCKS):
            lines += places.of(block).lines(plan)
    return lines


def shared_loop(plan: SystemPlan) -> str:
    """The loop over the systems that share their vectors; empty for one."""
    if not plan.shared_axis:
        return ""
    name, count = f"at_{plan.shared_axis}", plan.shared
    whole = plan.shared == int(sizes_of(plan)[plan.shared_axis])
    start, stop = ("0", str(count)) if whole else (f"piece * {count}", f"piece * {count} + {count}")
    return f"for {name} in tl.range({start}, {stop}):"


def system_line(plan: SystemPlan) -> str:
    """Where the system's results lie."""
    index, count = chunk_index(plan)
    return f"system = chunk.to(tl.int64) * ({count}) + {index}"


def taken(printer: Printer) -> tuple[str, ...]:
    """The lines printed so far, which are then forgotten."""
    lines = tuple(printer.lines)
    printer.lines.clear()
    return lines


def block_pairs() -> Iterator[tuple[int, int]]:
    """Blocks (of reads, of writes) below the diagonal."""
    return ((i, j) for i in range(BLOCKS) for j in range(i))


def totals(decays: list[BlockDecays], places: Places, blocks: range) -> str:
    """The product of all decays of some blocks; empty for none of them."""
    return times(*(decays[b].total(places.of(b)) for b in blocks))


def ends(decays: list[BlockDecays], places: Places) -> tuple[list[str], str]:
    """Per block, products from each row's write to the chunk's end; and over the chunk."""
    found = []
    for block, own in enumerate(decays):
        later = totals(decays, places, range(block + 1, BLOCKS))
        found.append(times(own.suffix(places.of(block)), later))
    return found, totals(decays, places, range(BLOCKS))


def each_total(plan: ChunkPlan) -> list[str]:
    """Lines that leave the chunk's total decay, one number per element of the active axis."""
    _, at = line_positions(plan)
    key = plan.form.active[0]
    whole = times(*(f"total_{n}" for n in range(BLOCKS)))
    return [f"tl.store(lines_ptr + system * {plan.line_stride} + {at} + at_{key}, {whole})"]


def dot_precision(plan: ChunkPlan) -> str:
    """The precision argument of products of operands in the storage type."""
    return f', input_precision="{plan.precision}"' if plan.storage == "fp32" else ""


def summary_of(plan: ChunkPlan) -> tuple[str, ...]:
    """What the header says of the table."""
    form = plan.form
    return (
        f"{plan.tokens} tokens a chunk, {len(form.rows)} row(s) a token; the rows act along "
        f"{' '.join(form.active)},",
        f"columns along {' '.join(form.passive)} never mix; one system per "
        f"{' '.join(form.system) or 'op'}.",
    )
