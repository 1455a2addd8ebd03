"""FlashInfer: paged decode, gated delta rule prefill and decode. States are [V, K] there."""

from __future__ import annotations

import torch

from benchmarks.case import Inputs, Work

PAGE = 64
WORKSPACE = 256 << 20


def decode_paged(inputs: Inputs, scale: float | None = None) -> Work:
    """``BatchDecodeWithPagedKVCacheWrapper`` over pages of 64 that lie in random order.

    Args:
        inputs: q, k, v; k and v may be e4m3.
        scale: what their numbers are multiplied with.
    """
    import flashinfer

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    B, S, Hk, D = k.shape
    pages, device = B * S // PAGE, q.device
    place = torch.randperm(pages, device=device)
    # [pages, 2, Hk, PAGE, D]
    kv = torch.empty(pages, 2, Hk, PAGE, D, dtype=k.dtype, device=device)
    bits = torch.uint8 if k.element_size() == 1 else torch.int16  # what torch can index
    for n, x in enumerate((k, v)):
        kv.view(bits)[place, n] = x.reshape(pages, PAGE, Hk, D).transpose(1, 2).view(bits)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    starts = torch.arange(B + 1, dtype=torch.int32, device=device) * (S // PAGE)
    last = torch.full((B,), PAGE, dtype=torch.int32, device=device)
    wrapper.plan(
        starts,
        place.int(),
        last,
        q.shape[2],
        Hk,
        D,
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    rows = q[:, 0].contiguous()
    scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}
    return Work(lambda: {"o": wrapper.run(rows, kv, **scales)[:, None]})


def _gdn_prefill(inputs: Inputs, use_cp: str | bool) -> Work:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k, v, g, beta = (inputs[n][0].contiguous() for n in ("q", "k", "v", "g", "beta"))
    alpha, cu = g.exp(), inputs["cu_seqlens"].int()
    s = inputs["s"].mT.contiguous()

    def fn() -> dict[str, torch.Tensor]:
        o, final = chunk_gated_delta_rule(
            q, k, v, alpha, beta, None, s, True, cu, False, use_cp=use_cp
        )
        return {"o": o[None], "s": final.mT}

    return Work(fn)


def gdn_prefill(inputs: Inputs) -> Work:
    """``gdn_prefill.chunk_gated_delta_rule`` with linear gates and an initial state.

    It cuts a sequence over the device's multiprocessors where it finds few heads.
    """
    return _gdn_prefill(inputs, "auto")


def gdn_prefill_uncut(inputs: Inputs) -> Work:
    """The same with no sequence cut."""
    return _gdn_prefill(inputs, False)


def gdn_decode(inputs: Inputs) -> Work:
    """``gated_delta_rule_decode_pretranspose``: gates from a and b, the state overwritten."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    x = inputs
    B, _, Hv, V = x["v"].shape
    start = x["s"].mT.contiguous()
    s = start.clone()
    zero = torch.zeros(Hv, device=s.device)
    out = torch.empty(B, 1, Hv, V, device=s.device, dtype=x["v"].dtype)

    def fn() -> dict[str, torch.Tensor]:
        o, _ = gated_delta_rule_decode_pretranspose(
            x["q"], x["k"], x["v"], s, zero, x["a"], zero, x["b"], None, out, False
        )
        return {"o": o}

    return Work(fn, reset=lambda: s.copy_(start))


def gdp(inputs: Inputs) -> Work:
    """``gdp_prefill.chunk_gated_delta_product`` by its SM90 kernel, which wants offsets twice."""
    from flashinfer.gdp_prefill import chunk_gated_delta_product

    x = inputs
    cu = x["cu_seqlens"].int()
    host = cu.cpu()

    def fn() -> dict[str, torch.Tensor]:
        o, s = chunk_gated_delta_product(
            x["q"], x["k"], x["v"], x["alpha"], x["beta"], x["n"], None, x["s"], True, cu, False,
            cu_seqlens_cpu=host, backend="cake",
        )  # fmt: skip
        return {"o": o, "s": s}

    return Work(fn)
