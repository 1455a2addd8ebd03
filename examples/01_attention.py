"""Causal attention, sliding windows and ALiBi from one kind of declaration; decode through a
cache.
"""

import torch

import attncc as ac


@ac.op(out="B T (Hkv G) E")
def soft_capped_window(
    q=ac.Activation("B T (Hkv G) D"),
    k=ac.Cache("B S Hkv D"),
    v=ac.Cache("B S Hkv E"),
    slope=ac.Param("(Hkv G)"),
    width=ac.param(default=64, integer=True),
):
    """A variant of this morning: ALiBi, a soft cap of 30 and a sliding window."""
    distance = ac.index("S") - ac.index("T")
    score = ac.dot(q, k, "D") * ac.rsqrt("D") + slope * distance
    score = 30 * ac.tanh(score / 30)
    seen = ac.causal & (ac.index("T") - ac.index("S") < width)
    return ac.dot(ac.softmax(score, "S", where=seen), v, "S")


def main() -> None:
    """Run the library's attention and the variant; decode step by step equals the whole pass."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 96, 8, 64), torch.randn(2, 96, 2, 64), torch.randn(2, 96, 2, 64)
    whole = ac.ops.attention(q, k, v)

    cache = ac.DenseCache.allocate(
        ac.ops.attention, sizes={"B": 2, "Hkv": 2, "D": 64, "E": 64}, capacity=128, dtype=q.dtype
    )
    steps = [ac.ops.attention(q[:, :90], k[:, :90], v[:, :90], cache=cache)]
    for t in range(90, 96):
        row = slice(t, t + 1)
        steps.append(ac.ops.attention.decode(q[:, row], k[:, row], v[:, row], cache))
    gap = (torch.cat(steps, 1) - whole).abs().max().item()
    print(f"prefill 90 + decode 6 against one pass of 96: largest difference {gap:.1e}")
    assert gap < 1e-5

    slope = 2.0 ** -torch.arange(1, 9)
    out = soft_capped_window(q, k, v, slope=slope)
    exact = soft_capped_window.reference(q, k, v, slope=slope)
    error = (out - exact).abs().max().item()
    print(f"the variant against its fp64 reference: largest error {error:.1e}")
    assert error < 1e-5
    print(soft_capped_window.explain())


if __name__ == "__main__":
    main()
