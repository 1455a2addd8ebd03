"""torch.compile: a decoding layer with a cache and a state, one graph for every length."""

import torch

import attncc as ac

ATTENTION, GDR = ac.ops.attention, ac.ops.gated_delta_rule
HEADS, DIM = 4, 32


class Layer(torch.nn.Module):
    """Attention over a cache, then a delta rule whose states lie in a pool."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM, bias=False)

    def forward(self, x, cache, pool):
        """Both ops write in place, inside the graph; each is one node of it."""
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, DIM)).unbind(-3)
        o = ATTENTION.decode(q, k, v, cache)
        k = torch.nn.functional.normalize(k, dim=-1)
        o = GDR.decode(q, k, o, s=pool)
        return x + o.flatten(-2)


def run(layer, prompt, steps):
    """A prompt and some tokens after it; everything that was written comes back."""
    sizes = {"B": 1, "Hkv": HEADS, "D": DIM, "E": DIM}
    cache = ac.PagedCache.allocate(
        ATTENTION, sizes=sizes, capacity=64, page=16, dtype=torch.float32
    )
    pool = ac.StatePool(torch.zeros(2, HEADS, DIM, DIM), torch.tensor([1], dtype=torch.int32))
    x = layer(prompt, cache, pool)
    for _ in range(steps):
        x = layer(torch.tanh(x[:, -1:]), cache, pool)
    return x, cache.pages["k"], cache.lengths, pool.pool


@torch.no_grad()
def main() -> None:
    """Compile once, decode after prompts of several lengths, compare with the layer as it is."""
    torch.manual_seed(0)
    graphs = []

    def backend(graph, _):
        """Stands for a compiler ("inductor" is torch's own); counts what it is given."""
        graphs.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for tokens in (5, 8, 13, 21):
        prompt = torch.randn(1, tokens, HEADS * DIM)
        found, expected = run(compiled, prompt, steps=6), run(layer, prompt, steps=6)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        print(f"prompt {tokens:2}: lengths {found[2].tolist()}, as without compiling")
    ours = {str(node) for graph in graphs for node in graph if "attncc" in str(node)}
    print(f"{len(graphs)} graphs (first prompt, one token, any prompt), and in them the nodes")
    print("\n".join(f"  {node}" for node in sorted(ours)))
    assert len(graphs) == 3


if __name__ == "__main__":
    main()
