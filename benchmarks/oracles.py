"""Oracles and eager references: plain torch, written apart from the product and its kernels.

Each takes the compute dtype: fp64 gives the oracle, fp32 the eager reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# (scores [G, rows, keys], row positions [rows, 1], key positions [keys], heads [G, 1, 1]) -> scores
Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (row positions [rows, 1], key positions [keys]) -> bool [rows, keys]
Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ROWS = 1024


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
) -> torch.Tensor:
    """Causal attention, bottom-right aligned; a row that sees nothing is 0.

    Args:
        q: [B, T, Hq, D]; query head h reads key head h // (Hq // Hkv).
        k: [B, S, Hkv, D].
        v: [B, S, Hkv, E].
        dtype: compute dtype.
        score: changes the scaled scores.
        mask: further restricts what is seen; positions are absolute.

    Returns:
        [B, T, Hq, E] in ``dtype``.
    """
    B, T, Hq, D = q.shape
    S, Hkv = k.shape[1], k.shape[2]
    G = Hq // Hkv
    out = torch.zeros(B, T, Hq, v.shape[3], dtype=dtype, device=q.device)
    for b in range(B):
        for h in range(Hkv):
            kk, vv = k[b, :, h].to(dtype), v[b, :, h].to(dtype)
            heads = torch.arange(h * G, (h + 1) * G, device=q.device)
            for start in range(0, T, ROWS):
                stop = min(start + ROWS, T)
                seen = max(stop + S - T, 0)
                i = torch.arange(start, stop, device=q.device)[:, None] + (S - T)
                j = torch.arange(seen, device=q.device)
                x = q[b, start:stop, h * G : (h + 1) * G].transpose(0, 1).to(dtype)
                s = x @ kk[:seen].T * D**-0.5
                if score is not None:
                    s = score(s, i, j, heads[:, None, None])
                visible = j <= i if mask is None else (j <= i) & mask(i, j)
                p = torch.softmax(s.masked_fill(~visible, -torch.inf), -1)
                p = p.masked_fill(~visible, 0.0)
                out[b, start:stop, h * G : (h + 1) * G] = (p @ vv[:seen]).transpose(0, 1)
    return out


def _heads(x: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, H, ...] -> [B, heads, T, ...], each head repeated for its group."""
    return x.to(dtype).repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)


def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    s: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule token by token, as it is written down.

    Args:
        q: [B, T, Hk, K].
        k: [B, T, Hk, K].
        v: [B, T, Hv, V].
        g: [B, T, Hv], natural-log gate.
        beta: [B, T, Hv].
        s: [B, Hv, K, V].
        dtype: compute dtype.

    Returns:
        The final state [B, Hv, K, V] and the output [B, T, Hv, V], both in ``dtype``.
    """
    Hv, K = v.shape[2], q.shape[3]
    q, k, v = (_heads(x, Hv, dtype) for x in (q, k, v))
    g, beta = (x.to(dtype).transpose(1, 2)[..., None] for x in (g, beta))
    s = s.to(dtype)
    rows = []
    for t in range(q.shape[2]):
        s = s * g[:, :, t, :, None].exp()
        e = beta[:, :, t] * (v[:, :, t] - (k[:, :, t, None] @ s)[:, :, 0])
        s = s + k[:, :, t, :, None] * e[:, :, None]
        rows.append((q[:, :, t, None] @ s)[:, :, 0] * K**-0.5)
    return s, torch.stack(rows, 1) if rows else v.transpose(1, 2)


def gated_delta_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    s: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    chunk: int = 64,
    block: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule in chunks (Yang et al., Gated Delta Networks, 2024), for long sequences.

    With w_ij = exp(g_{j+1} + ... + g_i) and W_i = exp(g_1 + ... + g_i) in a chunk that starts with
    state S, the corrections e solve (I + tril(beta_i k_i.k_j w_ij, -1)) e = beta (v - W k S); then
    o = (W q S + tril(q_i.k_j w_ij) e) / sqrt(K) and S' = W_C S + sum_j w_Cj k_j e_j.

    Args:
        q: [B, T, Hk, K].
        k: [B, T, Hk, K].
        v: [B, T, Hv, V].
        g: [B, T, Hv], natural-log gate, finite.
        beta: [B, T, Hv].
        s: [B, Hv, K, V].
        dtype: compute dtype.
        chunk: tokens of a chunk.
        block: chunks whose inverses are made together; bounds the memory.

    Returns:
        The final state [B, Hv, K, V] and the output [B, T, Hv, V], both in ``dtype``.
    """
    B, T, Hv = g.shape
    out = torch.empty(B, T, Hv, v.shape[3], dtype=dtype, device=v.device)
    s = s.to(dtype)
    for start in range(0, T, chunk * block):
        rows = slice(start, min(start + chunk * block, T))
        xs = [_heads(x[:, rows], Hv, dtype) for x in (q, k, v, g[..., None], beta[..., None])]
        s, o = _block(*xs, s, chunk)
        out[:, rows] = o[:, :, : rows.stop - rows.start].transpose(1, 2)
    return s, out


def _block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    s: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive chunks, [B, H, T, ...]; a short last one is filled up with idle rows."""
    pad = -q.shape[2] % chunk
    q, k, v, g, beta = (
        torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk))
        for x in (q, k, v, g, beta)
    )
    total = g.cumsum(3)
    w = (total - total.mT).tril().exp().tril()
    eye = torch.eye(chunk, dtype=q.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(
        eye + (beta * (k @ k.mT) * w).tril(-1), eye, upper=False, unitriangular=True
    )
    inside = q @ k.mT * w
    start, end = total.exp(), (total[..., -1:, :] - total).exp()
    outputs = []
    for c in range(q.shape[2]):
        kc, first = k[:, :, c], start[:, :, c]
        e = inverse[:, :, c] @ (beta[:, :, c] * (v[:, :, c] - first * (kc @ s)))
        outputs.append((first * (q[:, :, c] @ s) + inside[:, :, c] @ e) * q.shape[-1] ** -0.5)
        s = first[:, :, -1:] * s + (kc * end[:, :, c]).mT @ e
    return s, torch.cat(outputs, 2)


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear recurrence token by token, from a zero state: decay, write, read.

    Args:
        q: [B, T, H, K], read with ``K ** -0.5``.
        k: [B, T, H, K].
        v: [B, T, H, V].
        g: natural-log gate, [B, T, H] or [B, T, H, K]; None keeps everything.
        beta: [B, T, H]: what is written is the error of the prediction at this rate; None writes
            the value.
        dtype: compute dtype.

    Returns:
        The final state [B, H, K, V] and the output [B, T, H, V], both in ``dtype``.
    """
    B, T, H, K = q.shape
    q, k, v = (x.to(dtype).movedim(1, 0).flatten(1, 2) for x in (q, k, v))
    if g is not None:
        g = g.to(dtype).reshape(B, T, H, -1, 1).exp().movedim(1, 0).flatten(1, 2)
    if beta is not None:
        beta = beta.to(dtype)[..., None].movedim(1, 0).flatten(1, 2)
    s = torch.zeros(B * H, K, v.shape[2], dtype=dtype, device=v.device)
    out = torch.empty(T, *v.shape[1:], dtype=dtype, device=v.device)
    for t in range(T):
        if g is not None:
            s *= g[t]
        write = v[t]
        if beta is not None:
            write = beta[t] * (write - (k[t, :, None] @ s)[:, 0])
        s = torch.baddbmm(s, k[t, :, :, None], write[:, None])
        out[t] = (q[t, :, None] @ s)[:, 0]
    return s.unflatten(0, (B, H)), out.unflatten(1, (B, H)).movedim(0, 1) * K**-0.5
