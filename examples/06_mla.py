"""Latent attention from one declaration: each call's sizes choose the order of its products."""

import torch

import attncc as ac

MLA = ac.ops.mla
HEADS, NOPE, ROPE, LATENT, VALUE = 16, 32, 16, 128, 32
SIZES = {"H": HEADS, "D": NOPE, "P": ROPE, "R": LATENT, "V": VALUE}
SCALE = (NOPE + ROPE) ** -0.5  # the model's: there is no default


def show_orders():
    """A prompt forms every head's keys and values once; a step moves its queries to the latent."""
    for phase, tokens in (("prefill", 2048), ("decode", 1)):
        text = MLA.explain(sizes={**SIZES, "B": 1, "T": tokens, "S": 2048}, phase=phase)
        print(f"{phase} of {tokens}:")
        print("\n".join(line for line in text.splitlines() if "matrix product" in line))


def tokens(count):
    """Activations of one call: queries in two parts, and the latent and RoPE key to append."""
    return (
        torch.randn(1, count, HEADS, NOPE), torch.randn(1, count, HEADS, ROPE),
        torch.randn(1, count, LATENT), torch.randn(1, count, ROPE),
    )  # fmt: skip


def main():
    """A prompt, then three steps; only latent and RoPE key are kept of a token."""
    torch.manual_seed(0)
    show_orders()
    # As checkpoints have it: one up-projection [H, NOPE + VALUE, R], used in two parts.
    joint = torch.randn(HEADS, NOPE + VALUE, LATENT) * LATENT**-0.5
    weights = {"wuk": joint[:, :NOPE], "wuv": joint[:, NOPE:]}
    sizes = {"B": 1, "R": LATENT, "P": ROPE}
    cache = ac.PagedCache.allocate(MLA, sizes=sizes, capacity=128, page=16, dtype=torch.float32)
    calls = [tokens(n) for n in (60, 1, 1, 1)]
    outs = [MLA(*calls[0], **weights, scale=SCALE, cache=cache)]
    outs += [MLA.decode(*call, **weights, scale=SCALE, cache=cache) for call in calls[1:]]

    whole = [torch.cat(parts, 1) for parts in zip(*calls, strict=True)]
    exact = MLA.reference(*whole, **weights, scale=SCALE)
    gap = (torch.cat(outs, 1) - exact).abs().max().item()
    kept = sum(b.total for b in cache.bytes().values()) // 128 // 4
    print(f"{kept} numbers a token instead of {HEADS * (NOPE + ROPE + VALUE)}: error {gap:.1e}")
    assert kept == LATENT + ROPE and gap < 1e-5


if __name__ == "__main__":
    main()
