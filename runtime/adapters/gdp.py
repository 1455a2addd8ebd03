"""FlashInfer's gated delta product (``attncc.gdp``), on every backend there is.

The interface is that of ``flashinfer.gdp_prefill.chunk_gated_delta_product``: linear gates, states
``[V, K]``, packed sequences, rows ``t * n .. t * n + n - 1`` of keys, values and betas for token t.
Beneath it is a declaration with exactly these layouts, so nothing is expanded or converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attncc.dsl.errors import ArgumentError
from attncc.runtime import checks
from attncc.runtime.adapters import shared
from attncc.runtime.api import Op
from attncc.runtime.pools import StatePool

__all__ = ["chunk_gated_delta_product", "decode_gated_delta_product", "explain"]

AXES = {
    "q": ("T", "Hq", "K"), "k": ("T*n", "Hk", "K"), "v": ("T*n", "Hv", "V"), "g": ("T", "HO"),
    "beta": ("T*n", "HO"),
}  # fmt: skip
NAMES = {"alpha": "g", "out[o]": "output", "sizes=": "num_householder"}
"""What the op calls the arguments, where that differs."""
STATE = ("N", "HO", "V", "K")
Args = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""q, k, v, g, beta."""


_OPS: dict[str, Op] = {}


def _op(keys: str) -> Op:
    """The library's op over states ``[V, K]``, and keys with the heads of one of the groups."""
    _declared(keys)
    return _OPS[keys]


def _declared(keys: str) -> None:
    """Read the declaration with the first call of its kind."""
    if keys not in _OPS:
        from attncc.dsl.library.gated_delta_product import gated_delta_product

        layouts = {"k": f"B (T N) (H {keys}) K", "s": "B (H Gq Gv) V K"}
        _OPS[keys] = Op(gated_delta_product.with_patterns(**layouts))


_declared._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a trace runs it as it is


def chunk_gated_delta_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    num_householder: int = 1,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gated delta product over packed prompts (Siems et al., DeltaProduct, 2025).

    Per token: ``S *= alpha``; for each of its n rows ``S += beta (v - S k) k^T``; then
    ``o = scale S q``. ``HO = max(Hq, Hv)``, and one of Hq and Hv is a multiple of the other. Any
    strides will do where innermost axes are dense.

    Args:
        q: ``[T, Hq, K]``, fp16 or bf16, one row a token.
        k: ``[T * n, Hk, K]``, q's dtype, with Hk = Hq or Hv.
        v: ``[T * n, Hv, V]``, q's dtype.
        g: alpha, the decay itself, in [0, 1]: ``[T, HO]``, fp32, bf16 or fp16. None is 1.
        beta: ``[T * n, HO]``, fp32 or q's dtype. None is 1.
        num_householder: n, the updates of a token.
        scale: of the queries; None and 0.0 are ``1 / sqrt(K)``.
        initial_state: ``[N, HO, V, K]``, fp32 or bf16. None is zero.
        output_final_state: also return the states after the last tokens.
        cu_seqlens: ``[N + 1]``, int32 or int64, over tokens. Required.
        use_qk_l2norm_in_kernel: bring queries and keys to length 1 first
            (``x * rsqrt(sum x^2 + 1e-6)``).
        output: ``[T, HO, V]``, q's dtype, written in place.
        output_state: ``[N, HO, V, K]``, the initial state's dtype (fp32 without one), written in
            place; it shares no memory with ``initial_state``.
        backend: ``auto``, or ``cudnn``, ``triton``, ``cutedsl``, ``torch`` (or another that ops
            have): a named one runs or raises.

    Returns:
        The output, or output and final states.

    Raises:
        CallError: an argument breaks a line above; nothing was written.
        BackendError: the named backend cannot run this call, and why.
    """
    return run_packed(
        "chunk_gated_delta_product", (q, k, v, g, beta), num_householder, scale, initial_state,
        output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output, output_state, backend,
    )  # fmt: skip


def explain(
    q_heads: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int, num_householder: int = 1,
    *, use_qk_l2norm_in_kernel: bool = False, dtype: str = "bf16", target: str = "sm_90",
) -> str:  # fmt: skip
    """What ``auto`` would run for prompts of these sizes, and why not cuDNN where it does not.

    Args:
        q_heads: Hq.
        k_heads: Hk.
        v_heads: Hv.
        k_dim: K.
        v_dim: V.
        num_householder: n, the updates of a token.
        use_qk_l2norm_in_kernel: as of the call.
        dtype: ``bf16`` or ``fp16``.
        target: compute capability, for instance ``sm_100``.

    Raises:
        SizeError: heads that no call may have.
    """
    keys, sizes = shared.heads("chunk_gated_delta_product", q_heads, k_heads, v_heads)
    sizes |= {"H": min(q_heads, v_heads), "K": k_dim, "V": v_dim, "N": num_householder}
    given = {"alpha", "beta", "s", *(["l2norm"] if use_qk_l2norm_in_kernel else [])}
    return _op(keys).explain(
        sizes=sizes, given=frozenset(given), dtype=dtype, target=target, packed=True
    )


def run_packed(
    op: str, args: Args, n: int, scale: float | None, initial_state: torch.Tensor | None,
    output_final_state: bool, cu_seqlens: torch.Tensor | None, unit: bool,
    output: torch.Tensor | None, output_state: torch.Tensor | None, backend: str,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A call over packed prompts; see :func:`chunk_gated_delta_product`."""
    if cu_seqlens is None:
        raise ArgumentError(
            "packed sequences need cu_seqlens", op=op, argument="cu_seqlens", expected="[N + 1]"
        )
    states = {"initial_state": initial_state, "output_state": output_state}
    run, options = _checked(op, args, n, states, ())
    given = {"o": output, "s": output_state}
    out = {name: tensor for name, tensor in given.items() if tensor is not None}
    with shared.in_words_of(op, {"s": "initial_state", **NAMES, "out[s]": "output_state"}):
        found = run(
            s=initial_state, scale=scale or None, l2norm=bool(unit), cu_seqlens=cu_seqlens, out=out,
            backend=None if backend == "auto" else backend, **options,
        )  # fmt: skip
    return (found.o, found.s) if output_final_state else found.o


def decode_gated_delta_product(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    num_householder: int = 1,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """One or a few tokens of each sequence, with the states in a pool that is updated in place.

    Args:
        q: ``[B, T, Hq, K]``.
        k: ``[B, T * n, Hk, K]``.
        v: ``[B, T * n, Hv, V]``.
        state: the pool, ``[slots, HO, V, K]``, fp32 or bf16.
        state_indices: int32 ``[B]``: the slot each sequence starts from; -1 is a zero state.
        g: alpha, ``[B, T, HO]``; None is 1.
        beta: ``[B, T * n, HO]``; None is 1.
        num_householder: n, the updates of a token.
        scale: of the queries; None and 0.0 are ``1 / sqrt(K)``.
        use_qk_l2norm_in_kernel: bring queries and keys to length 1 first.
        output: ``[B, T, HO, V]``, written in place.
        output_state_indices: int32 ``[B]``, the slot of each final state, ``state_indices`` if
            None; or int32 ``[B, T]``, a slot for the state after each token (speculative
            decoding). -1 writes nothing.
        backend: as of :func:`chunk_gated_delta_product`.

    Returns:
        The output ``[B, T, HO, V]``.

    Raises:
        CallError: an argument does not fit; nothing was written.
        BackendError: the named backend cannot run this call, and why.
    """
    op = "decode_gated_delta_product"
    run, options = _checked(op, (q, k, v, g, beta), num_householder, {"state": state}, ("B",))
    slots = {"state_indices": state_indices}
    shared.check_tensors(op, slots, {"state_indices": ("B",)}, ("state_indices",))
    pool = StatePool(state, state_indices, output_state_indices)
    slots_named = {"s.slots": "state_indices", "s.out_slots": "output_state_indices"}
    with shared.in_words_of(op, {"s": "state", **NAMES, **slots_named}):
        found: torch.Tensor = run.decode(
            s=pool, scale=scale or None, l2norm=bool(use_qk_l2norm_in_kernel), out=output,
            backend=None if backend == "auto" else backend, **options,
        )  # fmt: skip
    return found


def _checked(
    op: str, given: Args, n: int, states: Mapping[str, torch.Tensor | None], batch: tuple[str, ...]
) -> tuple[Op, dict[str, Any]]:
    """The op of a call with its tensors, in dtypes that it takes, and the sizes they do not fix."""
    shared.check_count(op, "num_householder", n)
    patterns = {name: (*batch, *axes) for name, axes in AXES.items()}
    named = dict(zip(AXES, given, strict=True))
    shared.check_tensors(op, named, patterns, required=("q", "k", "v"))
    shared.check_tensors(op, states, dict.fromkeys(states, STATE), required=("state",))
    q, k, v, g, beta = given
    checks.dtype(op, "q", q, shared.HALF)
    for name, tensor in (("k", k), ("v", v)):
        checks.dtype(op, name, tensor, (q.dtype,), "dtype differs from that of q")
    for name, state in states.items():
        if state is not None:
            checks.dtype(op, name, state, (torch.float32, torch.bfloat16))
    keys, sizes = shared.heads(op, q.shape[-2], k.shape[-2], v.shape[-2])
    if g is not None:
        checks.dtype(op, "g", g, checks.REAL)
        shared.check_fraction(op, "g", g)
        g = g if g.dtype in (torch.float32, q.dtype) else g.float()
    tensors = {"q": q, "k": k, "v": v, "alpha": g, "beta": beta}
    return _op(keys), {**tensors, "sizes": {"N": n, **sizes}}
