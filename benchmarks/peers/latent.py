"""Latent attention by others: FlashInfer's paged MLA, SDPA over a concatenated latent."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.case import Inputs, Work

PAGE = 64
WORKSPACE = 256 << 20


def flashinfer_fa3(inputs: Inputs) -> Work:
    """``BatchMLAPagedAttentionWrapper`` on FlashAttention 3, over pages of 64 in order."""
    run, q, q_rope = _wrapper(inputs), inputs["q"][:, 0], inputs["q_rope"][:, 0]
    return Work(lambda: {"o": run(q, q_rope)[:, None]})


def flashinfer_projected(inputs: Inputs) -> Work:
    """The same between torch's batched products with the two up-projections."""
    run, q, q_rope = _wrapper(inputs), inputs["q_nope"][:, 0], inputs["q_rope"][:, 0]
    into, back = inputs["wuk"], inputs["wuv"].mT  # [H, D, R], [H, R, V]

    def fn() -> dict[str, torch.Tensor]:
        absorbed = torch.bmm(q.transpose(0, 1), into).transpose(0, 1).contiguous()
        latent = run(absorbed, q_rope)
        return {"o": torch.bmm(latent.transpose(0, 1), back).transpose(0, 1)[:, None]}

    return Work(fn)


def _wrapper(inputs: Inputs) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The planned wrapper, of queries [B, H, R] and [B, H, P]."""
    import flashinfer

    c, r, scale = inputs["c"], inputs["r"], inputs["scale"]
    B, S, R = c.shape
    H, P, device = inputs["q_rope"].shape[2], r.shape[-1], c.device
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    pages = B * S // PAGE
    rows = torch.arange(B + 1, dtype=torch.int32, device=device)
    table = torch.arange(pages, dtype=torch.int32, device=device)
    lengths = torch.full((B,), S, dtype=torch.int32, device=device)
    wrapper.plan(
        rows, rows * (S // PAGE), table, lengths, H, R, P, PAGE, False, scale, c.dtype, c.dtype
    )
    held, rope = c.view(pages, PAGE, R), r.view(pages, PAGE, P)

    def run(q: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        o: torch.Tensor = wrapper.run(q, q_rope, held, rope)
        return o

    return run


def sdpa(inputs: Inputs) -> Work:
    """``scaled_dot_product_attention``, every head's key the latent and the RoPE part."""
    from torch.nn.functional import scaled_dot_product_attention

    x = inputs
    q = torch.cat([x["q"], x["q_rope"]], -1).transpose(1, 2)
    key = torch.cat([x["c"], x["r"]], -1)[:, None]
    B, H = q.shape[:2]
    R, scale = x["c"].shape[-1], x["scale"]
    keys = key.expand(B, H, *key.shape[2:])
    values = key[..., :R].expand(B, H, key.shape[2], R)

    def fn() -> dict[str, torch.Tensor]:
        o = scaled_dot_product_attention(q, keys, values, scale=scale)
        return {"o": o.transpose(1, 2)}

    return Work(fn)
