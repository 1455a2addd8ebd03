"""Sparse attention: a light index reads every key, the latent attention only what it picks.

What DeepSeek-V3.2-Exp does in each layer, as one declaration: quantised queries and keys of the
index, an exact top-k, then attention over the latent rows that were picked, which never forms the
score of any other row.
"""

import torch

import attncc as ac
from attncc.dsl.axes import parse

SPARSE = ac.ops.sparse_mla
HEADS, WIDTH, LATENT, PART, INDEX_HEADS = 4, 32, 64, 16, 8
SIZES = {"B": 1, "Di": WIDTH, "R": LATENT, "P": PART}


@ac.op(out="B T J")
def picks(qi=ac.Activation("B T Hi Di"), w=ac.Activation("B T Hi"), ki=ac.Cache("B S Di")):
    """The index alone: which eight rows each token would read."""
    index = ac.sum(w * ac.relu(ac.dot(qi, ki, "Di")), "Hi")
    return ac.topk(index, "S", k=8, where=ac.causal)


def layer(tokens):
    """What a layer's projections give for some tokens; the index's query quantised by block."""
    q = torch.randn(1, tokens, INDEX_HEADS, WIDTH)
    stored = ac.QuantisedTensor.of(q, parse("B S Hi Di"), ac.Quantised(block=WIDTH))
    scales = stored.scales.view(1, INDEX_HEADS, tokens).mT  # of [B Hi 1 S]
    projected = torch.randn(1, tokens, INDEX_HEADS)
    return {
        "qi": stored.data,  # e4m3: its scales are in the weights
        "w": projected * INDEX_HEADS**-0.5 * scales * WIDTH**-0.5,
        "ki": torch.randn(1, tokens, WIDTH),
        "qc": torch.randn(1, tokens, HEADS, LATENT),
        "qr": torch.randn(1, tokens, HEADS, PART),
        "c": torch.randn(1, tokens, LATENT),
        "r": torch.randn(1, tokens, PART),
    }


def prompt_and_decode():
    """A prompt and two tokens, with keys of the index in e4m3: the oracle reads the same bits."""
    stored: dict[str, torch.dtype | ac.Quantised] = {
        "ki": ac.Quantised(block=WIDTH, scale="ue8m0"),
        "c": torch.float32,
        "r": torch.float32,
    }
    cache = ac.PagedCache.allocate(SPARSE, sizes=SIZES, capacity=64, page=16, dtype=stored)
    scale = (LATENT + PART) ** -0.5
    SPARSE(**layer(40), scale=scale, cache=cache)
    for _ in range(2):
        new = layer(1)
        exact = SPARSE.reference(**new, scale=scale, cache=cache)
        o = SPARSE.decode(**new, scale=scale, cache=cache)
        gap = (o - exact).abs().max().item()
        print(f"token {int(cache.lengths)}: error {gap:.1e}")
        assert gap < 1e-4


def what_is_picked():
    """Greatest score first, of equal ones the first position, -1 where nothing more is visible."""
    x = layer(20)
    found = picks(qi=x["qi"], w=x["w"], ki=x["ki"])
    assert found.dtype == torch.int32 and found.shape == (1, 20, 8)
    print("token 2 may read", found[0, 2].tolist())
    assert sorted(found[0, 2].tolist()) == [-1] * 5 + [0, 1, 2]
    same = picks(qi=x["qi"], w=torch.zeros_like(x["w"]), ki=x["ki"])
    assert same[0, 19].tolist() == list(range(8)), "of equal scores the first positions"


def main():
    """Run both."""
    torch.manual_seed(0)
    prompt_and_decode()
    what_is_picked()


if __name__ == "__main__":
    main()
