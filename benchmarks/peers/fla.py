"""flash-linear-attention; its calls take our layouts."""

from __future__ import annotations

import torch

from benchmarks.case import Inputs, Work


def gdn_prefill(inputs: Inputs) -> Work:
    """``chunk_gated_delta_rule`` over packed sequences, with an initial state."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    x = inputs
    cu = x["cu_seqlens"].long()

    def fn() -> dict[str, torch.Tensor]:
        o, s = chunk_gated_delta_rule(
            x["q"], x["k"], x["v"], x["g"], x["beta"],
            initial_state=x["s"], output_final_state=True, cu_seqlens=cu,
        )  # fmt: skip
        return {"o": o, "s": s}

    return Work(fn)


def gdn_decode(inputs: Inputs) -> Work:
    """``fused_recurrent_gated_delta_rule`` for one token; the state goes to a new tensor."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    x = inputs

    def fn() -> dict[str, torch.Tensor]:
        o, s = fused_recurrent_gated_delta_rule(
            x["q"], x["k"], x["v"], x["g"], beta=x["beta"],
            initial_state=x["s"], output_final_state=True,
        )  # fmt: skip
        return {"o": o, "s": s}

    return Work(fn)
