"""The library's recurrences: a prompt in one call, then token by token from the state it left.

Every op is a declaration of a few lines in ``dsl/library``; each call below names its arguments as
its declaration does. States are ``[K, V]`` unless another layout is asked for.
"""

import torch
from torch.nn.functional import logsigmoid, normalize

import attncc as ac

B, T, PROMPT, H, K, V = 2, 40, 33, 2, 16, 24


def arguments():
    """Arguments by op, ``[B, T, H, .]``; what has no T belongs to the model."""
    q, k, a = (normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(3))
    v, wide = torch.randn(B, T, H, V), torch.randn(B, T, 2 * H, V)
    gate = logsigmoid(torch.randn(B, T, H) + 3)  # natural logarithms, at most 0
    gates = logsigmoid(torch.randn(B, T, H, K) + 3)  # one for each key element
    rate = 2 * torch.rand(B, T, H)  # up to 2: a whole reflection
    qkv = {"q": q, "k": k, "v": v}
    return {
        "linear_attention": qkv,
        "retnet": {**qkv, "gamma": 1 - 2.0 ** (-5 - torch.arange(H))},
        "mamba2": {
            "x": wide, "dt": torch.randn(B, T, 2 * H), "a_log": torch.randn(2 * H), "b": k,
            "c": q, "d": torch.ones(2 * H), "dt_bias": torch.zeros(2 * H),
        },
        "gla": {**qkv, "g": gates},
        "delta_rule": {**qkv, "beta": rate},
        "gated_delta_rule": {**qkv, "g": gate, "beta": rate},
        "gated_delta_product": {
            "q": q, "k": normalize(torch.randn(B, 3 * T, H, K), dim=-1),
            "v": torch.randn(B, 3 * T, H, V), "g": gate, "beta": 2 * torch.rand(B, 3 * T, H),
        },
        "kda": {**qkv, "g": gates, "beta": rate},
        "rwkv7": {"r": q, "w": gates, "k": k, "v": v, "a": -a, "b": a * torch.rand(B, T, H, K)},
        "hgrn": {"x": torch.randn(B, T, H * V), "g": logsigmoid(torch.randn(B, T, H * V))},
        "comba": {**qkv, "p": 0.8 * k, "g": gate, "beta": rate, "d": torch.full((H,), 0.1)},
        "gated_oja": {**qkv, "v": normalize(v, dim=-1), "g": logsigmoid(v + 3), "beta": rate},
    }  # fmt: skip


def rows(args, low, high):
    """Tokens ``low .. high``; an argument with N rows a token has N times as many."""
    found = {}
    for name, x in args.items():
        each = x.shape[1] // T if x.dim() > 2 else 0
        found[name] = x[:, low * each : high * each] if each else x
    return found


def main() -> None:
    """Each op whole, then in pieces; then the options that several of them share."""
    torch.manual_seed(0)
    for name, args in arguments().items():
        op = getattr(ac.ops, name)
        state, whole = op(**args)
        carried, first = op(**rows(args, 0, PROMPT))
        outs = [first]
        for t in range(PROMPT, T):
            carried, o = op.decode(**rows(args, t, t + 1), s=carried)
            outs.append(o)
        gap = (torch.cat(outs, 1) - whole).abs().max() / whole.abs().max()
        assert gap < 1e-4 and (carried - state).abs().max() < 1e-4 * state.abs().max()
        print(f"{name:20} state {list(state.shape)!s:18} in pieces: {gap:.0e} of the largest")

    args = arguments()["kda"]
    kda, turned = ac.ops.kda, ac.ops.kda.with_patterns(s="B (Hk G) V K")
    scaled = {**args, "q": 5 * args["q"], "k": 3 * args["k"]}
    state, o = kda(**args)
    other, same = turned(**scaled, l2norm=True)  # norms in the kernel, a state of [V, K]
    assert torch.allclose(other.mT, state, atol=1e-4) and torch.allclose(same, o, atol=1e-4)
    half, _ = kda(**args, s=torch.zeros(B, H, K, V, dtype=torch.bfloat16))
    print(f"kda as [V, K] {list(other.shape)}, and with a state kept as {half.dtype}")

    simple = ac.ops.gla.with_patterns(g="B T H")  # one gate a head
    gates = arguments()["gla"] | {"g": logsigmoid(torch.randn(B, T, H) + 3)}
    print(f"simple GLA {list(simple(**gates)[1].shape)}")


if __name__ == "__main__":
    main()
