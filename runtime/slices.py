"""Long dense prompts of few heads, cut in time so that two kernels share the device.

The state pass goes from chunk to chunk, so with few heads most multiprocessors would idle beside
it, and wait for nothing but the systems, which depend on no state. A slice's state pass runs while
the systems of the next slice are solved: on a stream of its own, whose programs come first.

A slice starts from the state that the one before left, in fp32, so the cuts change no result by
more than rounding to fp32 does; a state that is stored in 16 bits is never cut.

A call that comes again, or is prepared, is recorded with both streams
(:mod:`attncc.runtime.lanes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch

from attncc.codegen.affine_choices import MULTIPROCESSORS
from attncc.codegen.plan_affine import ChunkedPlans, SystemPlan
from attncc.dsl.graph import walk
from attncc.dsl.ir import Index, Program, Push
from attncc.runtime import recorder
from attncc.runtime.call import Call, aligned
from attncc.runtime.lanes import AHEAD, beside
from attncc.runtime.tables import clear

if TYPE_CHECKING:
    from attncc.runtime.affine import Chunked

LEAST_TOKENS = 8192
"""Shorter prompts are not cut; a longer one has about so many tokens a slice."""
MOST = 8
ROOM = 0.6
"""Of the device: a state pass of more programs leaves too little for the systems."""


def slices_of(call: Call, plans: ChunkedPlans, programs: int) -> int:
    """Into how many slices a call is cut; 1 where a cut cannot be made or would not pay.

    Args:
        call: the call.
        plans: of its kernels.
        programs: of the state pass.
    """
    tokens = call.sizes["T"]
    whole = plans.prepare is None or bool(plans.across)
    if whole or not sliceable(call) or not _lie_alike(call):
        return 1
    if tokens < LEAST_TOKENS or programs > ROOM * MULTIPROCESSORS:
        return 1
    return max(2, min(MOST, tokens // LEAST_TOKENS))


def sliceable(call: Call) -> bool:
    """Whether calls of this kind may be cut, whatever their sizes, if they have systems."""
    states = [*call.final_states.values()]
    states += [call.tensors[n] for n in call.program.state_names if n in call.tensors]
    if call.packed or call.pools or call.lengths is not None:
        return False
    return all(s.dtype == torch.float32 for s in states) and not _looks_elsewhere(call.program)


def _looks_elsewhere(program: Program) -> bool:
    """Whether a token's work depends on where it is in the prompt, or on the tokens before it."""
    return any(
        isinstance(n, Push) or (isinstance(n, Index) and n.axis == program.scan)
        for n in walk(*program.roots)
    )


def _lie_alike(call: Call) -> bool:
    """Whether states lie between slices as kernels for the given ones may take them to."""
    finals = call.final_states.items()
    return all(aligned(t) or not aligned(call.tensors.get(n, t)) for n, t in finals)


def with_states(call: Call) -> Call:
    """The call with every state given: those that were not lie where they will be left."""
    return replace(call, tensors={**call.final_states, **call.tensors})


def cut(call: Call, slices: int, chunk: int) -> Iterator[Call]:
    """The calls of the slices, views of this one's tensors.

    Args:
        call: a dense call with all its states.
        slices: their number; whole chunks each, and the rest in the last.
        chunk: tokens of a chunk.
    """
    tokens = call.sizes["T"]
    each = -(-tokens // (slices * chunk)) * chunk
    for first in range(0, tokens, each):
        count = min(each, tokens - first)
        tensors = {n: _part(call, n, x, first, count) for n, x in call.tensors.items()}
        if first:
            tensors |= call.final_states
        outputs = {n: _part(call, n, x, first, count) for n, x in call.outputs.items()}
        sizes = {**call.sizes, "T": count}
        yield replace(call, tensors=tensors, outputs=outputs, sizes=sizes)


def _part(call: Call, name: str, x: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """A slice of a tensor along T, which is the outermost of its axes in one of the dimensions."""
    for at, axes in enumerate(call.patterns[name].dims):
        if axes and axes[0] == "T":
            rows = prod(call.sizes[a] for a in axes[1:])
            return recorder.view(x.narrow(at, first * rows, count * rows), x)
    return x


def run(call: Call, chosen: Chunked, slices: int) -> None:
    """Run a chunked scan slice by slice.

    Args:
        call: with every state given (:func:`with_states`).
        chosen: its kernels: those of the systems, and the state pass.
        slices: their number.
    """
    from attncc.runtime import affine

    plan = chosen.plans.state
    solving = [k for k in chosen.kernels if isinstance(k.plan, SystemPlan)]
    [carrying] = [k for k in chosen.kernels if k not in solving]
    for name, final in call.final_states.items():
        if call.tensors[name] is final:  # not given: see :func:`with_states`
            clear(final)
    ahead, held = Ahead(call.device), []  # nothing is freed, for others to use, before the end
    try:
        for part in cut(call, slices, plan.tokens):
            systems, values = affine.prepared(part, chosen.plans)
            held.append(values)
            for kernel in solving:
                assert isinstance(kernel.plan, SystemPlan)
                affine.launch(kernel, kernel.plan.programs(systems), values)
            with ahead.after():
                units = call.sizes["B"] * affine.points(call, plan)
                affine.carry(carrying, units, values, call.device)
    finally:  # without memory for a later slice too: what was launched still uses what is held
        ahead.join()


class Ahead:
    """The state pass' stream beside the caller's; without a GPU, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._own = torch.cuda.current_stream(device)
            self._stream = beside(self._own.device_index, self._own.cuda_stream, AHEAD)

    @contextmanager
    def after(self) -> Iterator[None]:
        """What is launched inside comes after what the caller's stream has so far."""
        recorder.wait(AHEAD, on=0)
        with recorder.on_lane(AHEAD):
            if self._stream is None:
                yield
                return
            self._stream.wait_event(self._own.record_event())
            with torch.cuda.stream(self._stream):
                yield

    def join(self) -> None:
        """Let the caller's stream wait for what was launched inside."""
        recorder.wait(0, on=AHEAD)
        if self._stream is not None:
            self._own.wait_event(self._stream.record_event())
