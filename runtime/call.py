"""A bound call: tensors that have passed every check, in the form the lowerings take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from attncc.dsl.axes import Pattern
from attncc.dsl.ir import Program
from attncc.runtime.pools import StatePool
from attncc.runtime.quantised import Scales


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op, checked and complete. Lowerings read it and write its output tensors.

    Dense calls keep the declared patterns. In packed calls tensors that have ``T`` or ``S`` lose
    their ``B`` axis (sequence b occupies rows ``cu_seqlens[b] .. cu_seqlens[b + 1]`` of T); states
    keep it.

    Attributes:
        program: the traced declaration.
        tensors: each given tensor by name, innermost axis dense; histories are whole tensors: the
            caller's own ``[B, S, ...]``, or a cache's ``[B, capacity, ...]``.
        scalars: host numbers by name.
        patterns: memory axes of each tensor as given (outputs included).
        sizes: every axis. ``B`` counts sequences. Packed: ``T`` (``S``) is the total number of
            rows. With a cache ``S`` is its capacity.
        dtype: dtype of the activations.
        device: where everything lives.
        cu_seqlens: int32 ``[B + 1]`` over T, or None for dense.
        cu_seqlens_k: int32 ``[B + 1]`` over S (packed without a cache), or None.
        lengths: int32 ``[B]``, tokens in each history *before* this call's, or None without a
            cache. The history's length during the call is ``lengths + T_b``.
        new_rows: with a cache: this call's rows of each history tensor, to be appended first.
        outputs: tensors to write by output name.
        final_states: tensors to write by state name (never the given state's memory unless it is
            the same).
        block_table: int32 ``[B, most pages]`` where the histories lie in pages, else None; their
            patterns have axes ``pages`` and ``page`` then, and ``S`` is what a row has room for.
        pools: by name, states that are read from a pool and updated there: ``tensors`` holds the
            pool (B counts its slots), ``final_states`` does not have them.
        scales: of the histories that are stored as e4m3, by name.
        lse: fp32 tensor to write, natural log, or None; its axes are ``lse_axes``.
        lse_axes: memory axes of ``lse`` (the fold's batch and row axes, T as in the outputs).
    """

    program: Program
    tensors: Mapping[str, torch.Tensor]
    scalars: Mapping[str, float]
    patterns: Mapping[str, Pattern]
    sizes: Mapping[str, int]
    dtype: torch.dtype
    device: torch.device
    outputs: Mapping[str, torch.Tensor]
    final_states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    new_rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    block_table: torch.Tensor | None = None
    pools: Mapping[str, StatePool] = field(default_factory=dict)
    scales: Mapping[str, Scales] = field(default_factory=dict)
    lse: torch.Tensor | None = None
    lse_axes: Pattern | None = None

    @property
    def results(self) -> dict[str, torch.Tensor]:
        """What the call returns, in order: states, outputs, lse."""
        lse = {} if self.lse is None else {"lse": self.lse}
        return {**self.final_states, **self.outputs, **lse}

    @property
    def packed(self) -> bool:
        """Whether sequences lie end to end along T."""
        return self.cu_seqlens is not None

    def tokens(self) -> int:
        """Upper bound of a sequence's tokens in this call, without reading the device."""
        return self.sizes.get("T", 1)


def aligned(tensor: torch.Tensor) -> bool:
    """Whether kernels may read its rows 16 bytes at a time: where it starts, and every stride."""
    size = tensor.element_size()
    steps = [s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    return tensor.data_ptr() % 16 == 0 and all(s % 16 == 0 and s * size % 16 == 0 for s in steps)


def in_pieces(tensor: torch.Tensor) -> bool:
    """Whether what belongs to each place of the outermost axis lies in one piece."""
    step = 1
    for n, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if n > 1 and stride != step:
            return False
        step *= n
    return True
