"""The gated delta product as FlashInfer's document writes it, one token after the other.

The loop shares nothing with the compiler: it is what calls of ``attncc.gdp`` are held to. How far
from it they may be follows from the chunked form in fp32 of the library's own op, which has other
layouts, heads and gates.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from attncc import ops
from tests.tolerance import assert_close

HEADS = [(2, 2, 2), (1, 1, 3), (1, 3, 3), (4, 4, 2), (4, 2, 2), (1, 1, 1)]
"""Query, key and value heads: keys of the queries or of the values, either side the more."""
EPS = 1e-6


def document(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None, num_householder: int = 1, scale: float | None = None,
    initial_state: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False, dtype: torch.dtype = torch.float64, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output ``[T, HO, V]`` and final states ``[N, HO, V, K]``, unrounded, on the CPU."""
    assert cu_seqlens is not None
    n, tokens, ends = num_householder, q.shape[0], cu_seqlens.tolist()
    q, k, v = (x.to("cpu", dtype) for x in (q, k, v))
    if use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k))
    heads = max(q.shape[1], v.shape[1])
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k, v))
    one = q.new_ones(())
    g = one.expand(tokens, heads) if g is None else g.to("cpu", dtype)
    beta = one.expand(tokens * n, heads) if beta is None else beta.to("cpu", dtype)
    scale = scale or q.shape[-1] ** -0.5
    states = q.new_zeros(len(ends) - 1, heads, v.shape[-1], q.shape[-1])
    if initial_state is not None:
        states.copy_(initial_state)
    out = torch.empty(tokens, heads, v.shape[-1], dtype=dtype, device=q.device)
    for i, s in enumerate(states):
        for t in range(ends[i], ends[i + 1]):
            s *= g[t, :, None, None]
            for j in range(t * n, t * n + n):
                new = beta[j, :, None] * (v[j] - (s @ k[j, :, :, None])[..., 0])
                s += new[:, :, None] * k[j, :, None, :]
            out[t] = scale * (s @ q[t, :, :, None])[..., 0]
    return out, states


def chunked(**args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the library's op: natural-log gates, states [K, V], a key for every head."""
    q, k, v, g = (args.get(n) for n in "qkvg")
    heads = max(q.shape[1], v.shape[1])
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k, v))
    start = args.get("initial_state")
    s, o = ops.gated_delta_product(
        q, k, v, None if g is None else g.float().log(), args.get("beta"),
        None if start is None else start.float().mT.contiguous(), scale=args.get("scale") or None,
        l2norm=args["use_qk_l2norm_in_kernel"], cu_seqlens=args["cu_seqlens"],
        sizes={"N": args["num_householder"], "Gq": 1, "Gv": 1}, backend="torch",
    )  # fmt: skip
    return o, s.mT


def held(o: torch.Tensor, s: torch.Tensor, args: dict[str, Any]) -> None:
    """Output and states are the document's, within the contract's tolerance."""
    start = args.get("initial_state")
    assert o.dtype == args["q"].dtype
    assert s.dtype == (torch.float32 if start is None else start.dtype)
    for name, got, want, near in zip("os", (o, s), document(**args), chunked(**args), strict=True):
        assert_close(got, want, near.to(got.dtype), got.dtype, name)


@dataclass(frozen=True)
class Shape:
    """What of a call its tensors are drawn from."""

    lengths: tuple[int, ...]
    n: int = 2
    heads: tuple[int, int, int] = (2, 2, 2)
    k_dim: int = 64
    v_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    gate: torch.dtype | None = torch.float32
    beta: torch.dtype | None = torch.float32
    state: torch.dtype | None = torch.float32
    unit: bool = False
    scale: float | None = None
    offsets: torch.dtype = torch.int32
    strided: bool = False
    seed: int = 0


def arguments(shape: Shape, device: str = "cpu") -> dict[str, Any]:
    """A call's keywords: unit keys unless the call makes them so, some decays of exactly 0."""
    rng = torch.Generator().manual_seed(shape.seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng)

    def placed(x: torch.Tensor) -> torch.Tensor:
        x = x.to(device=device, dtype=shape.dtype)
        if not shape.strided:
            return x
        wide = x.new_full((x.shape[1], x.shape[0], x.shape[2] + 16), torch.nan)
        wide[:, :, 8:-8] = x.transpose(0, 1)  # heads outermost, rows apart
        return wide[:, :, 8:-8].transpose(0, 1)

    tokens, (q_heads, k_heads, v_heads) = sum(shape.lengths), shape.heads
    heads, rows = max(q_heads, v_heads), tokens * shape.n
    q, k = draw(tokens, q_heads, shape.k_dim), draw(rows, k_heads, shape.k_dim)
    if not shape.unit:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    ends = torch.tensor([0, *shape.lengths]).cumsum(0)
    found = {
        "q": placed(q), "k": placed(k), "v": placed(draw(rows, v_heads, shape.v_dim)),
        "num_householder": shape.n, "scale": shape.scale, "use_qk_l2norm_in_kernel": shape.unit,
        "cu_seqlens": ends.to(device=device, dtype=shape.offsets),
    }  # fmt: skip
    if shape.gate is not None:
        alpha = torch.sigmoid(draw(tokens, heads) + 2)
        alpha[torch.rand(tokens, heads, generator=rng) < 0.02] = 0
        found["g"] = alpha.to(device=device, dtype=shape.gate)
    if shape.beta is not None:
        found["beta"] = draw(rows, heads).sigmoid().to(device=device, dtype=shape.beta)
    if shape.state is not None:
        state = draw(len(shape.lengths), heads, shape.v_dim, shape.k_dim)
        found["initial_state"] = state.to(device=device, dtype=shape.state)
    return found


@st.composite
def shapes(draw: st.DrawFn, most: int = 90) -> Shape:
    """Shapes of any call that the document allows."""
    lengths = st.sampled_from([n for n in (0, 1, 2, 9, 33, 63, 64, 65, 90, 130, 257) if n <= most])
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    size = st.sampled_from([64, 128])
    gates = st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16])
    return Shape(
        tuple(draw(st.lists(lengths, min_size=1, max_size=3))), draw(st.integers(1, 4)),
        draw(st.sampled_from(HEADS)), draw(size), draw(size), dtype, draw(gates),
        draw(st.sampled_from([None, torch.float32, dtype])),
        draw(st.sampled_from([None, torch.float32, torch.bfloat16])), draw(st.booleans()),
        draw(st.sampled_from([None, 0.0, 0.3])), draw(st.sampled_from([torch.int32, torch.int64])),
        draw(st.booleans()), draw(st.integers(0, 3)),
    )  # fmt: skip
