"""Launches a selection and the fold over what it picks; reads nothing from the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from attncc.codegen.forms import Refusal, SelectedForm
from attncc.codegen.plan import KernelPlan, Spec
from attncc.codegen.plan_gathered import GatherPlan, plan_selected
from attncc.codegen.plan_picked import PickedPlan
from attncc.codegen.plan_selected import BINS, ScorePlan
from attncc.codegen.printers import source
from attncc.codegen.softmax_checks import TOKENS
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program
from attncc.runtime.call import Call
from attncc.runtime.dialects import there
from attncc.runtime.kernels import Kernel, load, make_ready
from attncc.runtime.recorder import workspace
from attncc.runtime.softmax import (
    Arguments,
    append_rows,
    lse_view,
    multiprocessors,
    rooms_for,
)
from attncc.runtime.splits import even_splits, merging
from attncc.runtime.tables import tile_capacity, tile_table

ROOM = 1 << 28
"""Bytes of scores kept at a time; more tokens are taken in several turns."""

BLOCKS_A_SPLIT = 4
"""Blocks below which cutting the history into ranges does not pay."""

PICKED_A_SPLIT = 1
"""The same of blocks of picked rows: a range waits for its places, then for its rows."""

PROGRAMS = 2
"""Programs of the scores that a multiprocessor runs at once."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Loaded kernels of one kind of call; program and form keep their identities alive."""

    program: Program
    form: SelectedForm
    append: Kernel | None
    score: Kernel
    count: Kernel
    pick: Kernel
    sort: Kernel
    whole: Kernel | None
    part: Kernel | None
    idle: Kernel | None
    merge: Kernel | None
    fewer: tuple[Kernel, ...]

    @property
    def all(self) -> tuple[Kernel, ...]:
        """Every kernel that there is."""
        found = (self.append, self.score, self.count, self.pick, self.sort, self.whole, self.part)
        more = (self.idle, self.merge, *self.fewer)
        return tuple(kernel for kernel in (*found, *more) if kernel is not None)

    def merges(self, parts: int) -> Kernel | None:
        """The kernel that combines so many partials of a row."""
        return merging(parts, self.fewer, self.merge)


_PREPARED: dict[tuple[int, int, Spec, str], Kernels] = {}


def prepare(program: Program, form: SelectedForm, spec: Spec, phase: str) -> Kernels:
    """The kernels of a kind of call, planned and loaded once per process.

    Raises:
        RefusedError: no plan covers the program; the message says why and where.
    """
    key = (id(program), id(form), spec, phase)
    found = _PREPARED.get(key)
    if found is None:
        plans = there(spec, lambda own: plan_selected(form, own, phase))
        if isinstance(plans, Refusal):
            raise RefusedError(plans.reason, op=program.name, loc=plans.loc)

        def loaded(plan: KernelPlan | None) -> Kernel | None:
            return None if plan is None else load(source(plan))

        stages = (plans.score, plans.count, plans.pick, plans.sort)
        score, count, pick, sort = (load(source(plan)) for plan in stages)
        found = _PREPARED[key] = Kernels(
            program, form, loaded(plans.append), score, count, pick, sort,
            loaded(plans.whole), loaded(plans.part), loaded(plans.idle), loaded(plans.merge),
            tuple(load(source(plan)) for plan in plans.fewer),
        )  # fmt: skip
    return found


def run(
    call: Call, form: SelectedForm, spec: Spec, phase: str, *, splits: int | None = None
) -> None:
    """Append new rows if there are any, select, fold, and write the call's outputs and lse.

    Everything is launched on the current stream and can be captured in a CUDA graph.

    Args:
        call: the bound call.
        form: its program's two stages.
        spec: what selects kernels.
        phase: ``prefill`` or ``decode``.
        splits: ranges that the picked rows are cut into; chosen from sizes when None.

    Raises:
        RefusedError: no kernels cover the program; nothing has been launched.
    """
    kernels = prepare(call.program, form, spec, phase)
    for kernel in kernels.all:  # whatever a call's lengths are, it is refused or not
        kernel.ensure(spec.target)
    make_ready(_needed(call, kernels, splits), call.device, spec.target)
    if kernels.append is not None and call.new_rows:
        append_rows(call, kernels.append)
    if not call.sizes[TOKENS] * call.sizes["B"]:
        return
    args = _arguments(call)
    picked = _picked(call, form)
    args["picked"] = picked
    _select(call, kernels, args)
    if form.folds:
        _fold(call, kernels, args, splits)


def attend(
    call: Call, form: SelectedForm, spec: Spec, phase: str, picked: torch.Tensor
) -> None:  # fmt: skip
    """The second stage alone, over rows that are known already; ``run`` has both.

    Args:
        call: the bound call; its caches hold the call's rows.
        form: its program's two stages.
        spec: what selects kernels.
        phase: ``prefill`` or ``decode``.
        picked: int32 ``[B, T, k]`` (packed without B); within a row, places of -1 come last.

    Raises:
        RefusedError: no kernels cover the program; nothing has been launched.
    """
    kernels = prepare(call.program, form, spec, phase)
    make_ready(_folding(call, kernels, None), call.device, spec.target)
    _fold(call, kernels, {**_arguments(call), "picked": picked}, None)


def _needed(call: Call, kernels: Kernels, splits: int | None) -> Iterator[Kernel]:
    """Every kernel that a call launches."""
    if kernels.append is not None and call.new_rows:
        yield kernels.append
    if call.sizes[TOKENS] * call.sizes["B"]:
        yield from (kernels.score, kernels.count, kernels.pick, kernels.sort)
        yield from _folding(call, kernels, splits)


def _folding(call: Call, kernels: Kernels, splits: int | None) -> Iterator[Kernel]:
    """Those of the second stage, if there is one."""
    if kernels.whole is not None:
        parts = _ranges(call, kernels, splits)
        part, _ = _part(call, kernels, parts)
        found = (part, kernels.merges(parts)) if parts > 1 else (kernels.whole,)
        yield from (kernel for kernel in found if kernel is not None)


def _picked(call: Call, form: SelectedForm) -> torch.Tensor:
    """Where the picks go: the output that they are, or a workspace; int32 ``[B, T, k]``."""
    for out in form.program.outputs:
        if out.value == form.selection.node:
            found, axes = call.outputs[out.name], call.patterns[out.name].axes
            order = (*(a for a in ("B", TOKENS) if a in axes), form.selection.node.axis)
            return found.permute([axes.index(a) for a in order])
    k = form.selection.node.k
    rows = (call.sizes[TOKENS],) if call.packed else (call.sizes["B"], call.sizes[TOKENS])
    return workspace(prod(rows) * k, torch.int32, call.device).view(*rows, k)


def _arguments(call: Call) -> Arguments:
    """Arguments of any of the kernels, by name, but for those of one stage."""
    args: Arguments = dict(call.tensors)
    args |= {f"out_{name}": tensor for name, tensor in call.outputs.items()}
    args |= {f"p_{name}": value for name, value in call.scalars.items()}
    args |= {f"n_{axis}": size for axis, size in call.sizes.items()}
    args |= {f"scale_{name}": own.tensor for name, own in call.scales.items()}
    args |= {"T": call.sizes[TOKENS], "S": call.sizes["S"]}
    if call.lengths is not None:
        args["lengths"] = call.lengths
    if call.block_table is not None:
        args["block_table"] = call.block_table
    if call.cu_seqlens is not None:
        args["cu_seqlens"] = call.cu_seqlens
        args["cu_seqlens_k"] = call.cu_seqlens if call.cu_seqlens_k is None else call.cu_seqlens_k
    return args


def _tiles(call: Call, block: int, args: Arguments) -> int:
    """Tiles of tokens; what says which sequence each is of joins the arguments."""
    tokens = call.sizes[TOKENS]
    if call.cu_seqlens is None:
        args["tiles_each"] = -(-tokens // block)
    else:
        args["tile_table"] = tile_table(call.cu_seqlens, block, tokens).view(-1)
    return _tile_count(call, block)


def _tile_count(call: Call, block: int) -> int:
    tokens, sequences = call.sizes[TOKENS], call.sizes["B"]
    if call.cu_seqlens is None:
        return -(-tokens // block) * sequences
    return tile_capacity(tokens, sequences, block)


# --- the selection ---------------------------------------------------------------------------


def _select(call: Call, kernels: Kernels, shared: Arguments) -> None:
    """The picks of every token, as many tokens at a time as there is room for scores."""
    plan = kernels.score.plan
    assert isinstance(plan, ScorePlan)
    args = dict(shared)
    tiles = _tiles(call, plan.block_t, args)
    keys = call.sizes["S"]
    chunks = max(1, -(-keys // plan.chunk))
    width = chunks * plan.chunk
    tile_bytes = plan.block_t * (12 * width + 4 * BINS * chunks + 8 * plan.block_k)
    most = max(1, min(tiles, ROOM // tile_bytes))
    rows = most * plan.block_t
    args |= {"width": width, "chunks": chunks}
    args["order"] = workspace(rows * width, torch.int32, call.device)
    args["counts"] = workspace(rows * plan.counters, torch.int32, call.device)
    args["ties"] = workspace(rows * chunks * BINS, torch.int32, call.device)
    args["picks"] = workspace(rows * plan.block_k, torch.int64, call.device)
    room = PROGRAMS * multiprocessors(call.device)
    programs = plan.block_t * max(most, room)
    args["firsts"] = workspace(programs * BINS, torch.int32, call.device)
    args["close"] = workspace(rows * width, torch.int64, call.device)
    for first in range(0, tiles, most):
        now = min(most, tiles - first)
        args["first_tile"] = first
        blocks = -(-keys // plan.block_n)
        args["splits"] = _splits(now, blocks, room, BLOCKS_A_SPLIT)
        kernels.score.launch((now * int(args["splits"]),), args)
        kernels.count.launch((now * plan.block_t * chunks,), args)
        kernels.pick.launch((now * plan.block_t * chunks,), args)
        kernels.sort.launch((now * plan.block_t,), args)


def _splits(programs: int, blocks: int, room: int, least: int) -> int:
    """How many ranges to cut ``blocks`` into, so that the programs just fill the device.

    Args:
        programs: program instances without ranges.
        blocks: blocks of each.
        room: programs that the device runs at once.
        least: blocks below which a range does not pay.
    """
    return max(1, min(room // max(programs, 1), -(-blocks // least)))


# --- the fold over what was picked -----------------------------------------------------------


def _fold_programs(call: Call, plan: GatherPlan) -> int:
    """Programs of the fold without ranges: tiles of rows at every point of every token."""
    points = prod(call.sizes[a] for a in plan.grid_axes)
    return _tile_count(call, plan.block_t) * points * -(-_group(call, plan) // plan.block_m)


def _group(call: Call, plan: GatherPlan) -> int:
    """Rows of a token."""
    return prod(call.sizes[a] for a in plan.tile_axes if a != TOKENS)


def _ranges(call: Call, kernels: Kernels, splits: int | None) -> int:
    """Into how many ranges the picked rows are cut."""
    assert kernels.whole is not None
    plan = kernels.whole.plan
    assert isinstance(plan, GatherPlan)
    if kernels.part is None:
        return 1
    blocks = -(-min(plan.k, call.sizes["S"]) // plan.block_n)
    programs, room = _fold_programs(call, plan), multiprocessors(call.device)
    if splits is not None:
        return splits
    if isinstance(plan, PickedPlan):
        return even_splits(programs, blocks, room, PICKED_A_SPLIT)
    return _splits(programs, blocks, room, PICKED_A_SPLIT)


def _part(call: Call, kernels: Kernels, ranges: int) -> tuple[Kernel | None, int]:
    """The kernel of partials, and among how many programs it shares out a row's columns."""
    if kernels.idle is not None:
        plan = kernels.idle.plan
        assert isinstance(plan, PickedPlan)
        if _fold_programs(call, plan) * ranges * plan.shares <= multiprocessors(call.device):
            return kernels.idle, plan.shares
    return kernels.part, 1


def _fold(call: Call, kernels: Kernels, shared: Arguments, splits: int | None) -> None:
    assert kernels.whole is not None
    plan = kernels.whole.plan
    assert isinstance(plan, GatherPlan)
    args = dict(shared)
    _tiles(call, plan.block_t, args)
    group = _group(call, plan)
    programs, count = _fold_programs(call, plan), _ranges(call, kernels, splits)
    if call.lse is not None:
        args["out_lse"] = lse_view(call, plan.fold)
    args |= {"row_tiles": -(-group // plan.block_m), "first_tile": 0, "splits": 1}
    merge = kernels.merges(count)
    part, shares = _part(call, kernels, count)
    if count == 1 or part is None or merge is None:
        kernels.whole.launch((programs,), args)
        return
    rows = call.sizes[TOKENS] * group
    points = prod(call.sizes[a] for a in plan.grid_axes) * (1 if call.packed else call.sizes["B"])
    [own] = plan.passes
    parts = rooms_for(points * rows * count, (own.width, 1, 1), call.device)
    args |= {f"part_{n}": t for n, t in parts.items()}
    args |= {f"part0_{n}": t for n, t in parts.items()}
    args |= {"splits": count, "splits0": count, "rows": rows}
    part.launch((programs * count * shares,), args)
    merge.launch((points * rows,), args)
