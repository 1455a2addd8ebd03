"""FlashInfer's gated delta rule (``attncc.gdn``): the gated delta product of one update a token."""

from __future__ import annotations

import torch

from attncc.dsl.errors import ArgumentError
from attncc.runtime.adapters.gdp import run_packed

__all__ = ["chunk_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    *,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule over packed prompts (Yang et al., Gated Delta Networks, 2024).

    Every argument is as of :func:`attncc.gdp.chunk_gated_delta_product` with n = 1, except that
    checkpoints of the state are not offered: their arguments must be left alone.

    Raises:
        ArgumentError: checkpoints are asked for.
        CallError: an argument does not fit; nothing was written.
        BackendError: the named backend cannot run this call, and why.
    """
    op = "chunk_gated_delta_rule"
    asked = {
        "state_checkpoints": state_checkpoints,
        "checkpoint_cu_starts": checkpoint_cu_starts,
        "checkpoint_every_n_tokens": checkpoint_every_n_tokens or None,
    }
    for name, value in asked.items():
        if value is not None:
            raise ArgumentError(
                "checkpoints of the state are not offered", op=op, argument=name,
                expected="nothing", found=type(value).__name__,
                help="cut the sequences: states after each piece are final states",
            )  # fmt: skip
    return run_packed(
        op, (q, k, v, g, beta), 1, scale, initial_state, output_final_state, cu_seqlens,
        use_qk_l2norm_in_kernel, output, output_state, backend,
    )  # fmt: skip
