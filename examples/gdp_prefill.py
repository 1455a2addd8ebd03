"""Gated DeltaProduct prefill with FlashInfer's call: on a CPU, on a GPU, and checked by hand."""

import math
from typing import Any

import torch

import attncc as ac

TOKENS, HEADS, K, V = (120, 0, 80), 4, 128, 128
N = 2  # Householder updates a token


def arguments(device: str) -> dict[str, Any]:
    """Three packed prompts, one of them empty; keys, values and betas have N rows a token."""
    torch.manual_seed(0)
    total = sum(TOKENS)
    unit = torch.nn.functional.normalize
    found = {
        "q": unit(torch.randn(total, HEADS, K), dim=-1).bfloat16(),
        "k": unit(torch.randn(total * N, HEADS, K), dim=-1).bfloat16(),
        "v": torch.randn(total * N, HEADS, V).bfloat16(),
        "g": torch.sigmoid(torch.randn(total, HEADS) + 3),  # alpha itself, not its logarithm
        "beta": torch.rand(total * N, HEADS),
        "initial_state": torch.randn(len(TOKENS), HEADS, V, K),  # V-major
        "cu_seqlens": torch.tensor([0, *TOKENS]).cumsum(0),  # over tokens, not rows
    }
    return {name: x.to(device) for name, x in found.items()}


def last_of_the_first(x: dict[str, Any]) -> torch.Tensor:
    """The first prompt's last output, one token after the other in fp64."""
    s: torch.Tensor = x["initial_state"][0].double()
    for t in range(TOKENS[0]):
        s = s * x["g"][t].double()[:, None, None]
        for j in range(t * N, t * N + N):
            k, v, beta = (x[name][j].double() for name in ("k", "v", "beta"))
            new = beta[:, None] * (v - (s @ k[:, :, None])[..., 0])
            s = s + new[:, :, None] * k[:, None, :]
    q: torch.Tensor = x["q"][TOKENS[0] - 1].double()
    return (s @ q[:, :, None])[..., 0] / math.sqrt(K)


def main() -> None:
    """The document's call on every device there is, then one token more with states in a pool."""
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        x = arguments(device)
        o, state = ac.gdp.chunk_gated_delta_product(
            x["q"], x["k"], x["v"], x["g"], x["beta"], num_householder=N,
            initial_state=x["initial_state"], output_final_state=True, cu_seqlens=x["cu_seqlens"],
        )  # fmt: skip
        error = (o[TOKENS[0] - 1].double() - last_of_the_first(x)).abs().max().item()
        print(f"{device}: o {tuple(o.shape)} {o.dtype}, error against a loop {error:.1e}")
        assert error < 5e-3
        assert torch.equal(state[1], x["initial_state"][1]), "an empty prompt keeps its state"

        # One more token of each prompt that is not empty, its state in a slot of a pool.
        pool, slots = state.clone(), torch.tensor([0, 2], dtype=torch.int32, device=device)
        step = {n: x[n][:2][:, None] for n in ("q", "g")}
        step |= {n: x[n][: 2 * N].unflatten(0, (2, N)) for n in ("k", "v", "beta")}
        more = ac.gdp.decode_gated_delta_product(
            **step, num_householder=N, state=pool, state_indices=slots
        )
        assert torch.equal(pool[1], state[1]), "nobody named slot 1"
        print(f"{device}: one token more {tuple(more.shape)}")
    try:
        ac.gdp.chunk_gated_delta_product(
            **arguments("cpu"), num_householder=N, backend="cudnn"
        )  # fmt: skip
    except ac.AttnccError as why:
        print(f"cudnn: {why.message}")


if __name__ == "__main__":
    main()
