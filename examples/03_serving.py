"""Serving: pages shared by all sequences, states in slots, prefill and decode in one call."""

import torch

import attncc as ac

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule


def attention_in_pages():
    """Two sequences of different age: one sends its prompt while the other decodes a token."""
    sizes = {"B": 2, "Hkv": 2, "D": 64, "E": 64}
    cache = ac.PagedCache.allocate(
        ATTENTION, sizes=sizes, capacity=128, page=16, dtype=torch.float32
    )
    cache.block_table.copy_(cache.block_table.flip(0))  # any pages will do, in any order
    first = torch.randn(3, 40, 8, 64)
    q, k, v = first[0], first[1][:, :2].contiguous(), first[2][:, :2].contiguous()
    ATTENTION(q, k, v, cache=cache, cu_seqlens=torch.tensor([0, 40, 40]))  # sequence 0 only

    new = torch.randn(3, 31, 8, 64)  # one more token of sequence 0, thirty of sequence 1
    q2, k2, v2 = new[0], new[1][:, :2].contiguous(), new[2][:, :2].contiguous()
    o = ATTENTION(q2, k2, v2, cache=cache, cu_seqlens=torch.tensor([0, 1, 31]))
    assert cache.lengths.tolist() == [41, 30]

    keys, values = torch.cat([k, k2[:1]]), torch.cat([v, v2[:1]])
    exact = ATTENTION.reference(q2[None, :1], keys[None], values[None])
    gap = (o[:1] - exact[0]).abs().max().item()
    print(f"a decoded token beside another sequence's prompt: error {gap:.1e}")
    assert gap < 1e-5


def states_in_slots():
    """Speculative decoding: four draft tokens, each state in a slot of its own, two accepted."""
    pool = torch.zeros(8, 4, 64, 64)
    args = [torch.nn.functional.normalize(torch.randn(1, 4, 2, 64), dim=-1) for _ in range(2)]
    args += [torch.randn(1, 4, 4, 64), -torch.rand(1, 4, 4), torch.rand(1, 4, 4)]
    slots, drafts = (
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([[4, 5, 6, 7]], dtype=torch.int32),
    )
    GDR.decode(*args, s=ac.StatePool(pool, slots, out_slots=drafts))

    accepted = GDR.reference(*(x[:, :2] for x in args)).s  # the state after two tokens: slot 5
    gap = (pool[5] - accepted[0]).abs().max().item()
    print(f"rolling back to the second draft token is naming its slot: error {gap:.1e}")
    assert gap < 1e-5
    assert not pool[:4].any(), "slots that nobody names stay as they were"


def main():
    """Run both."""
    torch.manual_seed(0)
    attention_in_pages()
    states_in_slots()


if __name__ == "__main__":
    main()
