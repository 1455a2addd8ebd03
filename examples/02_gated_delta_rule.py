"""The gated delta rule: dense, packed and token by token give the same state and output."""

import torch

import attncc as ac


def main() -> None:
    """Prefill, continue from the state, and run two packed sequences of which one is empty."""
    torch.manual_seed(0)
    gdr = ac.ops.gated_delta_rule
    q = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
    k = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
    v = torch.randn(1, 100, 4, 64)
    g = torch.nn.functional.logsigmoid(torch.randn(1, 100, 4) + 3)
    beta = torch.rand(1, 100, 4)
    inputs = (q, k, v, g, beta)

    state, whole = gdr(*inputs)
    carried, outs = None, []
    for cut in (slice(0, 70), slice(70, 99), slice(99, 100)):
        carried, o = gdr(*(x[:, cut] for x in inputs), s=carried)
        outs.append(o)
    gap = (torch.cat(outs, 1) - whole).abs().max().item()
    print(f"three pieces against one pass: outputs {gap:.1e}, states", end=" ")
    print(f"{(carried - state).abs().max().item():.1e}")
    assert gap < 1e-4

    cu = torch.tensor([0, 0, 100])
    packed_state, packed = gdr(*(x[0] for x in inputs), cu_seqlens=cu)
    assert (packed - whole[0]).abs().max() < 1e-5
    assert not packed_state[0].any(), "an empty sequence keeps its zero state"
    print("packed with an empty sequence: the same")
    print(gdr.explain())


if __name__ == "__main__":
    main()
