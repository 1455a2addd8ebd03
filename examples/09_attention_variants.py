"""The library's attention variants: a prompt into pages, then decode, held to the whole.

Each differs from plain attention in one line of its declaration: the score, the mask, the sink, or
where keys and values come from.
"""

import torch

import attncc as ac

B, T, PROMPT, HKV, G, D, PAGE = 2, 48, 41, 2, 3, 16, 8
HQ = HKV * G


def variants():
    """Arguments beside q, k, v by op; those with a T grow with the history."""
    return {
        "attention": {},
        "sliding_window": {"w": 16},
        "soft_cap": {"cap": 20.0},
        "alibi": {"slopes": 2.0 ** (-8 / HQ * torch.arange(1, HQ + 1))},
        "sink_attention": {"sink": torch.randn(HQ)},
        "document_attention": {"document": (torch.arange(T) // 20).int().repeat(B, 1)},
        "prefix_lm": {"prefix": torch.tensor([5, 30], dtype=torch.int32)},
        "cascade": {"pk": torch.randn(64, HKV, D), "pv": torch.randn(64, HKV, D)},
    }


def pages(op, args):
    """An empty cache of pages for every history of the op."""
    each = -(-T // PAGE)
    held = {
        t.name: args[t.name].new_zeros(B * each, PAGE, *args[t.name].shape[2:])
        for t in op.declaration.tensors
        if t.lifetime.name == "CACHE"
    }
    table = torch.randperm(B * each).int().view(B, each)
    return ac.PagedCache(held, table, torch.zeros(B, dtype=torch.int32))


def main() -> None:
    """Prefill and decode of each in pages; cross-attention over a memory; packed documents."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, h, D) for h in (HQ, HKV, HKV))
    for name, more in variants().items():
        op, args = getattr(ac.ops, name), {"q": q, "k": k, "v": v, **more}
        whole, cache = op(**args), pages(op, args)

        def part(low, high, args=args, cache=cache):
            new = {"q", *cache.tensors}
            return {n: x[:, low:high] if n in new else x for n, x in args.items()}

        outs = [op(**part(0, PROMPT), cache=cache)]
        outs += [op.decode(**part(t, t + 1), cache=cache) for t in range(PROMPT, T)]
        gap = (torch.cat(outs, 1) - whole).abs().max()
        assert gap < 1e-5
        print(f"{name:20} {PROMPT} tokens and {T - PROMPT} steps in pages of {PAGE}: {gap:.0e}")

    memory = torch.randn(2, B, 30, HKV, D)
    o = ac.ops.cross_attention(q, *memory)
    step = ac.ops.cross_attention.decode(q[:, -1:], *memory)
    assert torch.allclose(step, o[:, -1:], atol=1e-6)
    print(f"{'cross_attention':20} {list(o.shape)} over a memory of {memory.shape[2]} rows")

    ends = torch.tensor([0, 20, 40, 48], dtype=torch.int32)
    packed = ac.ops.attention(q[0], k[0], v[0], cu_seqlens=ends)  # what documents are, cut
    masked = ac.ops.document_attention(q, k, v, variants()["document_attention"]["document"])
    assert torch.allclose(packed, masked[0], atol=1e-5)
    print("documents in one sequence equal packed sequences")


if __name__ == "__main__":
    main()
