"""Runs scans: chunked where a body's affine form allows and there are tokens enough, else stepwise.

A call's plans, kernels and grids follow from its program, dtypes, static sizes and alignment; they
are found once and kept. Nothing here reads device memory, so a warmed-up call can be captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from attncc.codegen.emit.scan_sources import FEW_TOKENS, choose_plans, sources_of
from attncc.codegen.forms import Analysis
from attncc.codegen.plan import Spec, TensorArg
from attncc.codegen.plan_affine import ROWS, Choice, ChunkedPlans, ChunkPlan, SystemPlan
from attncc.codegen.plan_scan import ScanPlan, StepPlan, final_name, initial_name
from attncc.dsl.ir import Program
from attncc.runtime.call import Call
from attncc.runtime.kernels import Kernel, load
from attncc.runtime.tables import tile_offsets, tile_table

_BITS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _BITS.items()}


@dataclass(frozen=True, slots=True)
class Stepwise:
    """A loaded ``step`` kernel."""

    plan: StepPlan
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Chunked:
    """The loaded kernels of the chunked form, in launch order."""

    plans: ChunkedPlans
    kernels: tuple[Kernel, ...]


_FOUND: dict[object, tuple[Program, Stepwise | Chunked]] = {}


def run(
    call: Call, analysis: Analysis, spec: Spec, phase: str, choice: Choice | None = None
) -> None:
    """Run a scan and write its outputs and final states.

    Args:
        call: a bound call; a final state may be the given initial state itself.
        analysis: the program's forms.
        spec: what the call fixes.
        phase: ``prefill`` takes the chunked form where it can; ``decode`` steps.
        choice: what the chunked kernels take instead of their own choice.

    Raises:
        RefusedError: no kernel covers the body; the message gives every reason.
    """
    full = completed(call, spec)
    chunked = phase != "decode" and _tokens_each(call) > FEW_TOKENS and not spec.token_slots
    # The program stays in the table, so its identity is not used again.
    key = (id(call.program), full, chunked, choice)
    found = _FOUND.get(key)
    if found is None:
        loaded = _load(call.program, analysis, full, choice, chunked=chunked)
        found = _FOUND[key] = (call.program, loaded)
    chosen = found[1]
    if isinstance(chosen, Stepwise):
        _run_step(call, chosen)
    else:
        _run_chunked(call, chosen)


def _load(
    program: Program, analysis: Analysis, spec: Spec, choice: Choice | None, *, chunked: bool
) -> Stepwise | Chunked:
    plans = choose_plans(program, analysis, spec, chunked=chunked, choice=choice)
    kernels = [load(source) for source in sources_of(plans)]
    if isinstance(plans, StepPlan):
        return Stepwise(plans, kernels[0])
    return Chunked(plans, tuple(kernels))


def _tokens_each(call: Call) -> float:
    tokens = call.sizes.get("T", 1)
    return tokens / max(call.sizes["B"], 1) if call.packed else tokens


def _aligned(tensor: torch.Tensor) -> bool:
    size = tensor.element_size()
    steps = [s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    return tensor.data_ptr() % 16 == 0 and all(s % 16 == 0 and s * size % 16 == 0 for s in steps)


def completed(call: Call, spec: Spec) -> Spec:
    """The spec with the size of every axis a tile may hold, and the given states by themselves."""
    given = {initial_name(n): call.tensors[n] for n in spec.given_states}
    states = given | {final_name(n): t for n, t in _finals(call).items()}
    axes = [call.patterns[n].axes for n in call.program.state_names]
    static = {a: call.sizes[a] for held in axes for a in held[-2:] if a not in ("B", "T")}
    systems = 1
    for axis in axes[0][:-2]:
        systems *= call.sizes[axis]
    return replace(
        spec,
        dtypes=spec.dtypes + tuple((n, _NAMES[t.dtype]) for n, t in given.items()),
        static=tuple(sorted((static | dict(spec.static)).items())),
        aligned=spec.aligned.union(n for n, t in states.items() if _aligned(t)),
        buckets=(("systems", 1 << max(systems - 1, 0).bit_length()),),
    )


def _finals(call: Call) -> dict[str, torch.Tensor]:
    """Where states after the last token go: tensors of their own, or the pools."""
    return {**call.final_states, **{n: pool.pool for n, pool in call.pools.items()}}


# --- launching ----------------------------------------------------------------------------------


def common(call: Call, plan: ScanPlan) -> dict[str, torch.Tensor | float]:
    """The call's own tensors, numbers and sizes by parameter name."""
    values: dict[str, torch.Tensor | float] = {**call.tensors, **call.outputs}
    values |= {initial_name(n): call.tensors[n] for n in plan.given}
    values |= {final_name(n): t for n, t in _finals(call).items()}
    for name, pool in call.pools.items():
        values |= {f"{name}_slots": pool.slots, f"{name}_out_slots": pool.written}
        values[f"{name}_out_width"] = pool.written.shape[-1]
    values |= {f"{n}_value": v for n, v in call.scalars.items()}
    values |= {f"n_{a}": n for a, n in call.sizes.items()}
    if call.cu_seqlens is not None:
        values["cu_seqlens"] = call.cu_seqlens
    return values


def points(call: Call, plan: ScanPlan) -> int:
    """Programs per sequence."""
    n = plan.axis(plan.blocked).blocks if plan.blocked else 1
    for axis in plan.grid_axes:
        n *= call.sizes[axis]
    return n


def launch(kernel: Kernel, programs: int, values: Mapping[str, torch.Tensor | float]) -> None:
    """Launch a kernel over some programs with what it takes of the values."""
    wanted = {a.name: values[a.name] for a in kernel.plan.args}
    kernel.launch((programs,), wanted)


def _run_step(call: Call, chosen: Stepwise) -> None:
    values = common(call, chosen.plan)
    values["tokens"] = call.sizes.get("T", 1)
    launch(chosen.kernel, call.sizes["B"] * points(call, chosen.plan), values)


def _buffers(plans: ChunkedPlans, systems: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What ``prepare`` and ``mix`` leave; every place that is read is written before."""
    found: dict[str, torch.Tensor] = {}
    for plan in (plans.prepare, plans.mix):
        for arg in plan.args if plan is not None else ():
            if isinstance(arg, TensorArg) and arg.written and arg.name not in found:
                each = plans.state.line_stride if arg.name == "lines" else ROWS * ROWS
                dtype = _BITS[arg.dtype]
                found[arg.name] = torch.empty(systems * each, dtype=dtype, device=device)
    return found


def _chunks(call: Call, plan: ChunkPlan) -> tuple[int, dict[str, torch.Tensor | float]]:
    """The number of chunks (an upper bound for packed calls), and where each lies."""
    tokens = call.sizes["T"]
    if call.cu_seqlens is not None:
        table = tile_table(call.cu_seqlens, plan.tokens, tokens)
        offsets = tile_offsets(call.cu_seqlens, plan.tokens)
        return table.shape[0], {"chunks": table.view(-1), "first_chunks": offsets}
    each = -(-tokens // plan.tokens)
    return call.sizes["B"] * each, {"tokens_given": tokens, "chunks_each": each}


def _run_chunked(call: Call, chosen: Chunked) -> None:
    plans = chosen.plans
    systems, places = _chunks(call, plans.state)
    for axis in plans.state.system_axes:
        systems *= call.sizes[axis]
    values = common(call, plans.state) | places
    values |= _buffers(plans, systems, call.device)
    for kernel in chosen.kernels:
        plan = kernel.plan
        if isinstance(plan, SystemPlan):
            launch(kernel, systems // plan.shared, values)
        else:
            launch(kernel, call.sizes["B"] * points(call, plans.state), values)
