"""flash-linear-attention; its calls take our layouts."""

from __future__ import annotations

from collections.abc import Callable

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


def gdp(inputs: Inputs) -> Work:
    """``chunk_gated_delta_product`` over packed sequences; its states are [K, V]."""
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    x = inputs
    q, k, v, g, beta = (x[name][None] for name in ("q", "k", "v", "g", "beta"))
    s, cu = x["s"].mT.contiguous(), x["cu_seqlens"].long()

    def fn() -> dict[str, torch.Tensor]:
        o, final = chunk_gated_delta_product(
            q, k, v, g, beta, x["n"], initial_state=s, output_final_state=True, cu_seqlens=cu
        )
        return {"o": o[0], "s": final.mT}

    return Work(fn)


def _prefill(run: Callable[..., tuple[torch.Tensor, torch.Tensor]], *args: torch.Tensor) -> Work:
    """A call without an initial state that also gives the final one."""

    def fn() -> dict[str, torch.Tensor]:
        o, s = run(*args, output_final_state=True)
        return {"o": o, "s": s}

    return Work(fn)


def kda(inputs: Inputs) -> Work:
    """``chunk_kda``."""
    from fla.ops.kda import chunk_kda

    return _prefill(chunk_kda, *(inputs[n] for n in ("q", "k", "v", "g", "beta")))


def gla(inputs: Inputs) -> Work:
    """``chunk_gla``."""
    from fla.ops.gla import chunk_gla

    return _prefill(chunk_gla, *(inputs[n] for n in ("q", "k", "v", "g")))


def simple_gla(inputs: Inputs) -> Work:
    """``chunk_simple_gla``."""
    from fla.ops.simple_gla import chunk_simple_gla

    return _prefill(chunk_simple_gla, *(inputs[n] for n in ("q", "k", "v", "g")))


def delta_rule(inputs: Inputs) -> Work:
    """``chunk_delta_rule``."""
    from fla.ops.delta_rule import chunk_delta_rule

    return _prefill(chunk_delta_rule, *(inputs[n] for n in ("q", "k", "v", "beta")))
