"""Calls of open programs: products before the fold, the fold as a call of its own, products after.

Which products there are is chosen for every call by its sizes (``codegen.passes.associate``). They
are matrix products of torch, on the call's stream, and are done again in a recorded call; the fold
between them is an ordinary call of a program with two sides to every contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import torch

from attncc.codegen.association import Association, Product
from attncc.codegen.passes.associate import is_open
from attncc.codegen.pipeline import analyse
from attncc.codegen.plan import Spec
from attncc.codegen.plan_append import plan_append
from attncc.codegen.printers import source
from attncc.codegen.render import Source
from attncc.dsl.axes import PAGE, PAGES, Pattern
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program
from attncc.runtime import backends
from attncc.runtime.call import Call
from attncc.runtime.dialects import dialect_for, in_turn
from attncc.runtime.eager.append import append
from attncc.runtime.eager.pieces import compute_dtype
from attncc.runtime.gathered import gathered
from attncc.runtime.orders import order_of
from attncc.runtime.products import Terms, dense_rows, product, product_into, result_axes
from attncc.runtime.recorder import refuse, workspace


def association_of(call: Call, phase: str) -> Association:
    """The order of a call's contractions.

    Raises:
        RefusedError: there is none, with the line and the reason.
    """
    kept = frozenset(call.scales)  # no matrix product takes stored bits
    if kept and call.block_table is not None:
        kept |= frozenset(call.new_rows)  # pages become rows for a product all together, or none
    return order_of(call.program, _each(call), phase, kept)


def _each(call: Call) -> dict[str, int]:
    """Sizes of one sequence, on average."""
    sizes = {a: n for a, n in call.sizes.items() if a not in (PAGE, PAGES)}
    if call.packed:
        batch = max(sizes["B"], 1)
        sizes["T"] = -(-sizes["T"] // batch)
        if call.lengths is None and "S" in sizes:
            sizes["S"] = -(-sizes["S"] // batch)
    return sizes


def fold_of(call: Call, phase: str) -> Call:
    """The fold of a call, without data: what says which kernels it needs.

    The call itself where its program is not open.

    Raises:
        RefusedError: no order is possible.
    """
    if not is_open(call.program):
        return call
    found = association_of(call, phase)
    call = _without_new(call, found)

    def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    tensors = dict(call.tensors)
    patterns = dict(call.patterns)
    for p in found.before:
        patterns[p.name] = pattern = _pattern(p, patterns)
        shape = [call.sizes[a] for a in pattern.axes]
        tensors[p.name] = torch.empty(shape, dtype=call.dtype, device="meta")
    return _fold(replace(call, tensors=tensors, patterns=patterns), found, empty)[0]


def run(call: Call, phase: str, backend: str) -> None:
    """Run a call of an open program and write its outputs.

    Args:
        call: the bound call.
        phase: ``prefill`` or ``decode``.
        backend: any but the reference, which needs no order.

    Raises:
        BackendError: the named one has no kernels for the fold; nothing has been written.
        RefusedError: no order is possible; nothing has been written.
        CacheError, PageError: a cache has no room; nothing is written.
    """
    if backend not in ("auto", "torch"):
        backends.need_triton(call)
    found = association_of(call, phase)
    if backend != "torch" and backends.has_triton(call):
        try:
            _need_kernels(fold_of(call, phase), phase, backend)
            with torch.no_grad():  # a fold of kernels has no gradient, so its products have none
                _run_kernels(call, found, phase, backend)
            return
        except RefusedError as refused:
            if backend != "auto":
                raise backends.no_kernel(backend, refused) from refused
    run_eager(call, found)


def _need_kernels(fold: Call, phase: str, backend: str) -> None:
    """Find out that a fold has no kernels before anything is written."""
    from attncc.runtime import selfcheck, softmax

    form = analyse(fold.program).softmax
    if form is None:
        reasons = "; ".join(map(str, analyse(fold.program).refusals))
        raise RefusedError(reasons, op=fold.program.name)
    spec = replace(backends.spec_of(fold), dialect=dialect_for(backend, fold.program.name, phase))

    def need(own: Spec) -> None:
        with selfcheck.running(fold, analyse(fold.program), own, phase):
            softmax.need(fold, form, own, phase)

    in_turn(fold.program, spec, phase, need)


def _run_kernels(call: Call, found: Association, phase: str, backend: str) -> None:
    if found.read_before(call.program):
        _append(call, phase)
        call = _without_pages(call)

    def room(size: int, dtype: torch.dtype) -> torch.Tensor:
        return workspace(size, dtype, call.device)

    call = _with_products(call, found, call.dtype)
    core, rooms = _fold(call, found, room)
    backends.run(core, phase, backend)
    _finish(call, found, core, rooms)


def run_eager(call: Call, found: Association, *, rounded: bool = False) -> None:
    """Run a call with torch alone, in the compute dtype.

    Args:
        call: the bound call.
        found: the order of its contractions.
        rounded: products are rounded to the call's dtype, as where kernels read them.

    Raises:
        CacheError, PageError: a cache has no room; nothing is written.
    """
    refuse("the torch lowering runs it")
    wide = call.dtype if rounded else compute_dtype(call)
    if found.read_before(call.program):
        append(call)
        call = replace(gathered(call, appended=True, dtype=compute_dtype(call)), new_rows={})

    def room(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype if rounded else wide, device=call.device)

    call = _with_products(call, found, wide)
    core, rooms = _fold(call, found, room)
    backends.run_eager(core, analyse(core.program))
    _finish(call, found, core, rooms)


def _with_products(call: Call, found: Association, dtype: torch.dtype) -> Call:
    tensors, patterns = dict(call.tensors), dict(call.patterns)
    for p in found.before:
        patterns[p.name] = _pattern(p, patterns)
        terms = _terms(p, patterns, call.sizes, dtype, patterns[p.name].axes)
        tensors[p.name] = product(tensors[p.left], tensors[p.right], terms)
    return replace(call, tensors=tensors, patterns=patterns)


def _finish(call: Call, found: Association, core: Call, rooms: Mapping[str, torch.Tensor]) -> None:
    """The products behind the fold, the last of each output into the output."""
    held, patterns = dict(rooms), {**call.patterns, **{n: core.patterns[n] for n in rooms}}
    for i, p in enumerate(found.after):
        last = all(q.name != p.name for q in found.after[i + 1 :])
        target = call.outputs[p.name]
        dtype = target.dtype if last else core.outputs[p.name].dtype
        axes = call.patterns[p.name].axes if last else _pattern(p, patterns).axes
        terms = _terms(p, patterns, call.sizes, dtype, axes)
        if last:
            product_into(target, held[p.left], call.tensors[p.right], terms)
        else:
            held[p.name] = product(held[p.left], call.tensors[p.right], terms)
            patterns[p.name] = _pattern(p, patterns)


def _pattern(p: Product, patterns: Mapping[str, Pattern]) -> Pattern:
    """Memory axes of a product's result, one dimension an axis."""
    left, right = patterns[p.left].axes, patterns[p.right].axes
    return Pattern(tuple((a,) for a in result_axes(left, right, p.axes)))


def _terms(
    p: Product, patterns: Mapping[str, Pattern], sizes: Mapping[str, int], dtype: torch.dtype,
    axes: tuple[str, ...],
) -> Terms:  # fmt: skip
    left, right = patterns[p.left].axes, patterns[p.right].axes
    shapes = [tuple(sizes[a] for a in side) for side in (left, right)]
    return Terms(left, shapes[0], right, shapes[1], p.over, axes, dtype)


def _fold(
    call: Call, found: Association, room: Callable[[int, torch.dtype], torch.Tensor]
) -> tuple[Call, dict[str, torch.Tensor]]:
    """The fold as a call, and the flat room of what products finish."""
    program = found.program
    names = {t.name for t in program.tensors}
    outputs, patterns = dict(call.outputs), dict(call.patterns)
    rooms = {}
    for o in program.outputs:
        if any(p.name == o.name for p in found.after):
            pattern = o.pattern.without("B") if call.packed else o.pattern
            shape = [prod(call.sizes[a] for a in dim) for dim in pattern.dims]
            rooms[o.name] = room(prod(shape), call.outputs[o.name].dtype)
            outputs[o.name] = rooms[o.name].view(shape)
            patterns[o.name] = pattern
    return replace(
        call, program=program, outputs=outputs, patterns=patterns,
        tensors={n: t for n, t in call.tensors.items() if n in names},
        scalars={n: v for n, v in call.scalars.items() if n in names},
        new_rows={n: t for n, t in call.new_rows.items() if n in names},
        scales={n: s for n, s in call.scales.items() if n in names},
    ), rooms  # fmt: skip


# --- histories that products read ------------------------------------------------------------


def append_sources(call: Call, phase: str, target: str) -> list[Source]:
    """The kernel that appends before products read a history; none where the fold's own does."""
    if not call.new_rows or not association_of(call, phase).read_before(call.program):
        return []
    spec, over = replace(backends.spec_of(call), target=target), call.program.history_axis
    assert over is not None
    return [source(plan_append(call.program, over, spec))]


def _append(call: Call, phase: str) -> None:
    """Copy the new rows behind what the caches hold: the products are to see them."""
    from attncc.runtime.kernels import load
    from attncc.runtime.softmax import append_rows

    target = backends.spec_of(call).target
    for generated in append_sources(call, phase, target):
        append_rows(call, load(generated).ensure(target))


def _without_new(call: Call, found: Association) -> Call:
    """The call as it is when its rows have been appended, without data."""
    if not found.read_before(call.program):
        return call
    tensors, patterns = dict(call.tensors), dict(call.patterns)
    if call.block_table is not None:
        for name in call.new_rows:
            patterns[name] = _dense_pattern(call.program, name)
            shape = [call.sizes[a] for a in patterns[name].axes]
            tensors[name] = torch.empty(shape, dtype=call.tensors[name].dtype, device="meta")
    return replace(call, tensors=tensors, patterns=patterns, new_rows={}, block_table=None)


def _without_pages(call: Call) -> Call:
    """Histories in pages as dense ones of the same capacity; nothing is read by the host."""
    if call.block_table is None:
        return replace(call, new_rows={})
    tensors, patterns = dict(call.tensors), dict(call.patterns)
    for name in call.new_rows:
        held = patterns[name]
        at, row = held.dim_of(PAGES), held.dim_of(PAGE)
        rows = dense_rows(tensors[name], call.block_table, at, row)
        patterns[name] = _dense_pattern(call.program, name)
        tensors[name] = rows
    return replace(call, tensors=tensors, patterns=patterns, new_rows={}, block_table=None)


def _dense_pattern(program: Program, name: str) -> Pattern:
    """Layout of a paged history as dense rows: B and S outermost."""
    dims = program.tensor(name).pattern.dims
    rest = tuple(d for d in dims if not {"B", "S"} & set(d))
    return Pattern((("B",), ("S",), *rest))
