"""Launches the generated kernels of the softmax family; reads nothing from the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from attncc.codegen.forms import Refusal, SoftmaxFold, SoftmaxForm
from attncc.codegen.plan import KernelPlan, Spec
from attncc.codegen.plan_append import AppendPlan
from attncc.codegen.plan_gluon import WarpPlan
from attncc.codegen.plan_parts import lse_pattern
from attncc.codegen.plan_shared import SharedPlan
from attncc.codegen.plan_softmax import MergePlan, TiledPlan, plan_softmax
from attncc.codegen.printers import source
from attncc.codegen.softmax_checks import TOKENS
from attncc.codegen.tiles import padded
from attncc.dsl.axes import PAGE, PAGES
from attncc.dsl.errors import RefusedError
from attncc.dsl.ir import Program
from attncc.runtime import growth
from attncc.runtime.arrivals import arrivals
from attncc.runtime.call import Call
from attncc.runtime.dialects import there
from attncc.runtime.kernels import Kernel, load, make_ready
from attncc.runtime.recorder import workspace
from attncc.runtime.splits import PAIRED, even_splits, merging, split_count
from attncc.runtime.tables import block_ranges, tile_capacity, tile_table

Arguments = dict[str, torch.Tensor | float]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Loaded kernels of one kind of call; the program and form keep their identities alive."""

    program: Program
    form: SoftmaxForm
    whole: Kernel | None
    parts: tuple[Kernel, ...]
    merge: Kernel | None
    fewer: tuple[Kernel, ...]
    append: Kernel | None


_PREPARED: dict[tuple[int, int, Spec, str], Kernels] = {}


def prepare(program: Program, form: SoftmaxForm, spec: Spec, phase: str) -> Kernels:
    """The kernels of a kind of call, generated and loaded once per process.

    Raises:
        RefusedError: the family does not cover the program; the message says why and where.
    """
    key = (id(program), id(form), spec, phase)
    found = _PREPARED.get(key)
    if found is None:
        plans = there(spec, lambda own: plan_softmax(program, form, own, phase))
        if isinstance(plans, Refusal):
            raise RefusedError(plans.reason, op=program.name, loc=plans.loc)
        found = _PREPARED[key] = Kernels(
            program,
            form,
            _load(plans.whole),
            tuple(load(source(plan)) for plan in plans.parts),
            _load(plans.merge),
            tuple(load(source(plan)) for plan in plans.fewer),
            _load(plans.append),
        )
    return found


def _load(plan: KernelPlan | None) -> Kernel | None:
    return None if plan is None else load(source(plan))


def run(
    call: Call, form: SoftmaxForm, spec: Spec, phase: str, *, splits: int | None = None
) -> None:
    """Append new rows if there are any, fold, and write the call's outputs and lse.

    Everything is launched on the current stream and can be captured in a CUDA graph.

    Args:
        call: the bound call.
        form: its program's score form.
        spec: what selects kernels.
        phase: ``prefill`` or ``decode``.
        splits: number of ranges the keys are cut into; chosen from sizes when None.

    Raises:
        RefusedError: the family does not cover the program; nothing has been launched.
    """
    kernels = prepare(call.program, form, spec, phase)
    grid = _Grid.of(call, plan_of(kernels.whole or kernels.parts[0]))
    whole = _whole(call, kernels, grid, splits)
    make_ready(_needed(call, kernels, whole, grid, splits), call.device, spec.target)
    if kernels.append is not None and _appends_first(call, kernels, whole, grid):
        append_rows(call, kernels.append)
    if not grid.tiles * grid.points:
        return
    if whole is not None:
        plan = plan_of(whole)
        _launch(whole, _programs(call, plan, grid), _arguments(call, plan, grid))
    elif kernels.merge is None:
        part = kernels.parts[0]  # its tiles need not be those of the whole
        _fused(call, part, _Grid.of(call, plan_of(part)), splits)
    else:
        _merge(call, kernels, splits)


def need(call: Call, form: SoftmaxForm, spec: Spec, phase: str) -> None:
    """Find out whether a call has kernels; none of its own is launched, and no tensor looked at.

    Raises:
        RefusedError: the family does not cover the program, or a kernel has no text.
        MissingArtifactError, MiscompiledError, ToolchainError: as :func:`make_ready`.
    """
    kernels = prepare(call.program, form, spec, phase)
    grid = _Grid.of(call, plan_of(kernels.whole or kernels.parts[0]))
    whole = _whole(call, kernels, grid, None)
    make_ready(_needed(call, kernels, whole, grid), call.device, spec.target)


def _needed(
    call: Call, kernels: Kernels, whole: Kernel | None, grid: _Grid, splits: int | None = None
) -> Iterator[Kernel]:
    """Every kernel that a call launches."""
    if kernels.append is not None and _appends_first(call, kernels, whole, grid):
        yield kernels.append
    if grid.tiles * grid.points:
        found = (whole,) if whole else (*kernels.parts, _merge_of(call, kernels, splits))
        yield from (kernel for kernel in found if kernel is not None)


def _appends_first(call: Call, kernels: Kernels, whole: Kernel | None, grid: _Grid) -> bool:
    """Whether a kernel of its own writes a call's new rows; no queries, no kernel that does."""
    inside = whole is None and grid.tiles * grid.points and plan_of(kernels.parts[0]).appends
    return bool(call.new_rows) and not inside


def _whole(call: Call, kernels: Kernels, grid: _Grid, splits: int | None) -> Kernel | None:
    """The kernel that does a call at once; None where its keys are cut into ranges."""
    if kernels.whole is None or not kernels.parts:
        return kernels.whole
    cut = _splits(call, plan_of(kernels.whole), grid, splits) > 1
    return None if cut else kernels.whole


def _programs(call: Call, plan: TiledPlan, grid: _Grid) -> int:
    """Program instances: one a tile, or as many as stay resident and share the tiles."""
    tiles = grid.tiles * grid.points
    return min(tiles, multiprocessors(call.device)) if isinstance(plan, WarpPlan) else tiles


def plan_of(kernel: Kernel) -> TiledPlan:
    """The plan of a tiled kernel."""
    assert isinstance(kernel.plan, TiledPlan)
    return kernel.plan


def _splits(call: Call, plan: TiledPlan, grid: _Grid, wanted: int | None) -> int:
    if wanted is not None:
        return wanted
    keys, sms = call.sizes[plan.fold.over], multiprocessors(call.device)
    if isinstance(plan, SharedPlan):
        return even_splits(grid.tiles * grid.points, -(-keys // plan.block_n), sms)
    room = sms * (PAIRED if plan.paired and plan.num_warps <= 4 else 1)
    return split_count(grid.tiles * grid.points, keys, plan.block_n, room)


def _fused(call: Call, kernel: Kernel, grid: _Grid, splits: int | None) -> None:
    """One pass in ranges of keys; the last program of each tile merges."""
    plan = plan_of(kernel)
    count = _splits(call, plan, grid, splits)
    args = _arguments(call, plan, grid)
    args |= {f"part_{n}": t for n, t in partials(call, plan, grid, count).items()}
    args |= {"splits": count, "rows": grid.rows}
    sequences = 0
    if plan.grows and call.lengths is not None:
        sequences, args["growth"] = call.sizes["B"], growth.tokens(call.lengths)
    args["arrivals"] = arrivals(grid.tiles * grid.points + sequences, call.device)
    _launch(kernel, grid.tiles * grid.points * count, args)


def _merge_of(call: Call, kernels: Kernels, splits: int | None) -> Kernel | None:
    """The kernel that combines the partials of the pass with the most ranges."""
    plans = [plan_of(kernel) for kernel in kernels.parts]
    ranges = max(_splits(call, p, _Grid.of(call, p), splits) for p in plans)
    return merging(ranges, kernels.fewer, kernels.merge)


def _merge(call: Call, kernels: Kernels, splits: int | None) -> None:
    """Every pass as partials, then the kernel that combines and finishes them."""
    merge = _merge_of(call, kernels, splits)
    assert merge is not None
    assert isinstance(merge.plan, MergePlan)
    merged: Arguments = {}
    programs = 0
    for kernel in kernels.parts:
        plan = plan_of(kernel)
        grid = _Grid.of(call, plan)
        count = _splits(call, plan, grid, splits)
        args = _arguments(call, plan, grid)
        parts = partials(call, plan, grid, count)
        args |= {f"part_{n}": t for n, t in parts.items()}
        args |= {"splits": count, "rows": grid.rows}
        _launch(kernel, grid.tiles * grid.points * count, args)
        index = plan.passes[0].index
        merged |= {**args, **merged, f"splits{index}": count}
        merged |= {f"part{index}_{n}": t for n, t in parts.items()}
        programs = grid.points * -(-grid.rows // merge.plan.block_r)
    _launch(merge, programs, merged)


def partials(call: Call, plan: TiledPlan, grid: _Grid, splits: int) -> dict[str, torch.Tensor]:
    """Room for a pass' partials: ``u``, and ``m`` and ``l`` unless it is a plain sum."""
    [own] = plan.passes
    widths = (own.width,) if own.plain else (own.width, 1, 1)
    return rooms_for(grid.points * grid.rows * splits, widths, call.device)


def rooms_for(rows: int, widths: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
    """Flat fp32 room for the parts ``u``, ``m`` and ``l`` of partials, of one allocation.

    Each starts at a multiple of 16 bytes, as the plans' parameters say.
    """
    sizes = [-(-rows * width // 4) * 4 for width in widths]
    room = workspace(sum(sizes), torch.float32, device)
    return dict(zip(("u", "m", "l"), torch.split(room, sizes), strict=False))


# --- sizes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Grid:
    """Extent of a call: tiles of rows, points of the grid axes, and rows in all (T times group)."""

    tiles: int
    points: int
    rows: int

    @staticmethod
    def of(call: Call, plan: TiledPlan) -> _Grid:
        rows = prod(call.sizes[a] for a in plan.tile_axes)
        points = prod(call.sizes[a] for a in plan.grid_axes)
        if not rows:
            return _Grid(0, points, 0)
        if plan.packed:
            return _Grid(tile_capacity(rows, call.sizes["B"], plan.block_m), points, rows)
        return _Grid(-(-rows // plan.block_m), points, rows)


@lru_cache(maxsize=16)
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def multiprocessors(device: torch.device) -> int:
    """Those of a device."""
    if device.type != "cuda":
        return 132  # the interpreter splits as an H200 would
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


# --- arguments -------------------------------------------------------------------------------


def _launch(kernel: Kernel, programs: int, args: Mapping[str, Any]) -> None:
    kernel.launch((programs,), args)


def _arguments(call: Call, plan: TiledPlan, grid: _Grid) -> Arguments:
    """Every argument any of the fold's kernels may take, by name."""
    args: Arguments = dict(call.tensors)
    args |= {f"out_{name}": tensor for name, tensor in call.outputs.items()}
    args |= {f"p_{name}": value for name, value in call.scalars.items()}
    args |= {f"n_{axis}": size for axis, size in call.sizes.items()}
    args |= {"T": call.sizes[TOKENS], "S": call.sizes[plan.fold.over], "tiles": grid.tiles}
    if call.lse is not None:
        args["out_lse"] = lse_view(call, plan.fold)
    given = {"lengths": call.lengths, "block_table": call.block_table}
    args |= {name: tensor for name, tensor in given.items() if tensor is not None}
    args |= {f"new_{name}": call.new_rows[name] for name in plan.appends}
    args["room"] = call.sizes[plan.fold.over]  # rows that a cache has room for
    args |= {f"scale_{name}": own.tensor for name, own in call.scales.items()}
    for name in plan.stats:
        pattern = plan.tensor(name).pattern
        ends = block_ranges(call.tensors[name], pattern.dim_of(plan.fold.over), plan.stat_block)
        args[f"{name}_least"], args[f"{name}_most"] = ends
    if call.cu_seqlens is not None:
        group = grid.rows // max(call.sizes[TOKENS], 1)
        args["cu_seqlens"] = call.cu_seqlens
        args["cu_seqlens_k"] = call.cu_seqlens if call.cu_seqlens_k is None else call.cu_seqlens_k
        args["tile_table"] = tile_table(call.cu_seqlens, plan.block_m, grid.rows, group=group).view(
            -1
        )
    return args


def lse_view(call: Call, fold: SoftmaxFold) -> torch.Tensor:
    """The lse with one dimension an axis, in the plan's order, and a last one of size 1."""
    assert call.lse is not None and call.lse_axes is not None
    view = call.lse
    for dim in reversed(range(call.lse_axes.rank)):
        sizes = [call.sizes[a] for a in call.lse_axes.dims[dim]]
        view = torch.unflatten(view, dim, sizes)
    axes = call.lse_axes.axes
    wanted = lse_pattern(fold, call.packed).axes[:-1]
    return view.permute([axes.index(a) for a in wanted]).unsqueeze(-1)


def append_rows(call: Call, kernel: Kernel) -> None:
    """Copy this call's rows behind what the caches hold."""
    plan = kernel.plan
    assert isinstance(plan, AppendPlan) and call.lengths is not None
    args: Arguments = {name: call.tensors[name] for name in plan.histories}
    args |= {f"new_{name}": call.new_rows[name] for name in plan.histories}
    args |= {f"n_{axis}": size for axis, size in call.sizes.items()}
    args |= {s.scales: call.scales[s.name].tensor for s in plan.quantised}
    widths = [_row_width(call, plan, name) for name in plan.histories]
    chunks = max(1, -(-max(widths) // plan.block))
    args |= {"lengths": call.lengths, "chunks": chunks, "T": call.sizes[TOKENS]}
    args["S"] = call.sizes[plan.over]
    if call.block_table is not None:
        args["block_table"] = call.block_table
    tokens = call.sizes[TOKENS]
    if call.cu_seqlens is not None:
        sequences = call.sizes["B"]
        args |= {"cu_seqlens": call.cu_seqlens, "sequences": sequences}
        args["steps"] = max(sequences, 1).bit_length()
    else:
        tokens *= call.sizes["B"]
    _launch(kernel, tokens * chunks if call.sizes["B"] else 0, args)


def _row_width(call: Call, plan: AppendPlan, name: str) -> int:
    """Elements of a row of a history, with each quantised block padded as the kernel takes it."""
    outside = ("B", plan.over, PAGES, PAGE)
    width = prod(call.sizes[a] for a in plan.tensor(name).pattern.axes if a not in outside)
    for own in plan.quantised:
        if own.name == name:
            return width // own.block * padded(own.block)
    return width
