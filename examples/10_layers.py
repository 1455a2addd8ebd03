"""Complete layers from h_t to W_O: composed of named nodes, run from caches, read as data.

Three layers of the library are modules of torch: attention with RoPE at each token's position, a
gated DeltaNet with its convolutions, sparse latent attention with its indexer. Each gives the same
for a whole sequence, for a prompt and then token after token, and for sequences that come and go.
A layer of one's own is a function over names; the structure that runs is the structure that the
ledger reads.
"""

import itertools

import torch

import attncc as ac
from attncc.dsl.layers import NodeKind

WIDTH = 64


@ac.layer
def normed_attention(n):
    """Attention whose queries and keys are normed before they are rotated (as in Qwen3)."""
    h = n.input("hidden_states", "B T M", "h_t")
    at = n.positions()
    made = {}
    for name, pattern in (("q", "B T (Hkv G) D"), ("k", "B T Hkv D")):
        x = n.project(f"{name}_proj", h, f"{name}_projected", pattern)
        x = n.same(
            NodeKind.RMSNORM, f"{name}_norm", x, f"{name}_normed", params={f"{name}_weight": "D"}
        )
        made[name] = n.same(NodeKind.ROPE, f"{name}_rope", x, name, inputs=[at])
    made["v"] = n.project("v_proj", h, "v", "B T Hkv D")
    for name in "kv":
        n.cache(f"{name}_cache", "B S Hkv D")
        n.append(f"{name}_append", made[name], f"{name}_cache")
    o = n.object("heads", "B T (Hkv G) D")
    binds = {"q": made["q"], "k": "k_cache", "v": "v_cache", "o": o}
    n.op("attend", ac.ops.attention, binds, axes={"E": "D"})
    return n.project("o_proj", o, "output", "B T M")


def whole_and_in_steps(layer, x):
    """The largest difference between a whole sequence and prefill, drafts and single tokens."""
    whole = layer(x)
    kept = layer.allocate(batch=len(x), capacity=64, page=16)
    parts = [layer(x[:, :30], kept=kept), layer.decode(x[:, 30:33], kept)]
    parts += [layer.decode(x[:, i : i + 1], kept) for i in range(33, x.shape[1])]
    return (torch.cat(parts, 1) - whole).abs().max().item()


def come_and_go(layer, x):
    """Two sequences that share a prefix, packed into one call though they differ in length."""
    owner = ac.nn.LayerOwner(layer, slots=2, pages=12, page=8)
    one = owner.add()
    with owner.append([one], 20) as kept:
        layer(x[:1, :20], kept=kept)
    two = owner.fork(one)
    counts = [3, 9]
    cu = torch.tensor([0, *itertools.accumulate(counts)])
    with owner.append([one, two], counts) as kept:
        y = layer(torch.cat([x[0, 20:23], x[0, 20:29]]), kept=kept, cu_seqlens=cu)
    whole = layer(x[:1])[0]
    return (y - torch.cat([whole[20:23], whole[20:29]])).abs().max().item()


def main() -> None:
    """Run the layers in every way, train one for a step, and print what one is made of."""
    torch.manual_seed(0)
    sizes = {"M": WIDTH, "Hkv": 2, "G": 2, "D": 16}
    layers = [
        ac.nn.MultiHeadAttention(WIDTH, 4, 2, 16, dtype=torch.float32),
        ac.nn.GatedDeltaNet(WIDTH, 2, 4, key_dim=16, value_dim=16, dtype=torch.float32),
        ac.nn.SparseLatentAttention(
            WIDTH, 4, query_rank=32, latent=32, rope_dim=8, nope_dim=16, value_dim=16,
            index_heads=4, index_dim=32, dtype=torch.float32,
        ),
        ac.nn.LayerModule(normed_attention, sizes, dtype=torch.float32),
    ]  # fmt: skip
    x = torch.randn(2, 36, WIDTH)
    with torch.no_grad():
        for layer in layers:
            gaps = whole_and_in_steps(layer, x), come_and_go(layer, x)
            print(f"{layer.layer.name}: steps differ by {gaps[0]:.1e}, packed by {gaps[1]:.1e}")
            assert max(gaps) < 1e-5

    delta = layers[1]
    losses = []
    for _ in range(3):
        loss = (delta(x) - x).square().mean()
        grads = torch.autograd.grad(loss, list(delta.parameters()))
        with torch.no_grad():
            for p, grad in zip(delta.parameters(), grads, strict=True):
                p.sub_(grad, alpha=0.1)
        losses.append(loss.item())
    print("training without a cache: loss", " ".join(f"{loss:.4f}" for loss in losses))
    assert losses[2] < losses[0]

    print(f"\n{delta.layer.name}, a decode step:")
    for node, _ in delta.composition.running("decode"):
        print(f"  {' '.join(node.inputs)} -> {node.name} -> {' '.join(node.outputs)}")


if __name__ == "__main__":
    main()
