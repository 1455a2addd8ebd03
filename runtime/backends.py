"""Which lowering runs a call: the choice, and what can be said about it without running.

``auto`` takes cuDNN's kernels where cuDNN serves the call; else generated kernels on a GPU (and in
Triton's interpreter): in the dialect that the tables of plans name, or in Triton where that has no
text for one; else the torch lowering. A named backend runs or raises; nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from attncc.codegen.forms import Analysis
from attncc.codegen.passes.associate import is_open
from attncc.codegen.pipeline import analyse, kernel_sources
from attncc.codegen.plan import Spec
from attncc.codegen.plan_table import describe, find_entry
from attncc.codegen.quantised import Scaled
from attncc.codegen.render import Source
from attncc.codegen.specialise import static_sizes
from attncc.codegen.target import can_chain
from attncc.dsl.axes import PAGE, Pattern
from attncc.dsl.build import Declaration
from attncc.dsl.errors import BackendError, RefusedError
from attncc.dsl.ir import Program
from attncc.runtime import dialects, knobs, recorder
from attncc.runtime.call import Call, aligned
from attncc.runtime.cudnn_found import target_of, target_problem
from attncc.runtime.dialects import CUTEDSL, GLUON, dialect_for
from attncc.runtime.explain import explain_program
from attncc.runtime.gathered import write_pools
from attncc.runtime.orders import order_of, order_text
from attncc.runtime.reference import reference_results
from attncc.runtime.tuned import local_table

CUDNN = "cudnn"
BACKENDS = ("auto", "reference", "torch", "triton", GLUON, CUTEDSL, CUDNN)
TRITON_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32",
    torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8",
}  # fmt: skip


def run(call: Call, phase: str, backend: str | None = None) -> None:
    """Run a bound call and write its outputs.

    Args:
        call: the call.
        phase: ``prefill`` or ``decode``.
        backend: one of ``BACKENDS``; None takes the environment's choice.

    Raises:
        BackendError: no such backend, or the named one cannot run this call; the message says why.
    """
    name = backend or knobs.backend()
    op = call.program.name
    if name not in BACKENDS:
        raise BackendError(
            "no such backend", op=op, argument="backend", expected=", ".join(BACKENDS), found=name
        )
    if name not in ("reference", CUDNN) and is_open(call.program):
        from attncc.runtime import stages

        stages.run(call, phase, name)
        return
    analysis = analyse(call.program)
    if name == "reference":
        _run_reference(call)
    elif name == "torch" or (name == "auto" and not has_triton(call)):
        run_eager(call, analysis)
    elif name not in ("auto", CUDNN) or not _cudnn(call, analysis, phase, named=name == CUDNN):
        _run_triton(call, analysis, phase, name)


def _cudnn(call: Call, analysis: Analysis, phase: str, *, named: bool) -> bool:
    if not named and target_problem(target_of(call.device)):
        return False
    from attncc.runtime.cudnn_graph import attempt

    return attempt(call, analysis, phase, named=named)


def run_eager(call: Call, analysis: Analysis) -> None:
    """Run the torch lowering."""
    from attncc.runtime.eager.run import run

    recorder.refuse("the torch lowering runs it")
    run(call, analysis)


def has_triton(call: Call) -> bool:
    """Whether generated kernels run where the call's tensors are."""
    return call.device.type == "cuda" or knobs.interpreting()


def _run_triton(call: Call, analysis: Analysis, phase: str, backend: str) -> None:
    need_triton(call)
    program = call.program
    spec = replace(spec_of(call), dialect=dialect_for(backend, program.name, phase))
    try:
        dialects.need_form(spec.dialect, analysis, program.name)
        dialects.in_turn(program, spec, phase, lambda own: run_kernels(call, analysis, own, phase))
    except RefusedError as refused:
        if backend != "auto":
            raise no_kernel(backend, refused) from refused
        run_eager(call, analysis)


def need_triton(call: Call) -> None:
    """Raise BackendError if nothing here runs generated kernels."""
    if not has_triton(call):
        raise BackendError(
            "Triton kernels need a GPU", op=call.program.name, argument="backend",
            expected="cuda", found=str(call.device),
        )  # fmt: skip


def no_kernel(backend: str, refused: RefusedError) -> BackendError:
    """A named backend cannot run a call."""
    text = f"no {backend.title()} kernel: {refused.message}"
    return BackendError(text, op=refused.op, argument="backend", loc=refused.loc)


def run_kernels(
    call: Call, analysis: Analysis, spec: Spec, phase: str, *, parts: int | None = None
) -> None:
    """Run a call's generated kernels, whatever they cost to compile.

    Args:
        call: the call.
        analysis: its program's forms.
        spec: what selects the kernels; :func:`spec_of` the call, or one with another table.
        phase: ``prefill`` or ``decode``.
        parts: ranges of keys, or segments, that each sequence is cut into; None lets sizes decide.

    Raises:
        RefusedError: no kernel covers the call; nothing has been launched.
    """
    from attncc.runtime import selfcheck

    with selfcheck.running(call, analysis, spec, phase):
        _run_family(call, analysis, spec, phase, parts)


def _run_family(call: Call, analysis: Analysis, spec: Spec, phase: str, parts: int | None) -> None:
    # A family is imported with the first call of it: the others are a third of that call's time.
    if analysis.softmax is not None:
        from attncc.runtime import softmax

        softmax.run(call, analysis.softmax, spec, phase, splits=parts)
    elif analysis.selected is not None:
        from attncc.runtime import selected

        selected.run(call, analysis.selected, spec, phase, splits=parts)
    elif analysis.pointwise:
        from attncc.runtime import pointwise

        pointwise.run(call, spec)
    elif call.program.scan is None:
        raise RefusedError("; ".join(map(str, analysis.refusals)), op=call.program.name)
    else:
        _run_scan(call, analysis, spec, phase, parts)


def _run_scan(call: Call, analysis: Analysis, spec: Spec, phase: str, parts: int | None) -> None:
    from attncc.runtime import window

    if not window.run(call, analysis, spec):
        from attncc.runtime import affine, rows_apart, running

        if running.run(call, analysis, spec, phase, parts):
            return
        if rows_apart.run(call, spec, phase, parts):
            return
        affine.run(call, analysis, spec, phase, segments=parts)


def _run_reference(call: Call) -> None:
    recorder.refuse("the reference runs it")
    results, tokens = reference_results(call)
    for name, tensor in {**call.final_states, **call.outputs}.items():
        tensor.copy_(results[name])
    if call.lse is not None:
        call.lse.copy_(results["lse"])
    if call.pools:
        write_pools(call, results, tokens)
    if call.new_rows:
        from attncc.runtime.eager.append import append

        append(call)


def target_for(device: torch.device) -> str:
    """What kernels for calls on a device are planned for: its own name, ``sm_90`` without a GPU."""
    return target_of(device) if device.type == "cuda" else "sm_90"


def _bucket(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _pages(call: Call) -> tuple[tuple[str, Pattern], ...]:
    """Memory axes of the histories that lie in pages."""
    if call.block_table is None:
        return ()
    return tuple((name, call.patterns[name]) for name in call.new_rows)


def _static(call: Call) -> tuple[tuple[str, int], ...]:
    sizes = static_sizes(call.program, call.sizes)
    return sizes if call.block_table is None else (*sizes, (PAGE, call.sizes[PAGE]))


def spec_of(call: Call) -> Spec:
    """What of a call selects its kernels; lengths only in buckets, for the choice between plans."""
    tensors = {**call.tensors, **call.final_states, **call.outputs}
    tensors |= {f"new_{name}": t for name, t in call.new_rows.items()}
    if call.lse is not None:
        tensors["lse"] = call.lse
    target = target_for(call.device)
    return Spec(
        dtypes=tuple(sorted((n, TRITON_NAMES[t.dtype]) for n, t in tensors.items())),
        static=_static(call),
        packed=call.packed,
        lengths=call.lengths is not None,
        aligned=frozenset(n for n, t in tensors.items() if aligned(t)),
        return_lse=call.lse is not None,
        target=target,
        buckets=tuple((a, _bucket(call.sizes[a])) for a in ("B", "T", "S") if a in call.sizes),
        given_states=frozenset(n for n in call.program.state_names if n in call.tensors),
        pages=_pages(call),
        pools=frozenset(call.pools),
        token_slots=frozenset(n for n, pool in call.pools.items() if pool.each_token),
        quantised=tuple(_scaled(call, name) for name in sorted(call.scales)),
        tuned=local_table(target),
        chained=call.device.type == "cuda" and can_chain(target),
    )


def _scaled(call: Call, name: str) -> Scaled:
    own = call.scales[name]
    dtype, value = TRITON_NAMES[own.tensor.dtype], TRITON_NAMES[call.dtype]
    operand = "fp32" if value == "fp32" else "fp16"
    rows = aligned(own.tensor)
    return Scaled(name, own.axis, own.block, own.pattern, dtype, operand, value, rows)


def sources(
    declaration: Declaration,
    *,
    sizes: Mapping[str, int],
    target: str = "sm_90",
    phase: str = "prefill",
    dtype: str = "bf16",
    packed: bool = False,
    given: frozenset[str] | None = None,
    backend: str = "auto",
) -> list[Source]:
    """The kernels a call of this kind would launch, generated without running anything.

    Args:
        declaration: the op.
        sizes: sizes of the head dims and groups; ``B``, ``T``, ``S`` only steer the choice of plan.
        target: compute capability, for instance ``sm_90``.
        phase: ``prefill`` or ``decode``.
        dtype: ``bf16``, ``fp16`` or ``fp32``, of every tensor but the states (fp32).
        packed: for packed sequences.
        given: optional inputs that are present; all when None.
        backend: ``gluon``, ``cutedsl`` or ``triton`` for that dialect; ``auto`` as the
            tables of plans say.

    Raises:
        RefusedError: there is no kernel, with the line and the reason.
        BackendError: the backend has no generated kernels.
    """
    dialect = dialects.named_dialect(backend, declaration.name)
    program, spec = _typical(declaration, sizes, target, phase, dtype, packed, given)
    dialects.need_form(dialect, analyse(program), program.name)
    spec = replace(spec, dialect=dialect)
    return dialects.printable(program, spec, phase, lambda own: kernel_sources(program, own, phase))


def _typical(
    declaration: Declaration, sizes: Mapping[str, int], target: str = "sm_90",
    phase: str = "prefill", dtype: str = "bf16", packed: bool = False,
    given: frozenset[str] | None = None,
) -> tuple[Program, Spec]:  # fmt: skip
    """The program and the spec of a call of this kind; see :func:`sources`."""
    typical = {"B": 8, "T": 4096 if phase == "prefill" else 1, "S": 4096, **sizes}
    program = declaration.trace(given, sizes)
    if is_open(program):
        program = order_of(program, typical, phase).program
    names = {t.name: dtype for t in program.tensors if not t.scalar}
    names |= {o.name: dtype for o in program.outputs}
    names |= dict.fromkeys(program.state_names, "fp32")
    names |= {f"new_{t.name}": dtype for t in program.tensors}
    return program, Spec(
        dtypes=tuple(sorted(names.items())),
        static=static_sizes(program, typical),
        packed=packed,
        aligned=frozenset(names),
        target=target,
        buckets=(*((a, _bucket(typical[a])) for a in ("B", "T", "S")), *_systems(program, typical)),
        given_states=frozenset(n for n in program.state_names if n in program.given),
        tuned=local_table(target),
        chained=can_chain(target),
    )


def _systems(program: Program, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """How many states a call of these sizes has; heads that are not given count as 8."""
    held = [t.pattern.axes[:-2] for t in program.tensors if t.name in program.state_names]
    if program.scan is None or not held:
        return ()
    return (("systems", _bucket(prod(sizes.get(a, 8) for a in held[0]))),)


def explain(declaration: Declaration, **kwargs: object) -> str:
    """Program, forms and refusals; with ``sizes=`` also the kernels that would run."""
    from attncc.runtime.cudnn_explain import cudnn_lines

    traced: dict[str, Any] = {n: kwargs[n] for n in ("given", "sizes") if n in kwargs}
    program = declaration.trace(**traced)
    text = explain_program(program, analyse(program))
    if "sizes" not in kwargs:
        return text
    try:
        text += order_text(declaration, **kwargs)  # type: ignore[arg-type]
        # Printing may still refuse.
        found = [s for s in sources(declaration, **kwargs) if s.text]  # type: ignore[arg-type]
    except RefusedError as refused:
        return f"{text}kernels: none: {refused.message}\n"
    target = str(kwargs.get("target", "sm_90"))
    lines = []
    for s in found:
        lines.append(f"  {s.entry}: {s.plan.num_warps} warps, {s.plan.num_stages} stages")
        entry = find_entry(s.plan.chosen, target, local_table(target))
        lines.append(f"    chosen {describe(entry, target)}")
    named = {n: v for n, v in kwargs.items() if n != "backend"}
    typical = _typical(declaration, **named)  # type: ignore[arg-type]
    phase = str(kwargs.get("phase", "prefill"))
    lines += dialects.gluon_lines(*typical, phase) + cudnn_lines(*typical, phase)
    return text + "kernels:\n" + "\n".join(lines) + "\n"
