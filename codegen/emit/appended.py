"""Prints how a kernel writes the new rows of caches before it reads them.

The programs at a point of the grid read one part of each row, so each of them that reads new rows
writes that part of them: nobody waits for another program. The last share of the keys writes them
in any case, since a mask may hide them all. Several programs may write one element, with one value.
"""

from __future__ import annotations

from attncc.codegen.emit.append import inner_lines
from attncc.codegen.emit.softmax_rows import Texts, sizes_of
from attncc.codegen.emit.triton import Place, Printer, Var
from attncc.codegen.plan import TensorArg
from attncc.codegen.plan_softmax import TiledPlan
from attncc.codegen.softmax_checks import TOKENS
from attncc.codegen.tiles import padded
from attncc.dsl.axes import PAGE, PAGES

TOGETHER = 4
"""New tokens that are written at a time."""


def appended_lines(plan: TiledPlan) -> Texts:
    """Lines that write the new rows, between ``S - T`` and ``S``; none if a kernel has done so."""
    if not plan.appends:
        return ()
    lines = [
        f"for t0 in tl.range(0, T, {TOGETHER}):",
        *(f"    {text}" for text in _step(plan)),
        "tl.debug_barrier()  # every thread's rows are there before any thread reads one",
    ]
    return tuple(lines)


def _step(plan: TiledPlan) -> list[str]:
    """Lines for a few tokens: all that is read is asked for before any of it is waited for."""
    lines = [
        f"new_t = t0 + tl.arange(0, {TOGETHER})  # [m]",
        "given = new_t < T",
        "place = (S - T + new_t).to(tl.int64)",
        "owned = given & (place < room)  # never past the cache's room",
    ]
    if plan.packed:
        lines.append("token = first.to(tl.int64) + new_t")
    if plan.page:
        at = f"block_table_ptr + at_B * block_table_s0 + place // {plan.page}"
        lines += [
            f"found = tl.load({at}, mask=owned, other=-1)",
            f"new_at = place % {plan.page}",
        ]
    copies = []
    for name in plan.appends:
        p = _printer(plan, name, lines)
        copies.append((p, name, p.load(p.tensors[f"new_{name}"], raw=True)))
    if plan.page:
        lines += [
            "new_page = found.to(tl.int64)",
            "owned = owned & (new_page >= 0)  # a place of the table without a page takes nothing",
        ]
    for p, name, value in copies:
        p.store(p.tensors[name], value)
    return lines


def _printer(plan: TiledPlan, name: str, lines: list[str]) -> Printer:
    """Of the part of a history's new rows that lies at this point of the grid."""
    sizes, rows = sizes_of(plan), ("m",)
    tensors = {a.name: a for a in plan.args if isinstance(a, TensorArg)}
    owned, token = Var("owned", rows), Var("token" if plan.packed else "new_t", rows)
    places = {a: Place(Var(f"at_{a}")) for a in ("B", *plan.grid_axes)}
    places[TOKENS] = Place(token, Var("given", rows))
    places[plan.fold.over] = Place(Var("place", rows), owned)
    places |= {PAGES: Place(Var("new_page", rows), owned), PAGE: Place(Var("new_at", rows), owned)}
    inner = tuple(a for a in plan.program.tensor(name).pattern.axes if a not in places)
    width = 1
    for axis in inner:
        width *= int(sizes[axis])
    if inner:
        block = padded(width)
        column = f"{name}_e"
        lines.append(f"{column} = tl.arange(0, {block})  # [e] {' '.join(inner)}")
        apart, found = inner_lines(name, inner, sizes, column, "e")
        valid = Var(f"{column} < {width}", ("e",)) if block != width else None
        lines += apart
        places |= {a: Place(place.index, valid) for a, place in found.items()}
    return Printer(("m", "e"), tensors, places, sizes=sizes, lines=lines)
