"""The kernels that our call launches, as people launch Triton kernels: ``kernel[grid]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.case import Work


def launched(
    op: Any, phase: str, arguments: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
) -> Work:
    """The kernels of one call with the same tensors and numbers.

    Args:
        op: the op.
        phase: ``prefill`` or ``decode``.
        arguments: of the call, ``out`` among them.
        outputs: what it writes, by name.

    Raises:
        BackendError: something else than kernels runs the call.
        ValueError: it also needs device work that is no kernel.
    """
    from attncc.runtime.recorded import record
    from attncc.runtime.recording import Launch
    from attncc.runtime.replay import flat_values

    found = record(op, phase, (), arguments, strict=True)
    assert found.recording is not None
    work = found.recording.work
    if not all(isinstance(w, Launch) for w in work):
        raise ValueError("the call is not kernels only")
    frame = [*found.leaves.tensors.values()]
    frame += [
        torch.zeros(b.shape, dtype=b.dtype, device=found.recording.device)
        for b in found.recording.workspaces
    ]
    numbers = [*found.leaves.numbers.values()]
    ready = []
    for launch in work:
        plan = launch.kernel.plan
        options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
        flat = flat_values(launch, frame, numbers)
        ready.append((launch.kernel.function, launch.grid, flat, options))

    def fn() -> Mapping[str, torch.Tensor]:
        for kernel, grid, flat, options in ready:
            kernel[grid](*flat, **options)
        return outputs

    return Work(fn, dict(outputs))
