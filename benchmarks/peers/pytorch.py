"""torch's own attention: SDPA by backend, and FlexAttention compiled.

Both take [B, H, T, D]; copies in that layout are made before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.case import Inputs, Work


def heads_first(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """q, k, v as [B, H, T, D], dense."""
    return tuple(inputs[n].transpose(1, 2).contiguous() for n in ("q", "k", "v"))


def sdpa(backend: str, *, causal: bool) -> Callable[[Inputs], Work]:
    """``scaled_dot_product_attention`` held to one backend: ``CUDNN_ATTENTION`` and the like."""

    def make(inputs: Inputs) -> Work:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = heads_first(inputs)
        chosen = getattr(SDPBackend, backend)

        def fn() -> dict[str, torch.Tensor]:
            with sdpa_kernel(chosen):
                o = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            return {"o": o.transpose(1, 2)}

        return Work(fn)

    return make


def flex(
    *,
    score: Callable[[Inputs], Any] | None = None,
    mask: Callable[[Inputs], Any] | None = None,
) -> Callable[[Inputs], Work]:
    """FlexAttention under ``torch.compile(dynamic=False)``, compiled anew for each case.

    Args:
        score: makes the ``score_mod``.
        mask: makes the ``mask_mod``; with one, a block mask is made before the timing.
    """

    def make(inputs: Inputs) -> Work:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        q, k, v = heads_first(inputs)
        options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]}
        if score is not None:
            options["score_mod"] = score(inputs)
        if mask is not None:
            options["block_mask"] = create_block_mask(
                mask(inputs), None, None, q.shape[2], k.shape[2], device=q.device
            )
        compiled = torch.compile(flex_attention, dynamic=False)
        return Work(lambda: {"o": compiled(q, k, v, **options).transpose(1, 2)})

    return make
