"""cuDNN's kernels for a call: builds, keeps and runs what ``codegen.emit.cudnn`` describes.

Our checks come first: cuDNN's own validation takes wrong row counts. Whatever cuDNN then says
against a graph is passed on word for word. Only GPUs of the SM100 family have its kernels.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from attncc.codegen.emit.cudnn import ONES, SEQLENS, GraphPlan, GraphTensor, Laid, describe_graph
from attncc.codegen.forms import AffineForm, Analysis, Refusal
from attncc.dsl.axes import Pattern
from attncc.dsl.errors import BackendError, RefusedError
from attncc.dsl.ir import Program
from attncc.runtime import checks, recorder
from attncc.runtime.call import Call
from attncc.runtime.cudnn_found import (
    FRONTEND,
    POOLS,
    dots,
    package_problem,
    problem,
    target_of,
    target_problem,
    version_of,
)

MOST = 64
"""Graphs that are kept; each stands for one set of shapes."""
REMEMBERED = 1024
"""Descriptions that are kept, small as they are."""
_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32",
}  # fmt: skip
_VECTOR = Pattern((("i",),))
_TYPES = {"fp32": "FLOAT", "bf16": "BFLOAT16", "fp16": "HALF", "i32": "INT32"}


# --- a call's graph -----------------------------------------------------------------------------


def plan_of(call: Call, analysis: Analysis) -> GraphPlan:
    """The graph of a call, after our own checks.

    Raises:
        RefusedError: there is none, and why.
    """
    op, form = call.program.name, analysis.affine
    if form is None:
        raise RefusedError("cuDNN has no such node: not one affine state", op=op)
    if not call.sizes.get("T"):
        raise RefusedError("there are no tokens for cuDNN", op=op)
    tensors = _tensors(call, form)
    found = _described(call, form, tensors)
    if isinstance(found, Refusal):
        raise RefusedError(found.reason, op=op, loc=found.loc)
    _check_pools(call)
    for t in (*found.inputs, *found.outputs):
        if t.source != ONES:
            _check_alignment(op, t, tensors[t.source].data_ptr())
    return found


def _described(
    call: Call, form: AffineForm, tensors: Mapping[str, torch.Tensor]
) -> GraphPlan | Refusal:
    """The graph's description, remembered by everything that it follows from."""
    laid = tuple((n, t.shape, t.stride(), t.dtype) for n, t in tensors.items())
    # The program stays in the table, so its identity is not used again.
    key = (id(call.program), laid, tuple(call.sizes.items()), tuple(call.scalars.items()))
    known = _DESCRIBED.get(key)
    if known is None:
        layouts = {n: _laid(call, n, t) for n, t in tensors.items()}
        pool = form.state in call.pools
        made = describe_graph(call.program, form, layouts, call.sizes, call.scalars, pool=pool)
        if len(_DESCRIBED) >= REMEMBERED:
            _DESCRIBED.clear()
        known = _DESCRIBED[key] = (call.program, made)
    return known[1]


def _tensors(call: Call, form: AffineForm) -> dict[str, torch.Tensor]:
    """Everything a graph may name."""
    found = {**call.tensors, **call.outputs}
    pool = call.pools.get(form.state)
    if pool is not None:
        found |= {f"final {form.state}": pool.pool, f"{form.state}.slots": pool.slots}
    found |= {f"final {n}": t for n, t in call.final_states.items()}
    if call.cu_seqlens is not None:
        found[SEQLENS] = call.cu_seqlens
    return found


def _laid(call: Call, name: str, tensor: torch.Tensor) -> Laid:
    pattern = call.patterns.get(name.removeprefix("final ").removesuffix(".slots"))
    if pattern is None or pattern.rank != tensor.dim():  # offsets and slots have no layout
        pattern = _VECTOR
    dtype = _NAMES.get(tensor.dtype, str(tensor.dtype))
    return Laid(pattern, tuple(tensor.shape), tensor.stride(), dtype)


def _check_pools(call: Call) -> None:
    for name, pool in call.pools.items():
        if pool.out_slots is not None:
            raise RefusedError(
                "cuDNN writes the slot that it reads, no out-slots", op=call.program.name
            )
        found = version_of(FRONTEND)
        if found is not None and found < POOLS:
            raise RefusedError(
                f"{FRONTEND} {dots(found)} has no states in pools ({dots(POOLS)} has)",
                op=call.program.name,
            )
        if not checks.looks(pool.slots):
            raise RefusedError(
                f"cuDNN has no slot -1, and nobody looks whether {name} names one (the check knob "
                "does, but not while a graph is captured)", op=call.program.name, argument=name,
            )  # fmt: skip
        if bool((pool.slots < 0).any()):
            raise RefusedError(f"cuDNN has no slot -1, which {name} names", op=call.program.name)


def _check_alignment(op: str, t: GraphTensor, address: int) -> None:
    """Innermost axes are dense; operands and states are fetched in blocks of 16 bytes."""
    size = 4 if t.dtype in ("fp32", "i32") else 2
    outer = [s for n, s in zip(t.dims[:-1], t.strides[:-1], strict=True) if n > 1]
    dense = t.dims[-1] == 1 or t.strides[-1] == 1
    blocks = address % 16 == 0 and not any(s * size % 16 for s in outer)
    if not dense or 0 in outer or (len(t.dims) > 2 and not blocks):
        raise RefusedError(
            f"cuDNN wants the innermost axis of {t.source} dense, no stride of 0, and rows and "
            f"heads at multiples of 16 bytes (strides {t.strides} from address {address:#x})",
            op=op, argument=t.source,
        )  # fmt: skip


# --- cuDNN --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Built:
    """A graph that cuDNN has a plan for; ``warm`` once it has run, which compiles its kernels."""

    graph: Any
    warm: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_DESCRIBED: dict[object, tuple[Program, GraphPlan | Refusal]] = {}
_GRAPHS: OrderedDict[tuple[GraphPlan, int | None], _Built | str] = OrderedDict()
_LOCK = threading.Lock()
_HANDLES = threading.local()


def _after_fork() -> None:
    global _LOCK, _HANDLES
    _LOCK, _HANDLES = threading.Lock(), threading.local()  # another thread may have held the lock
    _GRAPHS.clear()


os.register_at_fork(after_in_child=_after_fork)


def make_graph(plan: GraphPlan) -> Any:
    """The frontend's graph of a description, validated; needs no GPU."""
    import cudnn

    graph = cudnn.pygraph()
    types = {name: getattr(cudnn.data_type, kind) for name, kind in _TYPES.items()}
    ports = {
        t.port: graph.tensor(
            dim=list(t.dims), stride=list(t.strides), data_type=types[t.dtype], uid=t.uid,
            name=t.port,
        )
        for t in plan.inputs
    }  # fmt: skip
    made = getattr(graph, plan.node)(**ports, **dict(plan.attributes), name=plan.node)
    for tensor, t in zip(made, plan.outputs, strict=False):  # checkpoints of states are not asked
        tensor.set_uid(t.uid).set_dim(list(t.dims)).set_stride(list(t.strides))
        tensor.set_data_type(types[t.dtype]).set_output(True)
    graph.validate()
    return graph


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _build(plan: GraphPlan, device: torch.device) -> _Built | str:
    """The graph with its execution plan, or what cuDNN says against it."""
    import cudnn

    try:
        with _on(device):
            graph = make_graph(plan)
            graph.build([cudnn.heur_mode.A])
    except Exception as declined:  # its engines raise errors of many classes
        return f"cuDNN declines: {declined}"
    return _Built(graph)


def built(plan: GraphPlan, device: torch.device) -> _Built | str:
    """The same, kept: the graphs that were used last."""
    key = (plan, device.index)
    with _LOCK:
        found = _GRAPHS.get(key)
        if found is None:
            found = _GRAPHS[key] = _build(plan, device)
        _GRAPHS.move_to_end(key)
        while len(_GRAPHS) > MOST:
            _GRAPHS.popitem(last=False)
    return found


def considered(call: Call, phase: str) -> bool:
    """Whether ``auto`` asks cuDNN first: where its kernels are, for prompts, without pools.

    A pool may have slots of -1, which cuDNN does not know; a call that is prepared is one of
    launches that can be done again without cuDNN.
    """
    recording = recorder.current()
    free = recording is None or not recording.strict
    return phase == "prefill" and not call.pools and free and problem(call.device) is None


def attempt(call: Call, analysis: Analysis, phase: str, *, named: bool) -> bool:
    """Run cuDNN's kernels where they were asked for by name, or are what ``auto`` takes.

    Returns:
        Whether they ran; if not, nothing was written.

    Raises:
        BackendError: they were asked for by name and cannot run this call, and why.
    """
    if not named and (analysis.affine is None or not considered(call, phase)):
        return False
    try:
        run(call, analysis)
    except RefusedError as refused:
        if not named:
            return False
        raise BackendError(
            f"no cuDNN kernel: {refused.message}", op=call.program.name, argument="backend",
            loc=refused.loc,
        ) from refused  # fmt: skip
    return True


def run(call: Call, analysis: Analysis) -> None:
    """Run a call with cuDNN's kernels and write its results.

    Raises:
        RefusedError: it cannot, and why, in cuDNN's words where it was asked; nothing is written.
    """
    op = call.program.name
    plan = plan_of(call, analysis)
    found = package_problem() or built(plan, call.device)
    if isinstance(found, str):
        away = target_problem(target_of(call.device))
        raise RefusedError("; ".join(filter(None, (away, found))), op=op)
    assert analysis.affine is not None
    if not found.warm and _capturing(call.device):
        raise RefusedError(
            "cuDNN compiles its kernels at the first execution: make the call once before a "
            "graph is captured", op=op,
        )  # fmt: skip
    recorder.refuse("cuDNN runs it")
    pack = dict(_pack(call, analysis.affine, plan))
    if found.warm:
        execute(found.graph, pack, call.device)
    else:
        _execute_first(op, plan, found, pack, call.device)


def _execute_first(
    op: str, plan: GraphPlan, found: _Built, pack: Mapping[int, torch.Tensor], device: torch.device
) -> None:
    """The execution that compiles; a graph whose kernels do not compile is not tried again."""
    with found.lock:
        try:
            execute(found.graph, pack, device)
        except Exception as declined:  # of many classes, as in building
            reason = f"cuDNN declines: {declined}"
            with _LOCK:
                _GRAPHS[plan, device.index] = reason
            raise RefusedError(reason, op=op) from declined
        found.warm = True


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _pack(call: Call, form: AffineForm, plan: GraphPlan) -> Iterator[tuple[int, torch.Tensor]]:
    """The call's tensors by their numbers, as the graph sees them."""
    tensors = _tensors(call, form)
    for t in (*plan.inputs, *plan.outputs):
        if t.source == ONES:
            yield t.uid, torch.ones(t.dims, dtype=torch.float32, device=call.device)
        else:
            yield t.uid, tensors[t.source].as_strided(t.dims, t.strides)


def execute(graph: Any, pack: Mapping[int, torch.Tensor], device: torch.device) -> None:
    """Run a built graph on the current stream.

    The workspace comes from the stream's own pool (under capture from the graph's), which aligns
    to more than the 128 bytes that cuDNN wants.
    """
    import cudnn

    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        size = max(graph.get_workspace_size(), 1)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        assert workspace.data_ptr() % 128 == 0
        handle = _handle(device)
        cudnn.set_stream(handle=handle, stream=stream.cuda_stream)
        graph.execute(dict(pack), workspace=workspace, handle=handle)


def _handle(device: torch.device) -> Any:
    """This thread's handle for a device: handles are not thread-safe, and making one allocates.

    It is bound to the current stream before every execution.
    """
    import cudnn

    index = torch.cuda.current_device() if device.index is None else device.index
    held: dict[int, Any] = _HANDLES.__dict__.setdefault("by_device", {})
    if index not in held:
        held[index] = cudnn.create_handle()
    return held[index]
