"""The kernel of the systems and the state pass of a call at once, where few programs carry states.

The state pass waits for each chunk's systems on the device
(:mod:`attncc.codegen.plan_gluon_together`), so its programs hold multiprocessors while they wait.
That it ends rests on three things: the kernel that it waits for is launched first, its programs
leave a part of the device to that kernel, and on one device at most one such state pass runs at a
time, as all of them are on one stream. What cannot promise that does not take this way: where
processes share the device at once (MPS). In a graph, which may run beside others, the same kernels
follow each other: those of slices may not have been loaded when a call is captured.

One limit is left to the caller: a grid of another stream that needs all multiprocessors at once
(a cooperative launch over the whole device) may stand in line before the systems and behind the
programs that wait for them. A process that launches such kernels takes Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from attncc.codegen.plan_affine import ChunkedPlans, SystemPlan
from attncc.codegen.plan_chunks import ChunkTablePlan
from attncc.codegen.plan_gluon_state import WarpStatePlan
from attncc.codegen.plan_gluon_together import FLAGS
from attncc.dsl.errors import ToolchainError
from attncc.runtime import recorder, selfcheck
from attncc.runtime.call import Call
from attncc.runtime.driver import cuda
from attncc.runtime.lanes import TOGETHER, beside
from attncc.runtime.tables import clear

if TYPE_CHECKING:
    from attncc.runtime.affine import Chunked

LEAST_TOKENS = 4096
"""Fewer tokens do not pay for the second stream."""
ROOM = 0.6
"""Of the device: what programs that wait may hold."""
MPS_ENABLED = 133
"""``CU_DEVICE_ATTRIBUTE_MPS_ENABLED``."""


def fits(call: Call, plans: ChunkedPlans, programs: int) -> bool:
    """Whether a call's kernels may run beside each other, and would gain by it.

    Args:
        call: the call.
        plans: of its kernels.
        programs: of the state pass.
    """
    if plans.together is None or call.device.type != "cuda":
        return False
    index = call.device.index or 0
    tried = isinstance(plan := selfcheck.checked(), WarpStatePlan) and plan.awaited
    worth = call.sizes["T"] >= LEAST_TOKENS or tried  # a trial of these kernels is a small call
    return bool(worth) and programs <= _room(index) and not _shared(index)


@cache
def _room(device: int) -> int:
    """Programs that may wait, one a multiprocessor."""
    return int(ROOM * torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _shared(device: int) -> bool:
    """Whether other processes' kernels may be on the device at the same time."""
    try:
        return cuda().attribute(MPS_ENABLED, device) != 0
    except ToolchainError:
        return True


def run(call: Call, chosen: Chunked) -> None:
    """Run a chunked scan, its systems beside its state pass.

    Args:
        call: the call.
        chosen: the chunk table's kernel if there is one, that of the systems, and the state pass.
    """
    from attncc.runtime import affine

    systems, values = affine.prepared(call, chosen.plans)
    flags = values[FLAGS]
    assert isinstance(flags, torch.Tensor)
    clear(flags)
    *before, solving, carrying = chosen.kernels
    for kernel in before:
        assert isinstance(kernel.plan, ChunkTablePlan)
        affine.launch(kernel, -(-int(values["capacity"]) // kernel.plan.places), values)
    plan = solving.plan
    assert isinstance(plan, SystemPlan)
    programs = call.sizes["B"] * affine.points(call, chosen.plans.state)
    recorder.wait(TOGETHER, on=0)
    with _beside(call.device, partial(affine.launch, solving, plan.programs(systems), values)):
        affine.launch(carrying, programs, values)


@contextmanager
def _beside(device: torch.device, first: Callable[[], None]) -> Iterator[None]:
    """Launch on the caller's stream, and then what is inside on the one beside it.

    Args:
        device: of the call.
        first: what is launched on the caller's stream; what is inside does not come after it.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        first()
        with recorder.on_lane(TOGETHER):
            yield
        recorder.wait(0, on=TOGETHER)
        return
    own = torch.cuda.current_stream(device)
    stream = beside(own.device_index, own.cuda_stream, TOGETHER)
    event = own.record_event()
    first()
    stream.wait_event(event)
    try:
        with recorder.on_lane(TOGETHER), torch.cuda.stream(stream):
            yield
    finally:  # what was launched still uses what is freed behind this
        recorder.wait(0, on=TOGETHER)
        own.wait_event(stream.record_event())
